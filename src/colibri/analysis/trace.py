"""Routing traces: which experts the routers of a model chose, with which weights, row by row (docs/TRACE.md).

    trace = Trace("run.trace")
    for step in trace.steps():
        step.layer, step.experts, step.weights  # of the rows of one chunk, in the order of the engine

Owns: the header, the arrays' names and shapes, that they fit together. The file is hostile: expert numbers
are checked before they are given out. Refuses: writing (trace_writer.py), bytes (array_file.py), meaning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.analysis.array_file import Array, ArrayFile
from colibri.errors import TraceError

FORMAT, VERSION = "colibri-trace", 1
HEADER = "header.json"
_LARGEST_HEADER = 16 << 20
_MOST = 1 << 16  # layers, experts
_BLOCK = 1 << 20  # choices that are looked at together

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace says about its model, by the names of header.json."""

    model: dict[str, Any]  # name, sha256 of the file's head, bytes
    n_layers: int
    n_encoder_layers: int
    n_experts: tuple[int, ...]  # by layer; 0: a dense one
    n_experts_used: int
    labels: tuple[str, ...] = ()  # of texts
    logits: bool = False
    visits: bool = False  # visit_ns and visit_read are there

    @property
    def stacks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The MoE layers that a chunk passes: those of ids that are continued, those of a source."""
        layers = [layer for layer, experts in enumerate(self.n_experts) if experts]
        encoder = self.n_encoder_layers
        return tuple(at for at in layers if at >= encoder), tuple(at for at in layers if at < encoder)

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every array as (dtype, shape of one row). Its rows are counted by what its name begins with."""
        most = max(self.n_experts, default=0)
        k, integer = self.n_experts_used, "|u1" if most <= 256 else "<u2"
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "expert_bytes": ("<i8", (most,)),
            "sequence_labels": ("<i4", ()),
            "sequence_prompts": ("<i4", ()),
            "chunks": ("<i4", (2,)),
            "ids": ("<i4", ()),
            "positions": ("<i4", ()),
            "sequences": ("<i4", ()),
            "experts": (integer, (k,)),
            "weights": ("<f2", (k,)),
        }
        if self.visits:
            found |= {"visit_ns": ("<u4", ()), "visit_read": ("|u1", ())}
        return found | ({"logits": ("<f4", (most,))} if self.logits else {})


@dataclass(frozen=True, slots=True)
class Step:
    """What the router of one layer decided for the rows of one chunk."""

    chunk: int
    layer: int
    rows: slice  # of the trace: ids[rows], positions[rows], sequences[rows]
    experts: Array  # [n, n_experts_used] best first
    weights: Array  # float16, the same shape
    logits: Array | None  # float32 [n, n_experts of the layer]; None: not recorded


