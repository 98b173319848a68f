"""How soon experts are used again: what a cache of n experts would find there, for all n at once.

    reuse distance  of an access under LRU: one more than the distinct experts that were touched since this
                    one was; a cache hits if it has as many slots (stack distance, Mattson et al. 1970). None
                    before the first access, which is always a miss.
    working set     of a window of T tokens: the distinct experts used in it, on average over the windows that
                    end at each token: the sum over accesses of min(T, tokens until the same expert's next)
                    divided by all tokens (Denning & Schwartz 1972).

A step's experts are looked for before any of them is read, and touched in ascending order, as policies.py
rules; below the widest step, where a step takes several waves, its simulators answer instead.

Owns: both measures, and the curve of hit rates of all policies. Refuses: the rules of caches (policies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.analysis.policies import POLICIES, Accesses

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

SIZES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)  # of all experts
WINDOWS = (1, 4, 16, 64, 256, 1024)  # tokens
MOST_ACCESSES = 1 << 18  # of a curve: longer traces are cut, and the curve says so


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates by number of slots: {policy: [len(slots)]}."""

    slots: list[int]
    hit_rates: dict[str, list[float]]
    accesses: int  # that were simulated
    of_accesses: int  # that the trace has


def reuse_distances(accesses: Accesses) -> Integers:
    """[n_accesses] the fewest slots with which LRU has the expert at that access; 0: its first one."""
    last = np.full(accesses.n_experts, -1, np.int64)  # when each expert was touched last
    found = np.zeros(len(accesses.experts), np.int64)
    experts, starts = accesses.experts, accesses.starts.tolist()
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        step = experts[begin:end]
        before = last[step]
        found[begin:end] = np.where(before < 0, 0, (last[None, :] >= before[:, None]).sum(1))
        last[step] = np.arange(begin, end)
    return found


def lru_hit_rates(distances: Integers, slots: Sequence[int]) -> list[float]:
    """Of every number of slots, from reuse_distances(); exact from the widest step on."""
    hits = np.cumsum(np.bincount(distances[distances > 0], minlength=max(slots, default=0) + 1))
    return [float(hits[min(n, len(hits) - 1)]) / max(len(distances), 1) for n in slots]


def head(accesses: Accesses, most: int = MOST_ACCESSES) -> Accesses:
    """The first steps of a trace, with at most so many accesses."""
    n = max(1, int(np.searchsorted(accesses.starts, most, "right")) - 1)
    n = min(n, len(accesses.ends))
    starts = accesses.starts[: n + 1]
    return Accesses(accesses.n_experts, accesses.experts[: starts[-1]], starts, accesses.ends[:n])


def cache_curve(
    accesses: Accesses,
    slots: Sequence[int] | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> Curve:
    """LRU in one pass, LFRU and Belady's optimum by simulation of each size. slots: by default SIZES of all
    experts. progress: simulations done, of all, what comes next."""
    n = accesses.n_experts
    sizes = sorted({max(1, round(share * n)) for share in SIZES} if slots is None else set(slots))
    cut = head(accesses)
    widest = int(np.diff(cut.starts).max(initial=1))
    total = max(len(cut.experts), 1)
    rates = dict(zip(sizes, lru_hit_rates(reuse_distances(cut), sizes), strict=True))
    work = [("lru", size) for size in sizes if size < widest]
    work += [(policy, size) for policy in ("lfru", "belady") for size in sizes]
    found: dict[str, list[float]] = {"lru": [], "lfru": [], "belady": []}
    for done, (policy, size) in enumerate(work):
        if progress is not None:
            progress(done, len(work), f"{policy} with {size} slots")
        rate = 1 - float(POLICIES[policy](cut, size).sum()) / total
        if policy == "lru":
            rates[size] = rate
        else:
            found[policy].append(rate)
    found["lru"] = [rates[size] for size in sizes]
    return Curve(sizes, found, len(cut.experts), len(accesses.experts))


def working_sets(accesses: Accesses, tokens: Integers, windows: Sequence[int] = WINDOWS) -> list[float]:
    """Distinct experts in a window, on average, of each length in tokens. tokens: [n_steps + 1], the token
    that each step belongs to, ascending from 0, and their number at the end."""
    when = np.repeat(tokens[:-1], np.diff(accesses.starts))
    order = np.argsort(accesses.experts, kind="stable")
    experts, times = accesses.experts[order], when[order]
    following = np.append(times[1:], 0)
    ends = np.append(experts[1:] != experts[:-1], True)[: len(experts)]
    gaps = np.where(ends, tokens[-1] - times, following - times)
    total = max(int(tokens[-1]), 1)
    return [float(np.minimum(gaps, window).sum()) / total for window in windows]
