"""Where a process's memory and threads are: on one NUMA node, and locked against being swapped out.

Owns: the calls to the system for both. Refuses: deciding; nobody is bound who has not asked. Neither changes
a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from colibri.errors import ArgumentError, MemoryPlanError

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


def nodes() -> dict[int, set[int]]:
    """The CPUs of each NUMA node that has some."""
    found = {}
    for directory in sorted(_NODES.glob("node[0-9]*")):
        with contextlib.suppress(OSError):
            cpus = _cpus((directory / "cpulist").read_text("ascii"))
            if cpus:
                found[int(directory.name[4:])] = cpus
    return found


@contextlib.contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """The calling thread runs on a node and takes memory there alone; threads that it starts meanwhile stay
    so for ever, and so does memory. None: nothing is changed."""
    if node is None:
        yield
        return
    known, before = nodes(), os.sched_getaffinity(0)
    if node not in known:
        names = ", ".join(map(str, known)) or "none that the system tells of"
        raise ArgumentError(f"numa: expected a node of this machine ({names}), found {node}")
    if not known[node] & before:
        raise ArgumentError(f"numa: this process may not run on any CPU of node {node} (its affinity mask)")
    _set_policy(_MPOL_BIND, node)
    try:
        os.sched_setaffinity(0, known[node] & before)
        yield
    finally:
        os.sched_setaffinity(0, before)
        _set_policy(_MPOL_DEFAULT, node)


def lock_memory() -> None:
    """Pages of this process, once they are used, are never swapped out or dropped, from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryPlanError(
            f"mlock: the system refused to lock this process's memory ({reason}); raise the limit (ulimit "
            "-l, LimitMEMLOCK of a service, --ulimit memlock of a container) or leave mlock out"
        )


def _set_policy(policy: int, node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ArgumentError(f"numa: not known how to bind memory on {platform.machine()}; use numactl")
    library = ctypes.CDLL(None, use_errno=True)
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(64 * words + 1)
    given = (ctypes.byref(mask), bits) if policy == _MPOL_BIND else (None, 0)
    if library.syscall(ctypes.c_long(number), ctypes.c_long(policy), *given) != 0:
        raise ArgumentError(
            f"numa: the system refused to bind memory to node {node}: {os.strerror(ctypes.get_errno())}"
        )


def _cpus(text: str) -> set[int]:
    """ "0-3,8" as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
