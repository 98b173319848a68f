"""Checks of what a program passes to a model: how to open it, and ids.

Owns: their bounds as texts; Opening, what load() takes beside the model, checked before anything is read or
converted. Refuses: sampling parameters (sampling.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri._native import Ids
from colibri.errors import ArgumentError
from colibri.memory import bytes_of

IdList = Sequence[int] | npt.NDArray[np.integer[Any]]

RESIDENCIES = {"mapped": 0, "resident": 1, "streamed": 2}  # colibri_residency
POLICIES = {"lfru": 0, "lru": 1}  # colibri_expert_policy
KV_TYPES = {"f32": 0, "f16": 1}  # colibri_kv_type
PREFETCHES = {None: 0, True: 1, False: 2}  # colibri_prefetch; None: as is found to be quicker


def bounded(name: str, value: object, high: int, *, optional: bool = True) -> int | None:
    """The value itself; None stays None where it stands for the default."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= high:
        raise ArgumentError(f"{name}: expected an integer from 1 to {high}, found {value!r}")
    return int(value)


@dataclass(frozen=True, slots=True)
class Opening:
    """How a model is opened: the keywords of load(), by their names. Making one checks all of it: bounds,
    kinds, and choices that would have no effect."""

    threads: int | None = None
    context: int | None = None
    max_batch: int = 1
    chunk: int | None = None
    residency: str = "auto"
    prefetch: bool | None = None
    pin: bool = False
    progress: Callable[[int, int], object] | None = None  # bytes done, bytes in all
    memory: int | str | None = None
    expert_slots: int | None = None
    expert_policy: str | None = None
    lanes: int | None = None
    numa: int | None = None
    mlock: bool = False
    kv_type: str = "f32"

    def __post_init__(self) -> None:
        self.counts()
        self.memory_limit()
        self.node()
        for name, value in (("prefetch", self.prefetch), ("pin", self.pin), ("mlock", self.mlock)):
            if not isinstance(value, bool) and not (name == "prefetch" and value is None):
                raise ArgumentError(f"{name}: expected True or False, found {value!r}")
        _one_of("residency", self.residency, ("auto", *RESIDENCIES))
        _one_of("kv_type", self.kv_type, KV_TYPES)
        if self.expert_policy is not None:
            _one_of("expert_policy", self.expert_policy, POLICIES)
        for name in ("expert_slots", "expert_policy", "lanes"):
            value = getattr(self, name)
            if value is not None and self.residency in ("mapped", "resident"):
                raise ArgumentError(
                    f"{name}={value!r} has no effect with residency={self.residency!r}: experts are not "
                    "streamed"
                )
        if self.progress is not None and not callable(self.progress):
            raise ArgumentError(
                f"progress: expected a function of two numbers (bytes), found {self.progress!r}"
            )
        if self.residency == "resident" and self.prefetch is not None:
            raise ArgumentError(
                f"prefetch={self.prefetch} has no effect with residency='resident', which copies weights at "
                "once"
            )
        if self.progress is not None and self.prefetch is False and self.residency != "streamed":
            raise ArgumentError("progress has no effect with prefetch=False: no weights are brought in")
        if self.pin and self.threads is not None:
            if self.threads == 1:
                raise ArgumentError(
                    "pin=True has no effect with threads=1: the caller's thread is not pinned"
                )
            if self.threads > (cores := physical_cores()):
                raise ArgumentError(
                    f"pin=True: expected at most {cores} threads, the physical cores that this process may "
                    f"use, found {self.threads}"
                )

    def counts(self) -> dict[str, int | None]:
        """The numbers; None stands for the default."""
        return {
            "threads": bounded("threads", self.threads, 256),
            "context": bounded("context", self.context, 2**30),
            "max_batch": bounded("max_batch", self.max_batch, 4096, optional=False),
            "chunk": bounded("chunk", self.chunk, 4096),
            "expert_slots": bounded("expert_slots", self.expert_slots, 2**30),
            "lanes": bounded("lanes", self.lanes, 16),
        }

    def node(self) -> int | None:
        """The NUMA node; which there are is for placement.py to say."""
        if self.numa is not None and (isinstance(self.numa, bool) or not isinstance(self.numa, int)):
            raise ArgumentError(f"numa: expected the number of a node, found {self.numa!r}")
        return self.numa

    def memory_limit(self) -> int:
        """Bytes; 0: none was given."""
        if self.memory is None:
            return 0
        text = isinstance(self.memory, str)
        given = max(1, bytes_of("memory", str(self.memory))) if text else self.memory
        limit = bounded("memory", given, 2**62, optional=False)
        assert limit is not None
        return limit


def _one_of(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")


def physical_cores() -> int:
    """Those that this process may use; hardware threads of one core count once."""
    found = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        found.add(siblings.strip())
    return len(found)


def checked_ids(ids: IdList, n_vocab: int) -> Ids:
    """Contiguous int32 [n], n at least 1, every id a row of the embedding."""
    if isinstance(ids, str | bytes):
        raise ArgumentError(
            "ids: expected a list of integers, found a text; Model.tokenizer.encode makes ids of it"
        )
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"ids: expected a list of integers, found {ids!r:.80}")
    if not array.size:
        raise ArgumentError("ids: expected at least one, found none")
    wrong = np.flatnonzero((array < 0) | (array >= n_vocab))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(f"ids[{at}]: expected 0 to {n_vocab - 1} (n_vocab - 1), found {array[at]}")
    return np.ascontiguousarray(array, np.int32)
