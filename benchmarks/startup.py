"""How long until Colibri is there: import, first token of a cold process, installation, size of the wheel.

Owns: fresh processes and their clocks; medians. Refuses: speed once it runs (decode.py).
Cold means a new process; files are in the page cache after the first, unmeasured run.

    python benchmarks/startup.py [MODEL] [--runs 15] [--install]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

# What each process runs. The first argument is the model; what it prints is one or more time.time().
BARE = "import time; print(time.time())"
IMPORT = "import time; t = time.time(); import colibri; print(t, time.time())"
FIRST_TOKEN = """
import sys, time
import colibri
imported = time.time()
with colibri.load(sys.argv[1]) as model:
    loaded = time.time()
    next(model.stream(sys.argv[2], max_tokens=1, temperature=0))
    print(imported, loaded, time.time())
"""


def python(code: str, *arguments: str) -> list[float]:
    """Runs code in a fresh interpreter: seconds from its start to each time that it prints."""
    started = time.time()
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(word) - started for word in found.split()]


def medians(runs: int, code: str, *arguments: str) -> list[float]:
    """Medians over fresh processes, after one that is not counted."""
    python(code, *arguments)
    rows = [python(code, *arguments) for _ in range(runs)]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def seconds(command: list[str]) -> float:
    """How long a command takes; what it says is shown only if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"startup.py: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def show(name: str, value: str) -> None:
    print(f"{name:58}{value:>12}", flush=True)


def processes(model: str, prompt: str, runs: int) -> None:
    """Import and first token."""
    (bare,) = medians(runs, BARE)
    before, after = medians(runs, IMPORT)
    show("start of the interpreter", f"{1000 * bare:.0f} ms")
    show("import colibri", f"{1000 * (after - before):.0f} ms")
    imported, loaded, first = medians(runs, FIRST_TOKEN, model, prompt)
    show(f"first token of {model}, from the start of the process", f"{1000 * first:.0f} ms")
    show("  of which: interpreter and import colibri", f"{1000 * imported:.0f} ms")
    show("  of which: load, with the modules that it needs", f"{1000 * (loaded - imported):.0f} ms")
    show("  of which: prompt and first token", f"{1000 * (first - loaded):.0f} ms")
    command = [sys.executable, "-m", "colibri", "run", model, prompt, "--max-tokens", "1"]
    seconds(command)
    whole = statistics.median(seconds(command) for _ in range(runs))
    show(f"colibri run {model} --max-tokens 1, whole process", f"{1000 * whole:.0f} ms")


def installation() -> None:
    """A new environment, `pip install .` in it, and the wheel. Downloads count unless pip has a copy."""
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory) / "venv"
        show("a new environment", f"{seconds([sys.executable, '-m', 'venv', str(environment)]):.1f} s")
        pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        show("pip install . in it", f"{seconds([*pip, 'install', str(machine.ROOT)]):.1f} s")
        wheels = Path(directory) / "wheels"
        command = [*pip, "wheel", "--no-deps", "-w", str(wheels), str(machine.ROOT)]
        show("pip wheel . --no-deps", f"{seconds(command):.1f} s")
        (wheel,) = wheels.glob("*.whl")
        show(wheel.name, f"{os.path.getsize(wheel) / 1e6:.2f} MB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measures import, first token and installation.")
    parser.add_argument("model", nargs="?", default="demo", help="model of the first token (%(default)s)")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--runs", type=int, default=15, help="processes for each figure (%(default)s)")
    parser.add_argument("--install", action="store_true", help="also install into a new environment")
    args = parser.parse_args()
    print(f"{machine.cpu_model()}, {machine.cpus()} processors, commit {machine.commit()}, {machine.today()}")
    machine.warn_if_busy()
    processes(args.model, args.prompt, args.runs)
    if args.install:
        installation()


if __name__ == "__main__":
    main()
