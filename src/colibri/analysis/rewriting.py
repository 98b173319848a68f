"""A `.colibri` file made of another one: fewer experts, or experts in other types.

Owns: that what is not changed is copied byte by byte, the record of the change in source.json, and that a
trace is one of the model.
Refuses: deciding what changes (pruning.py, bits.py); writing (format.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from colibri.analysis.recording import head_hash
from colibri.analysis.trace import Trace
from colibri.errors import ArgumentError
from colibri.format import Container, Entry, Writer, is_container, read_blobs, read_entry, read_json_blob

Progress = Callable[[int, int, str], object]  # (bytes written, bytes of all tensors, entry name)


def rewrite(
    container: Container,
    out: Path,
    config: Mapping[str, Any],
    origin: Callable[[str], Entry],
    change: Callable[[Entry, Entry], bytes | memoryview | None],
    types: Callable[[str], tuple[str, ...]],
    told: Mapping[str, Any],
    progress: Progress | None = None,
) -> int:
    """Writes `out` aside and renames it; returns its bytes.

    origin(name): the entry of the old file that the new one of this name is made of. change(new, old): its
    bytes, or None to copy them. types(name): of matrices and experts. told: what source.json says of it."""
    blobs = read_blobs(container.path)
    source = read_json_blob(blobs, "source.json")
    made = {"model": container.path.name, "sha256": model_hash(container), **told}
    source["changes"] = [*source.get("changes", []), made]
    blobs["source.json"] = json.dumps(source).encode()
    with Writer(out, config, types, blobs) as writer:
        done, total = 0, sum(entry.bytes for entry in writer.tensors)
        for new in writer.tensors:
            old = origin(new.name)
            data = change(new, old)
            writer.write(new.name, _whole(container, old) if data is None else [data])
            done += new.bytes
            if progress is not None:
                progress(done, total, new.name)
    return writer.bytes


def check_output(model: Path, out: Path) -> None:
    """Another file than the model; only a .colibri file is replaced."""
    real = Path(os.path.realpath(out))
    if real == Path(os.path.realpath(model)):
        raise ArgumentError(f"output: {out} is the model itself; choose another name")
    if real.exists() and not is_container(real):
        raise ArgumentError(f"output: {out} exists and is not a .colibri file, so it is left as it is")


def _whole(container: Container, entry: Entry) -> Iterator[bytes]:
    yield read_entry(container, entry)


def model_hash(container: Container) -> str:
    """As traces tell it."""
    return head_hash(container.path, min(entry.offset for entry in container.entries))


def check_trace(trace: Trace, container: Container) -> None:
    """An error unless a trace was recorded with this model."""
    if trace.header.model.get("sha256") != model_hash(container):
        raise ArgumentError(
            f"trace: {trace.path} was recorded with {trace.header.model.get('name')!r}, another file than "
            f"{container.path}; record one with this model"
        )
