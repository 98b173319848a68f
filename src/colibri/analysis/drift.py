"""Whether routing changes with the position in a text.

Positions fall into bins that grow fourfold: 0, 1-3, 4-15, 16-63, … The measure is the mutual information of
bin and expert (information.py), which is the Jensen-Shannon divergence of the bins' loads, weighted by their
rows (Lin 1991). What chance shows is found by dealing positions anew among the rows of each text, so that
long texts which are about something else are no drift.

Owns: bins. Refuses: the measure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array
from colibri.analysis.choices import Choices, counts_by
from colibri.analysis.information import Information, shuffled_information

SHUFFLES = 19  # each sorts all rows; a fifth of what labels get, with the same demand on deviations


def position_bins(positions: Array) -> npt.NDArray[np.int64]:
    """[n] the bin of each position: 0, then 1 + floor(log4 position)."""
    numbers = np.maximum(positions.astype(np.int64), 1)
    return np.where(positions > 0, 1 + (np.frexp(numbers.astype(np.float64))[1] - 1) // 2, 0)


def bin_names(n: int) -> list[str]:
    """ "0", "1-3", "4-15" …"""
    return ["0", *(f"{4**at}-{4 ** (at + 1) - 1}" for at in range(n - 1))][:n]


def drift(choices: Choices, positions: Array, sequences: Array) -> Information:
    """positions, sequences: [n_rows] of the trace. The table's rows are bins."""
    bins, texts = position_bins(positions[choices.rows]), sequences[choices.rows]
    n_bins = int(bins.max(initial=0)) + 1
    order = np.argsort(texts, kind="stable")
    bins, texts, experts = bins[order], texts[order], choices.experts[order]

    def dealt(rng: np.random.Generator) -> Array:
        anew = bins[np.argsort(texts + rng.random(len(bins)))]
        return counts_by(anew, n_bins, experts, choices.n_experts)

    return shuffled_information(counts_by(bins, n_bins, experts, choices.n_experts), dealt, SHUFFLES)
