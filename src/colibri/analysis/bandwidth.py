"""How fast this machine reads memory: threads that each reduce their share of a large numpy array.

Owns: the probe. Its buffer is larger than the last-level cache; numpy asks for huge pages for it and lets
other threads run while it reduces. Besides the rate from memory it gives that of a piece that fits in the
first-level cache: only if this is clearly higher does the first one measure memory.
Refuses: writing, and any other access than forward reading.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri import memory
from colibri.analysis import machine

SMALLEST_BYTES = 256 << 20
_LARGEST_BYTES = 1 << 30
_CACHED_BYTES = 16 << 10  # half of a small first-level cache
_ROUNDS = 3
NAME = "numpy.maximum.reduce over int32, each thread its share of one buffer, best of 3 rounds"


@dataclass(frozen=True, slots=True)
class Reading:
    """One probe."""

    threads: int
    gb_per_s: float  # 1e9 bytes, from memory, all threads together
    cached_gb_per_s: float  # one thread, from the first-level cache

    @property
    def memory_bound(self) -> bool:
        """Whether the probe's own arithmetic left room for the memory to be the limit."""
        return self.cached_gb_per_s > 1.25 * self.gb_per_s / self.threads


def buffer_bytes() -> int:
    """Bytes to read: twice the last-level cache and at least SMALLEST_BYTES, a quarter of the memory that may
    still be taken at most."""
    wanted = min(max(SMALLEST_BYTES, 2 * (machine.cache_bytes() or 0)), _LARGEST_BYTES)
    limits = (memory.available_bytes(), memory.address_bytes())
    return max(1 << 20, min([wanted, *(limit // 4 for limit in limits if limit is not None)]))


class Probe:
    """The buffer, kept between readings: filling it takes longer than reading it."""

    def __init__(self) -> None:
        self.bytes = buffer_bytes()
        self._data = np.ones(self.bytes // 4, np.int32)  # written, so that every page is there

    def read(self, threads: int) -> Reading:
        """The rate now."""
        shares = np.array_split(self._data, threads)
        with ThreadPoolExecutor(threads) as pool:
            seconds = min(self._round(pool, shares) for _ in range(_ROUNDS))
        return Reading(threads, self._data.nbytes / seconds / 1e9, self._cached())

    @staticmethod
    def _round(pool: ThreadPoolExecutor, shares: list[npt.NDArray[np.int32]]) -> float:
        started = time.perf_counter()
        list(pool.map(np.maximum.reduce, shares))
        return time.perf_counter() - started

    def _cached(self) -> float:
        piece = self._data[: _CACHED_BYTES // 4]
        # One call for many passes: a view that repeats the piece, so that calls cost little beside reading.
        passes = np.broadcast_to(piece, (256, len(piece)))
        best = min(_seconds(passes) for _ in range(_ROUNDS))
        return float(passes.size * 4 / best / 1e9)


def _seconds(array: npt.NDArray[np.int32]) -> float:
    started = time.perf_counter()
    np.maximum.reduce(array, axis=1)
    return time.perf_counter() - started
