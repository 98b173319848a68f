"""What the matrix kernels reach on this machine when nothing but arithmetic counts: the product of many rows
with matrices that stay in the cache.

Owns: the small model that it is measured on, and the rate. It is the peak that prefill is compared with: the
arithmetic of the same kernels, without memory, attention, norms and routing.
Refuses: peaks by data sheet, which no program reaches and which clocks of shared machines do not keep.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from colibri.analysis import synthetic
from colibri.analysis.runs import Loops, phases_ns
from colibri.analysis.shapes import SHAPES
from colibri.engine import load
from colibri.entries import weight_types
from colibri.profiling import measure

_ROWS = 512
_ROUNDS = 6  # the first warms up
# One expert that every row takes: gate and up are 2 million weights, 1.2 MB in q4 and 2.2 MB in q8.
_SHAPE = replace(
    SHAPES["mixtral-tiny"], n_layers=1, n_embd=1024, n_experts=1, n_experts_used=1, n_ff_expert=1024
)


def matrix_gop_per_s(type: str, threads: int) -> float:
    """1e9 operations (2 for a multiply-add) per second, all threads together, best of a few rounds: the gate
    and up matrices of an expert, with the activation function and the quantisation behind them."""
    with tempfile.TemporaryDirectory(prefix="colibri-peak-") as directory:
        path = Path(directory) / "peak.colibri"
        synthetic.write("peak", path, weight_types(type), shape=_SHAPE)
        with load(path, threads=threads, context=_ROWS) as model:
            loops, times = Loops(model, _ROWS, 0), []
            for _ in range(_ROUNDS):
                loops.renew()
                with measure(model) as profile:
                    loops.prefill()
                    times.append(phases_ns(profile, "gate_up"))
    return 4 * _ROWS * _SHAPE.n_embd * _SHAPE.n_ff_expert / min(times[1:])
