"""What an expert cache of n slots has to read, under LRU, LFRU and Belady's optimum.

The rules, which the engine follows:

- A slot holds one expert of any layer. Experts are numbered through: layer by layer, in each by index.
- Accesses come in steps: the distinct experts that one chunk uses in one layer, in ascending order. A step of
  more experts than there are slots is cut into waves of n experts in ascending order; else it is one wave.
- In a wave the experts that are resident are in use at once (hits). The missing ones, in ascending order,
  each take a free slot, or that of the policy's victim, and are read into it (misses). What is in use is
  never a victim. At its end all experts of the wave are touched, in ascending order.
- lru: the victim is what was touched longest ago.
- lfru, least frequently recently used: every expert has a count, which stays when it leaves its slot. A touch
  adds 1, up to 31. At the end of the wave in which touches since the last time reach 4 x all experts, all
  counts are halved (rounded down). The level of a count is its number of binary digits: 0, 1, 2-3, 4-7, 8-15,
  16-31. The victim is, among the experts of the lowest level (resident, not in use), the one that comes first
  going backwards from the last expert of the step's layer, and on from expert 0 to the very last one: of
  experts used about equally often, those of the layers just left are needed last. With a bitmap of experts
  for each level a touch sets a bit, a victim is a search for a bit, and halving moves each bitmap down.
- belady: the victim is what is used again last. That takes the future; no policy has more hits.

Owns: these rules. Refuses: where accesses come from and what the figures mean (replay.py).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

HIGHEST_COUNT = 31
HALVE_AFTER = 4  # touches for each expert of the model
_BLOCK = 1 << 16  # steps that are Python numbers at the same time


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a trace asks of a cache. `starts` [n_steps + 1] into `experts`, numbered through and ascending in
    each step; `ends` [n_steps]: one more than the last expert of the step's layer."""

    n_experts: int  # of all layers together
    experts: npt.NDArray[np.int32]
    starts: Integers
    ends: npt.NDArray[np.int32]


def _waves(accesses: Accesses, slots: int, beside: Integers | None = None) -> Iterator[tuple[Any, Any, int]]:
    """(experts, what lies beside them, end of the layer) of every wave."""
    starts = accesses.starts
    for first in range(0, len(starts) - 1, _BLOCK):
        cut = starts[first : first + _BLOCK + 1]
        experts = accesses.experts[cut[0] : cut[-1]].tolist()
        more = experts if beside is None else beside[cut[0] : cut[-1]].tolist()
        begin = 0
        for end, layer in zip(
            (cut[1:] - cut[0]).tolist(), accesses.ends[first : first + _BLOCK].tolist(), strict=True
        ):
            for at in range(begin, end, slots):
                stop = min(at + slots, end)
                yield experts[at:stop], more[at:stop], layer
            begin = end


def lru(accesses: Accesses, slots: int) -> Integers:
    """Misses of each expert."""
    misses = [0] * accesses.n_experts
    resident: OrderedDict[int, None] = OrderedDict()  # and not in use, touched longest ago first
    free = slots
    for wave, _, _ in _waves(accesses, slots):
        missing = []
        for expert in wave:
            if expert in resident:
                del resident[expert]
            else:
                missing.append(expert)
        for expert in missing:
            misses[expert] += 1
            if free:
                free -= 1
            else:
                resident.popitem(last=False)
        resident.update(dict.fromkeys(wave))
    return np.array(misses, np.int64)


def lfru(accesses: Accesses, slots: int) -> Integers:
    """Misses of each expert."""
    n = accesses.n_experts
    bits = [1 << expert for expert in range(n)]
    misses, counts, resident = [0] * n, [0] * n, bytearray(n)
    levels = [0] * (HIGHEST_COUNT.bit_length() + 1)  # bitmaps of what is resident and not in use
    free, touches = slots, 0
    for wave, _, end in _waves(accesses, slots):
        missing = []
        for expert in wave:
            if resident[expert]:
                levels[counts[expert].bit_length()] ^= bits[expert]
            else:
                missing.append(expert)
        for expert in missing:
            misses[expert] += 1
            resident[expert] = 1
            if free:
                free -= 1
                continue
            level = next(level for level, bitmap in enumerate(levels) if bitmap)
            victim = (levels[level] & ((1 << end) - 1) or levels[level]).bit_length() - 1
            levels[level] ^= bits[victim]
            resident[victim] = 0
        for expert in wave:
            count = counts[expert]
            if count < HIGHEST_COUNT:
                count += 1
                counts[expert] = count
            levels[count.bit_length()] |= bits[expert]
        touches += len(wave)
        if touches >= HALVE_AFTER * n:
            touches = 0
            counts = [count >> 1 for count in counts]
            levels = [levels[0] | levels[1], *levels[2:], 0]
    return np.array(misses, np.int64)


def belady(accesses: Accesses, slots: int) -> Integers:
    """Misses of each expert."""
    n = accesses.n_experts
    misses, resident, following = [0] * n, bytearray(n), [0] * n
    candidates: list[int] = []  # a heap of -(next use x n + expert)
    free = slots
    for wave, uses, _ in _waves(accesses, slots, _next_uses(accesses)):
        missing = []
        for expert, use in zip(wave, uses, strict=True):
            following[expert] = use
            if not resident[expert]:
                missing.append(expert)
        for expert in missing:
            misses[expert] += 1
            resident[expert] = 1
            if free:
                free -= 1
                continue
            # What was used since it was pushed has a use in the past: below every candidate.
            victim = -heapq.heappop(candidates) % n
            resident[victim] = 0
        if len(candidates) > 8 * n:
            here = set(wave)
            candidates = [
                -(following[expert] * n + expert)
                for expert in range(n)
                if resident[expert] and expert not in here
            ]
            heapq.heapify(candidates)
        for expert, use in zip(wave, uses, strict=True):
            heapq.heappush(candidates, -(use * n + expert))
    return np.array(misses, np.int64)


def _next_uses(accesses: Accesses) -> Integers:
    """Where each access's expert is accessed again; behind the end if never."""
    experts = accesses.experts
    found = np.full(len(experts), len(experts), np.int64)
    order = np.argsort(experts, kind="stable")
    again = experts[order[1:]] == experts[order[:-1]]
    found[order[:-1][again]] = order[1:][again]
    return found


POLICIES: dict[str, Callable[[Accesses, int], Integers]] = {"lru": lru, "lfru": lfru, "belady": belady}
