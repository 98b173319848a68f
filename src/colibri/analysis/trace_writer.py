"""Writes a routing trace (docs/TRACE.md) while a model runs.

Owns: bounded memory: arrays grow in files without a name and become one zip at the end, under a temporary
name; so there is a whole trace or none.
Refuses: texts and models (recording.py), reading (trace.py).
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from colibri.analysis.array_file import Array
from colibri.analysis.trace import FORMAT, HEADER, VERSION, Header
from colibri.errors import ModelIOError

_PIECE = 1 << 20


class TraceWriter:
    """One trace, sequence by sequence.

    Leaving the `with` block without an error completes the file; after an error nothing is left and an older
    file is untouched, after the end of the process too."""

    def __init__(self, path: str | os.PathLike[str], header: Header, expert_bytes: Array) -> None:
        """expert_bytes: [n_layers, n_experts] of their records in the model file."""
        self.path = Path(os.path.realpath(path))
        self.n_rows = 0
        self._header, self._expert_bytes = header, expert_bytes
        self._labels = {label: at for at, label in enumerate(header.labels)}
        self._columns = header.columns()
        self._files: dict[str, IO[bytes]] = {}
        self._lengths = dict.fromkeys(self._columns, 0)

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

    def add_sequence(
        self,
        found: Mapping[str, Array],
        *,
        label: str | None = None,
        n_prompt: int,
    ) -> None:
        """What was recorded of one sequence (native.recorded). n_prompt: ids that were given, of its source
        if there is one; the model wrote the others."""
        number, n = self._lengths["sequence_labels"], len(found["positions"])
        for name in self._columns.keys() & found.keys() - {"sequences"}:
            with np.errstate(over="ignore"):  # beyond 65504 a weight is infinite here; no router is near it
                self._append(name, found[name])
        self._append("sequences", np.full(n, number))
        self._append("sequence_labels", np.array([-1 if label is None else self._labels[label]]))
        self._append("sequence_prompts", np.array([n_prompt]))
        self.n_rows += n

    # --- files

    def _append(self, name: str, values: Array) -> None:
        data = np.ascontiguousarray(values, self._columns[name][0])
        self._lengths[name] += len(data)
        try:
            self._files[name].write(data.data)
        except OSError as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
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
