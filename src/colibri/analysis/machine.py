"""What a figure depends on besides the program: processor, caches, memory, load; and a process's own memory.

Owns: reading /proc and /sys. Refuses: measuring speed (bandwidth.py does).
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from colibri import memory

_PROCESS_FIELDS = {"peak": "VmHWM", "anonymous": "RssAnon", "file": "RssFile"}


def cpu_model() -> str:
    """The processor's name."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """Processes that wanted to run during the last minute, on average."""
    return os.getloadavg()[0]


def is_busy() -> bool:
    """Whether other work disturbs figures of speed."""
    return load() > 0.3 * cpus()


def cache_bytes() -> int | None:
    """Size of the last-level cache of processor 0; None where the system does not tell."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        match = re.fullmatch(r"(\d+)([KMG]?)\s*", "".join(_lines(str(index / "size"))))
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


def memory_bytes() -> dict[str, int | None]:
    """total memory of the machine, and what of it this process may still take."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", "\n".join(_lines("/proc/meminfo")), re.MULTILINE)
    return {"total": 1024 * int(match[1]) if match else None, "available": memory.available_bytes()}


def process_bytes() -> dict[str, int] | None:
    """Of this process: peak (most that was resident), anonymous and file (resident now); None where the
    system does not tell."""
    text = "\n".join(_lines("/proc/self/status"))
    found = dict(re.findall(r"^(VmHWM|RssAnon|RssFile):\s+(\d+) kB", text, re.MULTILINE))
    if len(found) != len(_PROCESS_FIELDS):
        return None
    return {name: 1024 * int(found[field]) for name, field in _PROCESS_FIELDS.items()}


def huge_pages() -> str | None:
    """The system's setting for transparent huge pages: always, madvise or never."""
    match = re.search(r"\[(\w+)\]", "".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled")))
    return match[1] if match else None


def describe() -> dict[str, Any]:
    """All of it; units are in the key names."""
    bytes = memory_bytes()
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cpus": cpus(),
        "last_level_cache_bytes": cache_bytes(),
        "memory_bytes": bytes["total"],
        "memory_available_bytes": bytes["available"],
        "transparent_huge_pages": huge_pages(),
        "load_1_min": round(load(), 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
