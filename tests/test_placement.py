"""NUMA nodes and locked memory: what is asked for holds, what cannot be is refused, and nothing stays behind.

Owns: load(numa=, mlock=). Refuses: speed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import colibri
from colibri import placement
from colibri.errors import ArgumentError, MemoryPlanError

IDS = [5, 6, 7, 8]
NODES = placement.nodes()
bound = pytest.mark.skipif(not NODES, reason="the system tells of no NUMA node")


def logits(**options: object) -> bytes:
    with colibri.load("demo", **options) as model:  # type: ignore[arg-type]
        return model.logits(IDS).tobytes()


@bound
def test_bits_do_not_depend_on_the_node_and_the_caller_is_set_free() -> None:
    before = os.sched_getaffinity(0)
    assert logits(numa=min(NODES)) == logits()
    assert os.sched_getaffinity(0) == before


@bound
def test_memory_is_bound_while_the_model_is_opened() -> None:
    with placement.on_node(min(NODES)):
        maps = Path("/proc/self/numa_maps")
        if not maps.exists():
            pytest.skip("the kernel does not tell where memory is bound")
        assert f"bind:{min(NODES)}" in maps.read_text()
    assert f"bind:{min(NODES)}" not in Path("/proc/self/numa_maps").read_text().splitlines()[0]


@bound
@pytest.mark.parametrize(
    "mode", [0, 1, 2, 3, 4, 1 | 1 << 15]
)  # default ... local, preferred with static nodes
def test_the_memory_policy_before_comes_back(mode: int) -> None:
    nodes = 0 if mode in (0, 4) else 1 << min(NODES)
    before = placement._policy()
    try:
        placement._set_policy(mode, nodes, "try")
        with placement.on_node(min(NODES)):
            assert placement._policy() == (2, 1 << min(NODES))
        assert placement._policy() == (mode, nodes)
    finally:
        placement._set_policy(*before, "go back")


@pytest.mark.parametrize(
    ("node", "text"),
    [(4711, "expected a node of this machine"), ("0", "the number of a node"), (True, "node")],
)
def test_other_nodes_are_refused(node: object, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"numa: .*{text}"):
        colibri.load("demo", numa=node)  # type: ignore[arg-type]


def test_cpu_lists_are_read() -> None:
    assert placement._cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert placement._cpus("\n") == set()


def test_locked_memory_counts_and_keeps_bits() -> None:
    """In a process of its own: locking cannot be undone."""
    code = (
        "import colibri, hashlib\n"
        "with colibri.load('demo', mlock=True, residency='streamed') as m:\n"
        f"    print(hashlib.sha256(m.logits({IDS}).tobytes()).hexdigest())\n"
        "print([l for l in open('/proc/self/status') if l.startswith('VmLck')][0].split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "mlock: the system refused" in done.stderr:
        pytest.skip("locking is not allowed here")
    digest, locked = done.stdout.split()
    assert digest == hashlib.sha256(logits()).hexdigest() and int(locked) > 10_000


def test_a_refused_lock_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the limit is too low; a privileged process has none."""

    class Library:
        @staticmethod
        def mlockall(_flags: int) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_given, **_options: Library)
    with pytest.raises(MemoryPlanError, match=r"mlock: .*Cannot allocate memory.*ulimit -l"):
        placement.lock_memory()
