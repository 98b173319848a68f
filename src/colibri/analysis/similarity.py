"""How alike the experts of a layer are: by their weights, by what they are used for, by what they say.

    weights  cosine of gate, up and down laid end to end, of SAMPLE places of them. Experts drawn
             independently have a cosine of 0 give or take 1 / sqrt(SAMPLE); copies have 1. Two experts whose
             hidden units stand in another order are alike in what they do and not here.
    usage    cosine of how often each token id chose them: 1, the same tokens; 0, none in common.
    outputs  mean cosine of what two experts say of the rows that chose both.

Owns: these measures. Refuses: what is too alike (findings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri._native import ExpertOutputs
from colibri.analysis.array_file import Array
from colibri.analysis.bits import expert_matrices
from colibri.engine import Model
from colibri.format import Container, Entry

Doubles = npt.NDArray[np.float64]

SAMPLE = 1 << 16  # weights of an expert that are compared


def cosines(vectors: Array) -> Doubles:
    """[n, n] of the rows of [n, m]; a row of zeros has 0 with all."""
    numbers = np.asarray(vectors, np.float64)
    lengths = np.sqrt((numbers * numbers).sum(1, keepdims=True))
    unit = numbers / np.where(lengths > 0, lengths, 1)
    return np.asarray(np.clip(unit @ unit.T, -1, 1))


def weight_similarity(
    container: Container, progress: Callable[[int, int, str], object] | None = None
) -> dict[int, Doubles]:
    """[n_experts, n_experts] of each MoE layer. Reads every expert of the file once. progress: experts done,
    of all, what comes next."""
    experts: dict[int, list[Entry]] = {}
    for entry in container.entries:
        if entry.kind == "expert":
            experts.setdefault(int(entry.name.split(".")[1]), []).append(entry)
    done, total = 0, sum(map(len, experts.values()))
    found = {}
    for layer, entries in experts.items():
        rows = []
        for entry in entries:
            if progress is not None:
                progress(done, total, entry.name)
            rows.append(_sampled(container, entry))
            done += 1
        found[layer] = cosines(np.stack(rows))
    return found


def _sampled(container: Container, entry: Entry) -> Array:
    """Weights of an expert, at the same places for all experts of a layer."""
    step = max(1, sum(rows * cols for rows, cols, _ in entry.matrices) // SAMPLE)
    return np.concatenate([one.ravel()[::step] for one in expert_matrices(container, entry)])


def usage_similarity(counts: Array) -> Doubles:
    """[n_experts, n_experts] of choices.counts_by() over token ids: [n_ids, n_experts]."""
    return cosines(counts.T)


def output_similarity(model: Model, texts: Sequence[str]) -> dict[int, Doubles]:
    """[n_experts, n_experts] of each MoE layer, while a model reads texts. NaN for two that no row chose
    both. In memory: what the experts of one layer say of one chunk."""
    config, meetings = model.config, {}
    for layer, n in enumerate(config["n_experts"]):
        if n:
            meetings[layer] = np.zeros((2, n, n))  # sums of cosines, rows
    said: list[tuple[int, int, Any, Any]] = []  # of the layer that runs: layer, expert, rows, outputs

    def close() -> None:
        for at, (layer, expert, rows, outputs) in enumerate(said):
            for _, other, other_rows, other_outputs in said[:at]:
                _, here, there = np.intersect1d(rows, other_rows, return_indices=True)
                if here.size:
                    total = (outputs[here] * other_outputs[there]).sum()
                    for pair in ((expert, other), (other, expert)):
                        meetings[layer][(0, *pair)] += total
                        meetings[layer][(1, *pair)] += here.size
        said.clear()

    def see(found: ExpertOutputs) -> None:
        if said and (said[0][0] != found.layer or found.expert <= said[-1][1]):
            close()
        outputs = found.outputs.astype(np.float64)
        lengths = np.sqrt((outputs * outputs).sum(1, keepdims=True))
        rows = found.sequences.astype(np.int64) << 32 | found.positions
        said.append((found.layer, found.expert, rows, outputs / np.where(lengths > 0, lengths, 1)))

    with model.observe(expert=see):
        for text in texts:
            model._sequences.forget()
            model.logits(model.prompt_ids(text))
            close()
    with np.errstate(invalid="ignore"):
        return {layer: np.asarray(sums / rows) for layer, (sums, rows) in meetings.items()}
