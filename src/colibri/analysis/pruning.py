"""Removes the experts that matter least (docs/PRUNING.md): saliency, which stay, the smaller file.

Owns: the measures, and that what is left is a model that the engine takes. Refuses: what would leave fewer
experts than a token needs, by name; options (cli/prune.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri._native import ExpertOutputs
from colibri.analysis.evaluation import Evaluation, Passage, evaluate
from colibri.analysis.evaluation import Progress as Scored
from colibri.analysis.rewriting import Progress, check_output, check_trace, rewrite
from colibri.analysis.trace import Trace
from colibri.engine import Model
from colibri.errors import ArgumentError, UnsupportedError
from colibri.format import Container, Entry, read_container, read_entry
from colibri.quantize import pack, unpack

Doubles = npt.NDArray[np.float64]
SALIENCIES = ("reap", "mass", "count")
_VECTORS = ("router_logit_bias", "router_bias", "router_expert_scale")
_EXPERT_VECTORS = ("experts_gate_bias", "experts_up_bias", "experts_down_bias")


class Uses(NamedTuple):
    """Sums over the rows that chose an expert, each [n_layers, most experts]."""

    counts: Doubles
    masses: Doubles  # of router weights
    norms: Doubles | None  # of router weight times the L2 norm of what the expert said; None: not known

    def saliency(self, kind: str) -> Doubles:
        """How much each expert matters: "reap", the mean over its rows of weight times norm of its output
        (arXiv:2510.13999); "mass", the sum of weights; "count", how often it was chosen. 0: never chosen."""
        if kind not in SALIENCIES:
            raise ArgumentError(f"saliency: expected one of {', '.join(SALIENCIES)}, found {kind!r}")
        if kind != "reap":
            return self.masses if kind == "mass" else self.counts
        if self.norms is None:
            raise ArgumentError(
                "saliency='reap' needs what experts say of texts, which a trace does not hold: give texts, "
                "or choose 'mass' or 'count'"
            )
        return self.norms / np.maximum(self.counts, 1)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune() did."""

    path: Path
    bytes: int
    bytes_before: int
    removed: dict[int, list[int]]  # by layer
    n_experts: list[int]  # left, by layer


