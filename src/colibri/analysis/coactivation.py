"""Which experts of a layer are chosen together.

With n rows, c[i] of which chose expert i, and c[i, j] both i and j:

    lift   = n c[i, j] / (c[i] c[j]): how many times as often together as if one said nothing of the other
    PMI    = log2 lift, in bits (pointwise mutual information, Church & Hanks 1990)
    chance = E (k - 1) / (k (E - 1)): the lift of every pair where each row draws k of E experts evenly. It is
             below 1, since an expert takes one of the k places and leaves k - 1.

Owns: these formulas. Refuses: pairs too rare to say anything: fewer than LEAST_EXPECTED by chance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

LEAST_EXPECTED = 5.0  # rows; Cochran's rule for tables of counts


class Pair(NamedTuple):
    """Two experts that are chosen together more often than others."""

    first: int
    second: int
    together: int  # rows
    lift: float


def pair_counts(experts: Array, n_experts: int) -> Integers:
    """[n_experts, n_experts] rows that chose both; on the diagonal, rows that chose the expert.
    experts: [n, n_experts_used], distinct in each row."""
    found = np.zeros(n_experts * n_experts, np.int64)
    numbers = experts.astype(np.int64)
    for at in range(numbers.shape[1]):
        for other in range(numbers.shape[1]):
            flat = numbers[:, at] * n_experts + numbers[:, other]
            found += np.bincount(flat, minlength=len(found))
    return found.reshape(n_experts, n_experts)


def lift(pairs: Integers, n_rows: int) -> Doubles:
    """[n_experts, n_experts] of pair_counts(); NaN on the diagonal and where an expert was never chosen."""
    own = np.diagonal(pairs).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = pairs * float(n_rows) / (own[:, None] * own[None, :])
    np.fill_diagonal(found, np.nan)
    return found


def pmi(pairs: Integers, n_rows: int) -> Doubles:
    """log2 of lift(), in bits; minus infinity for two that were never chosen together."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(lift(pairs, n_rows)))


def chance(n_experts: int, n_used: int) -> float:
    """The lift of every pair if choices are even; 0 where a row chooses one expert."""
    return n_experts * (n_used - 1) / (n_used * (n_experts - 1)) if n_experts > 1 else 0.0


def enough(pairs: Integers, n_rows: int) -> npt.NDArray[np.bool_]:
    """[n_experts, n_experts] whether chance would give a pair LEAST_EXPECTED rows or more."""
    own = np.diagonal(pairs).astype(np.float64)
    return np.asarray(own[:, None] * own[None, :] >= LEAST_EXPECTED * max(n_rows, 1))


def strongest(pairs: Integers, n_rows: int, n: int = 10) -> list[Pair]:
    """The pairs with the most lift among those that are enough()."""
    lifts = lift(pairs, n_rows)
    first, second = np.nonzero(np.triu(enough(pairs, n_rows) & np.isfinite(lifts), 1))
    best = np.argsort(-lifts[first, second], kind="stable")[:n]
    return [
        Pair(int(i), int(j), int(pairs[i, j]), float(lifts[i, j]))
        for i, j in zip(first[best], second[best], strict=True)
    ]
