"""What a trace says, layer by layer: every row's choice in one array, as measures take it.

Owns: the order of a trace (chunk by chunk, in each layer by layer) turned into arrays of layers.
Refuses: measuring (load.py, coactivation.py, specialisation.py, drift.py, reuse.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array
from colibri.analysis.trace import Trace

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the router of one layer decided, in the order of the trace."""

    layer: int
    n_experts: int
    rows: Integers  # [n] of the trace: ids[rows], positions[rows], sequences[rows]
    experts: Array  # [n, n_experts_used] best first
    weights: Array  # float16, the same shape
    logits: Array | None  # float32 [n, n_experts]; None: not recorded


def by_layer(trace: Trace) -> list[Choices]:
    """The choices of each MoE layer that a row of the trace passed, by ascending layer."""
    rows, at, ends = _order(trace)
    experts = np.concatenate([block for _, block in trace.blocks()]) if at.size else trace.array("experts")
    weights = trace.array("weights")
    logits = trace.array("logits") if trace.header.logits else None
    found, begin = [], 0
    for layer, end in enumerate(ends.tolist()):
        if end > begin:
            here, n_experts = at[begin:end], trace.header.n_experts[layer]
            own = None if logits is None else logits[here, :n_experts]
            found.append(Choices(layer, n_experts, rows[here], experts[here], weights[here], own))
        begin = end
    return found


def _order(trace: Trace) -> tuple[Integers, Integers, Integers]:
    """(row of every choice; choices ordered by layer; [n_layers] where each layer's end in that order)."""
    starts, chunks = trace.chunk_choices(), trace.array("chunks").astype(np.int64)
    lengths, n = np.diff(starts), chunks[:, 0]
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    rows = np.repeat(np.cumsum(n) - n, lengths) + within % np.repeat(n, lengths)
    layers = trace.layers_of(slice(0, len(chunks))).astype(np.uint16)
    counts = np.bincount(layers, minlength=trace.header.n_layers)
    return rows, np.argsort(layers, kind="stable"), np.cumsum(counts)


def counts_by(units: Array, n_units: int, experts: Array, n_experts: int) -> Integers:
    """How often each unit (a token id, a text, a class …) chose each expert: [n_units, n_experts].
    units: [n], of each row; experts: [n, k]."""
    flat = units.astype(np.int64)[:, None] * n_experts + experts
    return np.bincount(flat.ravel(), minlength=n_units * n_experts).reshape(n_units, n_experts)