class Trace:
    """A trace, open for reading: arrays are views of the file, compared with their checksums when they are
    first used."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = ArrayFile(path)
        self._arrays: dict[str, Array] = {}
        self.header = self._read_header()
        self._depths = np.array([len(layers) for layers in self.header.stacks], np.int64)
        self._check()

    # --- what is in it

    @property
    def n_rows(self) -> int:
        return len(self.array("ids"))

    def array(self, name: str) -> Array:
        """One of the arrays of docs/TRACE.md, as it lies in the file."""
        if name not in self._arrays:
            columns = self.header.columns()
            if name not in columns:
                raise TraceError(f"{self.path} has no array {name!r}, only {', '.join(columns)}")
            self._arrays[name] = self._file.array(name, *columns[name])
        return self._arrays[name]

    def chunk_choices(self) -> Integers:
        """[n_chunks + 1] where in experts, weights and logits each chunk begins."""
        chunks = self.array("chunks")
        return _starts(chunks[:, 0].astype(np.int64) * self._depths[chunks[:, 1]])

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Chunks that follow each other, as many as make a block worth a pass of numpy, with their experts,
        checked: (chunks, experts)."""
        starts = self.chunk_choices()
        first = 0
        while first < len(starts) - 1:
            enough = int(np.searchsorted(starts, starts[first] + _BLOCK))
            last = min(max(enough, first + 1), len(starts) - 1)
            yield slice(first, last), self._experts(slice(first, last), starts)
            first = last

    def layers_of(self, chunks: slice) -> Integers:
        """The layer of every choice of some chunks: [choices]."""
        return np.repeat(*self._step_layers(chunks))

    def steps(self) -> Iterator[Step]:
        """Chunk by chunk, in each the layers in their order: what the engine did, in its order."""
        rows = _starts(self.array("chunks")[:, 0])
        weights, stacks = self.array("weights"), self.header.stacks
        logits = self.array("logits") if self.header.logits else None
        starts = self.chunk_choices()
        for chunks, experts in self.blocks():
            begin = at = int(starts[chunks.start])
            for chunk in range(chunks.start, chunks.stop):
                n = int(rows[chunk + 1] - rows[chunk])
                for layer in stacks[int(self.array("chunks")[chunk, 1])]:
                    here = slice(at, at + n)
                    yield Step(
                        chunk,
                        layer,
                        slice(int(rows[chunk]), int(rows[chunk + 1])),
                        experts[at - begin : at - begin + n],
                        weights[here],
                        None if logits is None else logits[here, : self.header.n_experts[layer]],
                    )
                    at += n

    # --- checks

    def _experts(self, chunks: slice, starts: Integers) -> Array:
        experts = self.array("experts")[starts[chunks.start] : starts[chunks.stop]]
        limits = np.array(self.header.n_experts, np.int64)[self.layers_of(chunks)]
        wrong = np.flatnonzero((experts >= limits[:, None]).any(axis=1))
        if wrong.size:
            at = int(wrong[0])
            self._file.fail(
                f"experts[{int(starts[chunks.start]) + at}] is {experts[at].tolist()} in a layer of "
                f"{limits[at]} experts"
            )
        return experts

    def _step_layers(self, chunks: slice) -> tuple[Integers, Integers]:
        """(layer, rows) of every step of some chunks."""
        which = self.array("chunks")[chunks]
        depths = self._depths[which[:, 1]]
        stacks = self.header.stacks
        flat = np.array([*stacks[0], *stacks[1]], np.int64)
        within = np.arange(depths.sum()) - np.repeat(_starts(depths)[:-1], depths)
        return flat[within + np.repeat(which[:, 1] * len(stacks[0]), depths)], np.repeat(which[:, 0], depths)

    def _check(self) -> None:
        """The arrays fit together."""
        header, chunks = self.header, self.array("chunks")
        if len(chunks) and (chunks[:, 0].min() < 1 or ((chunks[:, 1] < 0) | (chunks[:, 1] > 1)).any()):
            self._file.fail("chunks: expected at least 1 row each, and stack 0 or 1")
        n_rows, n_choices = int(chunks[:, 0].sum(dtype=np.int64)), int(self.chunk_choices()[-1])
        n_sequences = len(self.array("sequence_labels"))
        if header.visits:
            n_visits = self._file.rows("visit_ns", *header.columns()["visit_ns"])
            if self._file.rows("visit_read", *header.columns()["visit_read"]) != n_visits:
                self._file.fail(f"visit_read: expected {n_visits} rows, as visit_ns has")
        choices = ("experts", "weights", "logits") if header.logits else ("experts", "weights")
        rows = {"expert_bytes": header.n_layers, "sequence_prompts": n_sequences}
        rows |= dict.fromkeys(("ids", "positions", "sequences"), n_rows) | dict.fromkeys(choices, n_choices)
        for name, expected in rows.items():
            found = self._file.rows(name, *header.columns()[name])
            if found != expected:
                self._file.fail(f"{name}: expected {expected} rows, found {found}")
        for name, low, high in (
            ("sequences", 0, n_sequences),
            ("sequence_labels", -1, len(header.labels)),
            ("expert_bytes", 0, 1 << 50),
        ):
            numbers = self.array(name)
            if numbers.size and not (low <= numbers.min() and numbers.max() < high):
                self._file.fail(f"{name}: expected numbers from {low} to {high - 1}")

    # --- the header

    def _read_header(self) -> Header:
        try:
            found = json.loads(self._file.text(HEADER, _LARGEST_HEADER))
        except (ValueError, RecursionError) as error:
            raise TraceError(
                f"{self.path}: {HEADER} is not JSON ({error}); record the trace again"
            ) from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise TraceError(f"{self.path} is no routing trace: {HEADER} does not say {FORMAT!r}")
        if found.get("version") != VERSION:
            raise TraceError(
                f"{self.path} has version {found.get('version')!r}; this Colibri reads version {VERSION}. "
                "Record the trace again, or update Colibri."
            )
        return self._header(found)

    def _header(self, found: dict[str, Any]) -> Header:
        names = ("n_layers", "n_encoder_layers", "n_experts_used", "n_experts", "labels", "model")
        values: list[Any] = [found.get(name) for name in names]
        layers, encoder, used, experts, labels, model = values
        sound = (
            _is_count(layers, _MOST)
            and _is_count(encoder, layers)
            and _is_count(used, _MOST)
            and used > 0
            and isinstance(experts, list)
            and len(experts) == layers
            and all(_is_count(count, _MOST) and (count == 0 or count >= used) for count in experts)
            and any(experts)
            and isinstance(labels, list)
            and all(isinstance(label, str) for label in labels)
            and isinstance(model, dict)
            and type(found.get("logits")) is bool
            and type(found.get("visits", False)) is bool
        )
        if not sound:
            self._file.fail(f"{HEADER} lacks a field or holds one that makes no sense")
        return Header(
            model,
            layers,
            encoder,
            tuple(experts),
            used,
            tuple(labels),
            found["logits"],
            found.get("visits", False),
        )


def _is_count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def _starts(lengths: Array) -> Integers:
    """[n + 1] where pieces of these lengths begin, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
