"""How much memory this process may still take, and what refusals of the system mean.

Owns: sizes as texts; the least of what the machine has and what its control group (a container's limit)
leaves, as colibri_init asks again; its limit of addresses (ulimit -v). Refuses: taking memory.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from colibri.errors import ArgumentError, ColibriError, MemoryPlanError, ModelIOError

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNITS = {"": 1, "B": 1} | {
    name: factor**power
    for power, letter in enumerate("KMGT", 1)
    for name, factor in ((letter, 1024), (letter + "IB", 1024), (letter + "B", 1000))
}


def bytes_of(name: str, text: str) -> int:
    """20GiB, 512M, 3e9 as bytes; K, M, G and T stand for KiB ... TiB."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][0-9]{1,2})?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else None
    if match is None or unit not in _UNITS:
        raise ArgumentError(f"{name}: expected a size such as 20GiB or 512M, found {text!r}")
    return int(float(match[1]) * _UNITS[unit])


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not tell."""
    return 1024 * (_number(_PROC / "self" / "status", r"^VmRSS:\s+(\d+)") or 0)


def available_bytes() -> int | None:
    """None where the system does not tell."""
    return min(_limits(), default=None)


def address_bytes() -> int | None:
    """What `ulimit -v` leaves; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _number(_PROC / "self" / "status", r"^VmSize:\s+(\d+)")
    return None if limit == resource.RLIM_INFINITY or used is None else max(0, limit - 1024 * used)


def refusal(error: BaseException) -> ColibriError | None:
    """The sentence for what numpy and Python raise where a limit stops them; None for any other error."""
    if isinstance(error, MemoryError):
        return MemoryPlanError(
            f"the system refused memory ({str(error) or 'no size is told'}): a limit (ulimit -v, a "
            "container's) or the machine's memory is too small for this"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return ModelIOError("the system refused a thread: raise its limit (ulimit -u, ulimit -v)")
    return None


def _limits() -> Iterator[int]:
    machine = _number(_PROC / "meminfo", r"^MemAvailable:\s+(\d+)")
    if machine is not None:
        yield 1024 * machine
    # Version 2 of control groups, then version 1. Page cache is charged to the group, but given back.
    yield from _group(r"^0::(.*)$", _GROUPS, "memory.max", "memory.current", "file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache")
    yield from _group(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$", _GROUPS / "memory", *v1)


def _group(line: str, mount: Path, limit: str, use: str, cache: str) -> Iterator[int]:
    """What the group and each one above leave: all hold. Inside a name space the group is the mount."""
    match = re.search(line, _text(_PROC / "self" / "cgroup"), re.MULTILINE)
    names = match[1].strip("/").split("/") if match else []
    for depth in range(len(names), -1, -1):
        directory = mount.joinpath(*names[:depth])
        most, held = _number(directory / limit, r"(\d+)"), _number(directory / use, r"(\d+)")
        if most is not None and held is not None:
            cached = _number(directory / "memory.stat", rf"^{cache} (\d+)") or 0
            yield max(0, most - max(0, held - cached))


def _number(path: Path, pattern: str) -> int | None:
    match = re.search(pattern, _text(path), re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
