"""Looks into a `.colibri` file: config, tensors, bytes by class, source, damage. Data only; the CLI prints.

Owns: what `colibri inspect` knows. Refuses: running a model.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.config import Config
from colibri.entries import Entry, bytes_by_class
from colibri.errors import ModelFileError
from colibri.format import Progress, damaged_entries, read_container, read_entry, read_json_blob
from colibri.quantize import matrix_bytes


@dataclass(frozen=True, slots=True)
class Description:
    path: Path
    bytes: int  # of the file
    config: Config
    entries: tuple[Entry, ...]  # tensors and blobs, in file order
    bytes_by_class: dict[str, int]  # keys: ENTRY_CLASSES; without padding between entries
    types: dict[str, int]  # bytes by weight type
    parameters: int  # weights, padding excluded
    active_parameters: int  # weights used per token: n_experts_used experts of each routed layer
    source: dict[str, Any]  # source.json
    generation: dict[str, Any]  # generation.json


@dataclass(frozen=True, slots=True)
class Verification:
    path: Path
    entries: int
    bytes: int
    damaged: list[str]  # entries whose bytes do not match their checksum
    seconds: float


def describe(path: str | os.PathLike[str]) -> Description:
    """Everything the head of a file says, and its small blobs."""
    container = read_container(path)
    blobs = {
        entry.name: read_entry(container, entry.name)
        for entry in container.entries
        if entry.name in ("source.json", "generation.json")
    }
    tensors = [entry for entry in container.entries if entry.kind != "blob"]
    return Description(
        path=container.path,
        bytes=container.bytes,
        config=container.config,
        entries=container.entries,
        bytes_by_class=bytes_by_class(container.entries),
        types=_bytes_by_type(tensors),
        parameters=sum(map(_parameters, tensors)),
        active_parameters=_active_parameters(tensors, container.config),
        source=read_json_blob(blobs, "source.json"),
        generation=read_json_blob(blobs, "generation.json"),
    )


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Verification:
    """Compares every entry with its checksum. A damaged head is an error; damaged data is reported by
    name."""
    started = time.perf_counter()
    container = read_container(path)
    damaged = damaged_entries(container, progress)
    total = sum(entry.bytes for entry in container.entries)
    return Verification(container.path, len(container.entries), total, damaged, time.perf_counter() - started)


def require_intact(path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Raises an error that names the damaged entries."""
    found = verify(path, progress)
    if found.damaged:
        more = f" and {len(found.damaged) - 5} more" if len(found.damaged) > 5 else ""
        raise ModelFileError(
            f"{found.path}: {len(found.damaged)} of {found.entries} entries do not match their checksums: "
            f"{', '.join(found.damaged[:5])}{more}. Copy or convert the model again."
        )


def _bytes_by_type(tensors: list[Entry]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for entry in tensors:
        for rows, cols, type in entry.matrices:
            sums[type] = sums.get(type, 0) + matrix_bytes(rows, cols, type)
        if entry.kind == "vector":
            sums["f32"] = sums.get("f32", 0) + entry.bytes
    return sums


def _parameters(entry: Entry) -> int:
    """Learned weights; RoPE frequencies are computed."""
    if entry.name == "rope_inv_freq":
        return 0
    return sum(rows * cols for rows, cols, _ in entry.matrices) or entry.rows * entry.cols


def _active_parameters(tensors: list[Entry], config: Config) -> int:
    total = 0
    for entry in tensors:
        if entry.kind == "expert":
            index = int(entry.name.rsplit(".", 1)[1])
            total += _parameters(entry) if index < config["n_experts_used"] else 0
        else:
            total += _parameters(entry)
    return total
