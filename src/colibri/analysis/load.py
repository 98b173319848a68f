"""How evenly a router spreads tokens over the experts of a layer.

With counts c[e], how often each of E experts was chosen, and p = c / sum(c):

    entropy              H = -sum p ln p, in nats (Shannon 1948)
    effective experts    exp(H): as many equally loaded experts have that entropy (Hill number of order 1,
                         Hill 1973); E if all are used alike, n_experts_used if all rows choose the same ones
    variation            standard deviation / mean of c, the coefficient whose square is the importance loss
                         of Shazeer et al. 2017 (arXiv:1701.06538)
    noise                what it would be by chance alone if each of n rows drew k of E experts evenly:
                         sqrt((1 - k/E) / (n k/E)), of a hypergeometric draw a row
    maximal violation    max c / mean c - 1 (MaxVio of Wang et al. 2024, arXiv:2408.15664)
    top share            of the rows, how many chose the expert that is chosen most

Owns: these formulas. Refuses: what is too much (findings.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the experts of one layer."""

    n_rows: int
    n_used: int  # experts that a row chooses
    counts: Integers  # [n_experts] rows that chose each expert
    mass: Doubles  # [n_experts] sum of router weights

    @property
    def n_experts(self) -> int:
        return len(self.counts)

    @property
    def entropy(self) -> float:
        return entropy(self.counts)

    @property
    def effective_experts(self) -> float:
        return math.exp(self.entropy)

    @property
    def variation(self) -> float:
        return variation(self.counts)

    @property
    def noise(self) -> float:
        share = self.n_used / self.n_experts
        return math.sqrt((1 - share) / (self.n_rows * share)) if self.n_rows else 0.0

    @property
    def maximal_violation(self) -> float:
        mean = float(self.counts.mean())
        return float(self.counts.max()) / mean - 1 if mean else 0.0

    @property
    def shares(self) -> Doubles:
        """[n_experts] of the rows, how many chose each expert; together n_experts_used."""
        return self.counts / max(self.n_rows, 1)

    @property
    def top(self) -> int:
        """The expert that is chosen most; of equals the lowest."""
        return int(self.counts.argmax())

    @property
    def top_share(self) -> float:
        return float(self.shares[self.top])

    @property
    def unused(self) -> list[int]:
        """Experts that no row chose."""
        return [int(expert) for expert in np.flatnonzero(self.counts == 0)]


def expert_load(experts: Array, n_experts: int, weights: Array | None = None) -> Load:
    """experts: [n, n_experts_used] of one layer, distinct in each row; weights: the same shape, by default
    even. Choices that an encoder's expert had no room for count too: it is the router that is judged."""
    n, used = experts.shape
    flat = experts.ravel()
    even = np.full(flat.shape, 1 / max(used, 1)) if weights is None else weights.ravel().astype(np.float64)
    return Load(
        n,
        used,
        np.bincount(flat, minlength=n_experts).astype(np.int64),
        np.bincount(flat, even, minlength=n_experts).astype(np.float64),
    )


def entropy(counts: Array) -> float:
    """In nats, of counts or weights that are not negative; 0 where there are none."""
    total = counts.sum(dtype=np.float64)
    if not total:
        return 0.0
    shares = counts[counts > 0] / total
    return max(0.0, -float((shares * np.log(shares)).sum()))


def variation(counts: Array) -> float:
    """Standard deviation (of the population) divided by the mean; 0 where nothing was counted."""
    mean = float(counts.mean())
    return float(counts.std()) / mean if mean else 0.0
