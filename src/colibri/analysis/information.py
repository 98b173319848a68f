"""Mutual information between a label and the choice of experts, with what chance alone would show.

With counts t[c, e] of a label c and an expert e, N their sum, p = t / N:

    I(C; E) = sum p[c, e] log2(p[c, e] / (p[c] p[e])), in bits a choice

Estimated from counts, I is above 0 even where nothing depends on anything: by about (C - 1)(E - 1) / (2 N
ln 2) bits (Miller 1955), and by far more where choices come in clumps, as they do: a text has one domain and
all of its tokens, a token id has one class and all of its occurrences. So labels are dealt anew among these
units (texts, ids), SHUFFLES times, from a fixed seed, and the mean of what comes out is taken off. A label
counts as told apart by a layer if I is above all shuffled ones (p = 1 / (SHUFFLES + 1)) and LEAST_DEVIATIONS
of their standard deviations above their mean, which guards against many layers being asked.

Owns: this measure, which specialisation.py and drift.py use. Refuses: what labels mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array

Doubles = npt.NDArray[np.float64]

SHUFFLES = 99
LEAST_DEVIATIONS = 4.0
_SEED = 20_261_201
_AT_ONCE = 1 << 24  # numbers of one-hot labels that are held together


@dataclass(frozen=True, slots=True)
class Information:
    """What the choices of one layer say of a label, in bits a choice."""

    table: Doubles  # [n_labels, n_experts] counts
    found: float
    shuffled: float  # mean over shuffled labels
    deviation: float  # standard deviation of those
    highest: float  # of those
    entropy: float  # of the label: no choice can say more

    @property
    def bits(self) -> float:
        """Without what chance shows."""
        return max(0.0, self.found - self.shuffled)

    @property
    def share(self) -> float:
        """Of the label's entropy: 0, nothing; 1, a choice gives the label away."""
        return self.bits / self.entropy if self.entropy else 0.0

    @property
    def above_chance(self) -> bool:
        margin = self.found - self.shuffled
        return self.found > self.highest + 1e-12 and margin > LEAST_DEVIATIONS * self.deviation

    @property
    def miller(self) -> float:
        """What independent choices would show by chance."""
        rows, columns = (int((self.table.sum(axis) > 0).sum()) for axis in (1, 0))
        total = float(self.table.sum())
        return (rows - 1) * (columns - 1) / (2 * total * np.log(2)) if total else 0.0


def mutual_information(tables: Array) -> Doubles:
    """In bits, of each table of counts: [..., n_labels, n_experts] to [...]."""
    counts = np.asarray(tables, np.float64)
    total = np.maximum(counts.sum((-2, -1)), 1e-300)
    own = _n_log_n(counts).sum((-2, -1))
    labels, experts = _n_log_n(counts.sum(-1)).sum(-1), _n_log_n(counts.sum(-2)).sum(-1)
    return np.asarray(np.maximum(0.0, (own - labels - experts + _n_log_n(total)) / total))


def _n_log_n(counts: Doubles) -> Doubles:
    return counts * np.log2(counts, out=np.zeros_like(counts), where=counts > 0)


def label_information(counts: Array, labels: Array, n_labels: int) -> Information:
    """counts: [n_units, n_experts], how often each unit chose each expert; labels: [n_units], of each unit;
    -1: it has none and is left out."""
    known = (labels >= 0) & (counts.sum(1) > 0)
    counts, labels = counts[known].astype(np.float32), labels[known].astype(np.int64)
    rng = np.random.default_rng(_SEED)
    deals = [labels, *(rng.permutation(labels) for _ in range(SHUFFLES))]
    pieces = max(1, _AT_ONCE // max(1, n_labels * len(labels)))
    found = []
    table = np.zeros((n_labels, counts.shape[1]))
    for at in range(0, len(deals), pieces):
        hot = np.stack(deals[at : at + pieces])[:, None, :] == np.arange(n_labels)[:, None]
        tables = hot.reshape(-1, len(labels)).astype(np.float32) @ counts
        tables = tables.reshape(-1, n_labels, counts.shape[1])
        table = tables[0].astype(np.float64) if at == 0 else table
        found.append(mutual_information(tables))
    return _information(table, np.concatenate(found))


def shuffled_information(
    table: Array, shuffled: Callable[[np.random.Generator], Array], shuffles: int = SHUFFLES
) -> Information:
    """Of a table of counts [n_labels, n_experts]; shuffled(rng) deals the labels anew and counts again."""
    rng = np.random.default_rng(_SEED)
    tables = np.stack([np.asarray(table), *(shuffled(rng) for _ in range(shuffles))])
    return _information(tables[0].astype(np.float64), mutual_information(tables))


def _information(table: Doubles, found: Doubles) -> Information:
    by_chance = found[1:]
    of_labels = table.sum(1)
    total = max(float(of_labels.sum()), 1e-300)
    entropy = float(np.log2(total) - _n_log_n(of_labels).sum() / total) if of_labels.any() else 0.0
    return Information(
        table,
        float(found[0]),
        float(by_chance.mean()),
        float(by_chance.std()),
        float(by_chance.max()),
        entropy,
    )
