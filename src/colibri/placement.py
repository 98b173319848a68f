"""Where a process's memory and threads are: on one NUMA node, and locked against being swapped out.

Owns: the calls to the system for both. Refuses: deciding; nobody is bound who has not asked. Neither changes
a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from colibri.errors import ArgumentError, MemoryPlanError

_NODES = Path("/sys/devices/system/node")
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236)}  # set_mempolicy, get_mempolicy
_MPOL_BIND = 2
_NODE_BITS = 4096  # more than a kernel is built for
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
    policy = _policy()
    _set_policy(_MPOL_BIND, 1 << node, f"bind memory to node {node}")
    try:
        os.sched_setaffinity(0, known[node] & before)
        yield
    finally:
        os.sched_setaffinity(0, before)
        _set_policy(*policy, "go back to the memory policy before")


def lock_memory() -> None:
    """Pages of this process, once they are used, are never swapped out or dropped, from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryPlanError(
            f"mlock: the system refused to lock this process's memory ({reason}); raise the limit (ulimit "
            "-l, LimitMEMLOCK of a service, --ulimit memlock of a container) or leave mlock out"
        )


def _policy() -> tuple[int, int]:
    """The calling thread's: mode, with its flags, and nodes as bits."""
    mode, mask = ctypes.c_int(), (ctypes.c_ubyte * (_NODE_BITS // 8))()
    _call(1, "tell the memory policy", ctypes.byref(mode), mask, _NODE_BITS, None, 0)
    return mode.value, int.from_bytes(bytes(mask), sys.byteorder)


def _set_policy(mode: int, nodes: int, what: str) -> None:
    mask = (ctypes.c_ubyte * (_NODE_BITS // 8)).from_buffer_copy(
        nodes.to_bytes(_NODE_BITS // 8, sys.byteorder)
    )
    _call(0, what, mode, mask if nodes else None, _NODE_BITS if nodes else 0)


def _call(which: int, what: str, *given: object) -> None:
    if platform.machine() not in _CALLS:
        raise ArgumentError(f"numa: not known how to bind memory on {platform.machine()}; use numactl")
    library = ctypes.CDLL(None, use_errno=True)
    long = [ctypes.c_long(one) if isinstance(one, int) else one for one in given]
    if library.syscall(ctypes.c_long(_CALLS[platform.machine()][which]), *long) != 0:
        raise ArgumentError(f"numa: the system refused to {what}: {os.strerror(ctypes.get_errno())}")


def _cpus(text: str) -> set[int]:
    """ "0-3,8" as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
