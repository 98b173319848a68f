"""Writes a routing trace (docs/TRACE.md) while a model runs.

Owns: what an observer does in a few microseconds a layer, bounded memory: arrays grow in files without a name
and become one zip at the end, under a temporary name; so there is a whole trace or none.
Refuses: texts and models (recording.py), reading (trace.py).
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from colibri._native import Ids, RoutingView
from colibri.analysis.array_file import Array
from colibri.analysis.trace import FORMAT, HEADER, VERSION, Header
from colibri.errors import ArgumentError, ModelIOError

_PENDING = 4 << 20  # bytes of choices that wait in memory for their conversion
_PIECE = 1 << 20


class TraceWriter:
    """One trace. observe() is the observer of a model's evaluations; end_sequence() says what was read.
    Leaving the `with` block without an error completes the file; after an error nothing is left and an older
    file is untouched, after the end of the process too."""

    def __init__(self, path: str | os.PathLike[str], header: Header, expert_bytes: Array) -> None:
        """expert_bytes: [n_layers, n_experts] of their records in the model file."""
        self.path = Path(os.path.realpath(path))
        self.n_rows = 0
        self._header, self._expert_bytes = header, expert_bytes
        self._labels = {label: at for at, label in enumerate(header.labels)}
        self._stacks = header.stacks
        self._columns = header.columns()
        self._files: dict[str, IO[bytes]] = {}
        self._lengths = dict.fromkeys(self._columns, 0)
        self._names = ["experts", "weights", *(["logits"] if header.logits else [])]
        # bytes of experts, weights and logits, layer after layer: of the chunk that runs, of whole chunks
        self._running: tuple[list[bytes], ...] = tuple([] for _ in self._names)
        self._choices: tuple[list[bytes], ...] = tuple([] for _ in self._names)
        self._positions, self._waiting = b"", 0  # bytes that wait
        self._chunks: list[tuple[int, int]] = []
        self._rows: list[tuple[int, bytes]] = []  # stack and positions of the current sequence's chunks

    def __enter__(self) -> TraceWriter:
        try:
            for name in self._columns:
                self._files[name] = tempfile.TemporaryFile(dir=self.path.parent)
        except OSError as error:
            self._close()
            raise self._failure(error) from error
        self._append("expert_bytes", self._expert_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as error:
            raise error if isinstance(error, ModelIOError) else self._failure(error) from error
        finally:
            self._close()

    # --- what a model tells

    def observe(self, view: RoutingView) -> None:
        """The observer of evaluations. A chunk that does not reach its last layer leaves no trace."""
        layer, k = view.layer, view.n_experts_used
        stack = 1 if layer < self._header.n_encoder_layers else 0
        layers, running = self._stacks[stack], self._running
        if layer == layers[0]:
            for data in running:
                data.clear()
            self._positions = view.data("positions")
        running[0].append(view.data("experts", k))
        running[1].append(view.data("weights", k))
        if len(running) == 3:
            running[2].append(view.data("logits", view.n_experts))
        if layer == layers[-1]:
            self._rows.append((stack, self._positions))
            self._chunks.append((view.n_rows, stack))
            for whole, data in zip(self._choices, running, strict=True):
                whole += data
            self._waiting += (
                2 * view.n_rows * len(layers) * (4 * k + 150)
            )  # with what Python adds to few bytes
            if self._waiting > _PENDING:
                self._convert()

    def end_sequence(
        self, ids: Ids, source: Ids | None = None, *, label: str | None = None, n_prompt: int
    ) -> None:
        """What has been observed since the last one belongs to a new sequence: that of these ids, made from a
        source if there is one. n_prompt: ids that were given, of the source or else of ids; the model wrote
        the others."""
        number = self._lengths["sequence_labels"]
        read = (ids, ids if source is None else source)
        for stack, data in self._rows:
            positions = np.frombuffer(data, np.int32)
            self._append("ids", read[stack][positions])
            self._append("positions", positions)
            self._append("sequences", np.full(len(positions), number))
            self.n_rows += len(positions)
        self._rows.clear()
        self._append("chunks", np.array(self._chunks).reshape(-1, 2))
        self._chunks.clear()
        self._append("sequence_labels", np.array([-1 if label is None else self._labels[label]]))
        self._append("sequence_prompts", np.array([n_prompt]))

    # --- files

    def _convert(self) -> None:
        """Choices that wait become small numbers in their files."""
        k = self._header.n_experts_used
        experts, weights, *logits = self._choices
        self._append("experts", np.frombuffer(b"".join(experts), np.int32).reshape(-1, k))
        with np.errstate(over="ignore"):  # beyond 65504 a weight is infinite here; no router is near it
            self._append("weights", np.frombuffer(b"".join(weights), np.float32).reshape(-1, k))
        if logits:
            self._append("logits", self._wide([len(data) // (4 * k) for data in experts], logits[0]))
        for data in self._choices:
            data.clear()
        self._waiting = 0

    def _wide(self, rows: Sequence[int], logits: Sequence[bytes]) -> Array:
        """Logits of layers that may have different numbers of experts, as one array."""
        counts = {count for count in self._header.n_experts if count}
        if len(counts) == 1:
            return np.frombuffer(b"".join(logits), np.float32).reshape(-1, *counts)
        wide = np.full((sum(rows), max(counts)), np.nan, np.float32)
        at = 0
        for n, data in zip(rows, logits, strict=True):
            wide[at : at + n, : len(data) // (4 * n)] = np.frombuffer(data, np.float32).reshape(n, -1)
            at += n
        return wide

    def _append(self, name: str, values: Array) -> None:
        data = np.ascontiguousarray(values, self._columns[name][0])
        self._lengths[name] += len(data)
        try:
            self._files[name].write(data.data)
        except OSError as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
        if self._rows or self._chunks:
            raise ArgumentError("a trace ends with end_sequence(): rows were observed that belong to no text")
        self._convert()
        aside = self.path.with_name(f".colibri-{secrets.token_hex(8)}.trace")
        try:
            with zipfile.ZipFile(aside, "x", zipfile.ZIP_STORED) as archive:
                archive.writestr(zipfile.ZipInfo(HEADER), header_json(self._header))
                for name in self._columns:
                    self._pack(archive, name)
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)

    def _pack(self, archive: zipfile.ZipFile, name: str) -> None:
        dtype, row = self._columns[name]
        told = {"descr": dtype, "fortran_order": False, "shape": (self._lengths[name], *row)}
        file = self._files[name]
        file.seek(0)
        # ZipInfo with its fixed date: equal traces are equal bytes.
        with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, told)
            while piece := file.read(_PIECE):
                member.write(piece)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _failure(self, error: OSError) -> ModelIOError:
        return ModelIOError(f"Cannot write {self.path}: {error.strerror or error}.")


def header_json(header: Header) -> str:
    """header.json: for readers without this package too, so the layers of each stack are spelled out."""
    names: Sequence[str] = Header.__slots__
    told: dict[str, Any] = {name: getattr(header, name) for name in names}
    return json.dumps({"format": FORMAT, "version": VERSION} | told | {"stacks": header.stacks}, indent=1)