def uses_of_texts(
    model: Model, passages: Sequence[Passage], progress: Scored | None = None
) -> tuple[Uses, Evaluation]:
    """Evaluates texts, each token once, and adds up what experts say of them. The rows are those that are
    evaluated to score the texts."""
    _check_experts(model.config)
    shape = (model.config["n_layers"], max(model.config["n_experts"]))
    uses = Uses(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    assert uses.norms is not None
    norms = uses.norms

    def see(found: ExpertOutputs) -> None:
        at = found.layer, found.expert
        weights = found.weights.astype(np.float64)
        outputs = found.outputs.astype(np.float64)
        uses.counts[at] += np.count_nonzero(weights)
        uses.masses[at] += weights.sum()
        norms[at] += weights @ np.sqrt((outputs * outputs).sum(1))

    with model.observe(expert=see):
        found = evaluate(model, passages, progress=progress)
    return uses, found


def uses_of_trace(trace: Trace, container: Container) -> Uses:
    """What a trace of this model says."""
    check_trace(trace, container)
    shape = (trace.header.n_layers, max(trace.header.n_experts))
    count, mass = np.zeros(shape), np.zeros(shape)
    for step in trace.steps():
        experts, weights = step.experts.reshape(-1), step.weights.reshape(-1).astype(np.float64)
        count[step.layer] += np.bincount(experts, weights > 0, shape[1])
        mass[step.layer] += np.bincount(experts, weights, shape[1])
    return Uses(count, mass, None)


def layer_counts(config: dict[str, Any], keep: float) -> list[int]:
    """Experts that stay in each layer if a share of them does: rounded to the nearest, in whole groups, and
    no fewer than a token needs."""
    if not 0 < keep < 1:
        raise ArgumentError(f"keep: expected a share above 0 and below 1 (75%), found {keep:g}")
    groups = config["n_expert_groups"] or 1
    found = []
    for n in config["n_experts"]:
        per_group = math.floor(n // groups * keep + 0.5)
        found.append(min(n, groups * max(per_group, _least(config) // groups)) if n else 0)
    if found == config["n_experts"]:
        raise ArgumentError(
            f"keep: {keep:g} removes nothing: layers have {max(found)} experts, of which a token needs "
            f"{_least(config)}"
        )
    return found


def check_counts(config: dict[str, Any], counts: Sequence[int]) -> list[int]:
    """Counts for the layers with experts, as a list over all layers."""
    layers = [at for at, n in enumerate(config["n_experts"]) if n]
    if len(counts) != len(layers):
        raise ArgumentError(
            f"layer_counts: expected {len(layers)} numbers, one for each layer with experts, found "
            f"{len(counts)}"
        )
    found = [0] * config["n_layers"]
    groups = config["n_expert_groups"] or 1
    for layer, count in zip(layers, counts, strict=True):
        n = config["n_experts"][layer]
        if not _least(config) <= count <= n:
            raise ArgumentError(
                f"layer_counts: layer {layer}: expected {_least(config)} (what a token needs) to {n}, found "
                f"{count}"
            )
        if count % groups:
            raise ArgumentError(
                f"layer_counts: layer {layer}: expected a multiple of its {groups} groups, found {count}"
            )
        found[layer] = count
    if found == config["n_experts"]:
        raise ArgumentError("layer_counts: nothing is removed")
    return found


def counts_across(config: dict[str, Any], keep: float, saliency: Doubles) -> list[int]:
    """As many experts as layer_counts(), but from whichever layers matter least: each layer's saliencies are
    divided by their sum, and its least experts go first, down to what a token needs."""
    budget = sum(layer_counts(config, keep))
    groups, least = config["n_expert_groups"] or 1, _least(config)
    if groups > 1:
        raise UnsupportedError(
            f"across_layers: the router chooses among {groups} groups of experts, which must stay of one "
            "size; leave it out, or give layer_counts"
        )
    found = [min(n, least) for n in config["n_experts"]]
    free = []
    for layer, n in enumerate(config["n_experts"]):
        shares = saliency[layer, :n] / max(saliency[layer, :n].sum(), 1e-300)
        free += [(-share, layer) for share in sorted(shares, reverse=True)[found[layer] :]]
    for _, layer in sorted(free)[: max(0, budget - sum(found))]:
        found[layer] += 1
    return found


def chosen(config: dict[str, Any], counts: Sequence[int], saliency: Doubles) -> list[list[int]]:
    """The experts that stay, ascending, by layer: in each group equally many, the most salient ones, of
    equals the lowest."""
    groups = config["n_expert_groups"] or 1
    kept = []
    for layer, count in enumerate(counts):
        size = config["n_experts"][layer] // groups
        best: list[int] = []
        for group in range(groups if size else 0):
            own = saliency[layer, group * size : (group + 1) * size]
            order = np.argsort(-own, kind="stable")[: count // groups]
            best += sorted(group * size + int(at) for at in order)
        kept.append(best)
    return kept


def prune(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    kept: Sequence[Sequence[int]],
    told: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Pruned:
    """Writes a file with the experts of `kept` alone, by layer, under numbers from 0. told: for the record in
    source.json. Everything else is copied as it is; an expert's weights are the same bytes."""
    container = read_container(model)
    check_output(container.path, Path(out))
    config, entries = container.config, {entry.name: entry for entry in container.entries}
    removed = {
        layer: sorted(set(range(n)) - set(kept[layer])) for layer, n in enumerate(config["n_experts"]) if n
    }

    def origin(name: str) -> Entry:
        parts = name.split(".")
        if len(parts) == 4 and parts[2] == "experts":
            parts[3] = str(kept[int(parts[1])][int(parts[3])])
        return entries[".".join(parts)]

    def change(new: Entry, old: Entry) -> bytes | memoryview | None:
        parts = new.name.split(".")
        if len(parts) != 3 or parts[0] != "layers" or not config["n_experts"][int(parts[1])]:
            return None
        n, stay = config["n_experts"][int(parts[1])], list(kept[int(parts[1])])
        if parts[2] == "router":
            return pack(unpack(read_entry(container, old), n, old.cols, "f32")[stay], "f32")
        if parts[2] in (*_VECTORS, *_EXPERT_VECTORS):
            values = np.frombuffer(read_entry(container, old), "<f4").reshape(n, -1)
            return values[stay].tobytes()
        return None

    counts = [len(stay) for stay in kept]
    size = rewrite(
        container,
        Path(out),
        config | {"n_experts": counts},
        origin,
        change,
        lambda name: origin(name).types,
        {"removed_experts": {str(layer): gone for layer, gone in removed.items()}, **(told or {})},
        progress,
    )
    return Pruned(Path(out), size, container.bytes, removed, counts)


def _least(config: dict[str, Any]) -> int:
    """Experts that a layer needs for a token to have its choice."""
    used, groups = config["n_experts_used"], config["n_expert_groups"]
    if not groups:
        return int(used)
    return int(groups * max(-(-used // config["n_groups_used"]), 2 if config["group_score"] else 1))


def _check_experts(config: dict[str, Any]) -> None:
    if not any(config["n_experts"]):
        raise UnsupportedError("the model has no routed experts, so there is nothing to remove")
