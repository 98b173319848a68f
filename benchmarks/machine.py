"""What a figure depends on besides the program: processor, versions, commit, load; and a process's memory.

Owns: versions of packages, the commit, names of result files; the rest is colibri.analysis.machine's.
Refuses: measuring anything."""

from __future__ import annotations

import datetime
import re
import subprocess
from importlib import metadata
from pathlib import Path

import colibri
from colibri.analysis.machine import cpu_model, cpus, is_busy, load, process_bytes

__all__ = [
    "commit",
    "cpu_model",
    "cpus",
    "load",
    "memory",
    "results_file",
    "ticks",
    "today",
    "version",
    "warn_if_busy",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20


def results_file(suffix: str = "") -> Path:
    """benchmarks/results/<cpu-model>-<kernel set><suffix>.csv: virtual machines hide which model it is."""
    with colibri.load("demo", threads=1) as model:
        name = re.sub(r"\(r\)|\(tm\)|\bcpu\b|@.*", " ", cpu_model().lower()) + " " + model.isa
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", name).strip("-") + f"{suffix}.csv")


def version(package: str) -> str:
    """Version of an installed package, or a dash."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def commit() -> str:
    """The short hash of HEAD, with a + if tracked files differ from it; a dash outside a git checkout."""
    commands = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        found = [subprocess.check_output(["git", *command], cwd=ROOT, text=True) for command in commands]
    except (OSError, subprocess.CalledProcessError):
        return "-"
    return found[0].strip() + ("+" if found[1] else "")


def today() -> str:
    return datetime.date.today().isoformat()


def warn_if_busy() -> None:
    """Says so if other work disturbs the figures."""
    if is_busy():
        print(
            f"The machine is not quiet: load {load():.1f} on {cpus()} processors (that of the last minute). "
            "Take the figures as a trial only.",
            flush=True,
        )


def ticks(process: int) -> tuple[int, int]:
    """Processor time so far, in ticks of the clock: of everything, and of one process."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = fields
    own = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return user + nice + system + interrupts + soft_interrupts + stolen, int(own[11]) + int(own[12])


def memory() -> dict[str, int]:
    """Bytes of this process: peak (most that was resident), anonymous and file (resident now)."""
    found = process_bytes()
    if found is None:
        raise SystemExit("machine.py: expected VmHWM, RssAnon and RssFile in /proc/self/status, found less")
    return found
