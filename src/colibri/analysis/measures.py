"""Everything that a trace says of a model's routers, in one pass over its layers: what a report shows.

Owns: which measures are taken of what, and what they need: token classes a tokenizer, weights the model file.
Refuses: formulas (one module each), words (findings.py), pages and files (page.py, pictures.py, tables.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.analysis import coactivation, drift, reuse, similarity, specialisation
from colibri.analysis.array_file import Array
from colibri.analysis.choices import Choices, by_layer, counts_by
from colibri.analysis.information import Information
from colibri.analysis.load import Load, expert_load
from colibri.analysis.replay import Demand, demand
from colibri.analysis.rewriting import check_trace
from colibri.analysis.tokens import Tokens, tokens_of
from colibri.analysis.trace import Trace
from colibri.analysis.visits import Visits, visits_of
from colibri.format import Container

Progress = Callable[[int, int, str], object]
Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """Of one MoE layer. None: not to be had from this trace."""

    layer: int
    load: Load
    pairs: Integers  # [n_experts, n_experts] of coactivation.pair_counts
    domains: Information | None
    classes: Information | None
    drift: Information
    usage: Doubles  # [n_experts, n_experts] cosine by token id
    weights: Doubles | None  # [n_experts, n_experts] cosine of weights

    def data(self) -> dict[str, Any]:
        """The figures, as JSON."""
        load = self.load
        found: dict[str, Any] = {
            "layer": self.layer,
            "rows": load.n_rows,
            "n_experts": load.n_experts,
            "n_experts_used": load.n_used,
            "counts": load.counts.tolist(),
            "mass": load.mass.tolist(),
            "entropy": load.entropy,
            "effective_experts": load.effective_experts,
            "variation": load.variation,
            "noise": load.noise,
            "maximal_violation": load.maximal_violation,
            "top_expert": load.top,
            "top_share": load.top_share,
            "unused": load.unused,
            "pairs": [pair._asdict() for pair in coactivation.strongest(self.pairs, load.n_rows)],
        }
        for name in ("domains", "classes", "drift"):
            one: Information | None = getattr(self, name)
            if one is not None:
                found[name] = {
                    "bits": one.bits,
                    "found": one.found,
                    "shuffled": one.shuffled,
                    "deviation": one.deviation,
                    "label_entropy": one.entropy,
                    "above_chance": one.above_chance,
                }
        return found


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one trace."""

    trace: Trace
    layers: list[LayerMeasures]
    choices: list[Choices]
    decoding: Demand  # as if every token had been evaluated by itself
    curve: reuse.Curve
    windows: list[float]  # working sets of reuse.WINDOWS
    visits: Visits | None
    tokens: Tokens | None
    container: Container | None

    def data(self) -> dict[str, Any]:
        """The figures, as JSON."""
        return {
            "trace": str(self.trace.path),
            "model": self.trace.header.model,
            "tokens": self.trace.n_rows,
            "labels": list(self.trace.header.labels),
            "layers": [one.data() for one in self.layers],
            "cache": {
                "slots": self.curve.slots,
                "hit_rates": self.curve.hit_rates,
                "accesses": self.curve.accesses,
                "of_accesses": self.curve.of_accesses,
            },
            "working_sets": dict(zip(map(str, reuse.WINDOWS), self.windows, strict=True)),
        }


def measure(trace: Trace, container: Container | None = None, progress: Progress | None = None) -> Measures:
    """container: the file of the model, for texts of tokens and similarity of weights; an error if it is of
    another model. progress: what is done, of all, what comes next."""
    if container is not None:
        check_trace(trace, container)
    found = demand(trace, 1)
    choices = by_layer(trace)
    tell = progress or (lambda done, total, name: None)
    tokens = None
    if container is not None and any(entry.name == "tokenizer.json" for entry in container.entries):
        tokens = tokens_of(container, trace.array("ids"))
    weights = {} if container is None else similarity.weight_similarity(container, progress)
    layers = []
    for done, one in enumerate(choices):
        tell(done, len(choices), f"layer {one.layer}")
        layers.append(_layer(trace, one, tokens, weights.get(one.layer)))
    curve = reuse.cache_curve(found.accesses, None, progress)
    windows = reuse.working_sets(found.accesses, _token_of_steps(trace))
    return Measures(trace, layers, choices, found, curve, windows, visits_of(trace), tokens, container)


def _layer(trace: Trace, one: Choices, tokens: Tokens | None, weights: Doubles | None) -> LayerMeasures:
    ids, texts, labels = trace.array("ids"), trace.array("sequences"), trace.array("sequence_labels")
    n_labels = len(trace.header.labels)
    seen, unit = np.unique(ids[one.rows], return_inverse=True)
    usage = counts_by(unit, len(seen), one.experts, one.n_experts)
    return LayerMeasures(
        one.layer,
        expert_load(one.experts, one.n_experts, one.weights),
        coactivation.pair_counts(one.experts, one.n_experts),
        specialisation.by_domain(one, texts, labels, n_labels) if n_labels > 1 else None,
        None if tokens is None else specialisation.by_class(one, ids, tokens.classes),
        drift.drift(one, trace.array("positions"), texts),
        similarity.usage_similarity(usage),
        weights,
    )


def _token_of_steps(trace: Trace) -> Integers:
    """[n_steps + 1] of replay.demand(trace, 1): a token of a text passes the layers of its stack, one step
    each; a source passes those of the encoder whole, and is as many tokens as it has."""
    depths = np.array([len(layers) for layers in trace.header.stacks], np.int64)
    chunks: Array = trace.array("chunks").astype(np.int64)
    rows, stack = chunks[:, 0], chunks[:, 1]
    units = np.where(stack == 1, 1, rows)  # evaluations that a chunk becomes
    lengths = np.repeat(np.where(stack == 1, rows, 1), units)  # tokens of each
    begins = np.cumsum(lengths) - lengths
    return np.append(np.repeat(begins, np.repeat(depths[stack], units)), lengths.sum())
