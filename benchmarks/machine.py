"""What a figure depends on besides the program: processor, versions, commit, load; and a process's memory.

Owns: reading /proc, versions of packages, the commit. Refuses: measuring anything itself."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20


def cpu_model() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def results_file() -> Path:
    """benchmarks/results/<cpu-model>.csv."""
    name = re.sub(r"\(r\)|\(tm\)|\bcpu\b|@.*", " ", cpu_model().lower())
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", name).strip("-") + ".csv")


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


def load() -> float:
    """Processes that wanted to run during the last minute, on average."""
    return os.getloadavg()[0]


def warn_if_busy() -> None:
    """Says so if other work disturbs the figures."""
    if load() > 0.3 * cpus():
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
    text = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"^(VmHWM|RssAnon|RssFile):\s+(\d+) kB", text, re.MULTILINE))
    names = {"peak": "VmHWM", "anonymous": "RssAnon", "file": "RssFile"}
    return {name: 1024 * int(found[field]) for name, field in names.items()}
