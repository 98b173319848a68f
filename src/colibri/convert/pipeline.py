"""Checkpoint in, `.colibri` out: check everything, then stream tensor after tensor into the file.

Owns: the order of the steps, progress, the report. Only a few blocks of rows of one entry are in memory.
Refuses: an output that would destroy something else. What is wrong with a source is said by the module that
sees it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.convert import embedded
from colibri.convert.checkpoint import (
    Checkpoint,
    ReadRows,
    SourceTensor,
    View,
    open_checkpoint,
    reading,
    unused_weight_files,
    widen,
)
from colibri.convert.keys import Keys
from colibri.convert.mxfp4 import chosen_types, panels
from colibri.convert.mxfp4 import widen as widen_mxfp4
from colibri.convert.registry import family_of
from colibri.convert.targets import with_encoder
from colibri.convert.tensors import pattern_of, resolve
from colibri.entries import Entry, bytes_by_class, weight_types
from colibri.errors import ArgumentError, ConversionError, ModelIOError
from colibri.format import Writer, is_container
from colibri.quantize import KEPT, block_rows, pack

Progress = Callable[[int, int, str], object]  # (bytes written, bytes of all tensors, entry name)

# Raise it when the same source gives other bytes: cached conversions are then made anew.
CONVERTER_VERSION = "1"
_BLOCKS_AHEAD = 8  # packed blocks, about 1 MiB each, that may wait for the file


@dataclass(frozen=True, slots=True)
class ConversionReport:
    path: Path
    type: str  # "q8", or "q4 experts, q8 dense, q8 output"
    model_type: str
    entries: int
    bytes: int  # of the file
    source_bytes: int  # of the tensors that were read
    bytes_by_class: dict[str, int]  # entry data by ENTRY_CLASSES
    ignored_tensors: list[str]
    defaults_used: dict[str, Any]  # keys absent from config.json and the class defaults taken for them
    notes: list[str]
    seconds: float = field(compare=False)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    progress: Progress | None = None,
    overwrite: bool = True,
    require_tokenizer: bool = True,
) -> ConversionReport:
    """Converts a Hugging Face directory to f32, bf16, q8 (the default), q6 or q4.

    experts, dense, output: another type than `type` for routed experts; for attention, shared experts and
    dense feed-forward; for embedding and output head. Routers and vectors stay f32. Experts that the
    checkpoint stores as mxfp4 stay so unless `experts` says another type.
    overwrite: an existing .colibri file is replaced, atomically and only by a complete one; another kind of
    file is never replaced. require_tokenizer: False allows a checkpoint without tokenizer.json, whose file
    can then only be evaluated by ids.
    """
    started = time.perf_counter()
    weight_types(type, experts=experts, dense=dense, output=output)  # wrong ones are told first
    checkpoint = open_checkpoint(Path(source))
    types = chosen_types(checkpoint.config, type, experts, dense, output)
    _check_output(Path(out), checkpoint, overwrite)
    notes = unused_weight_files(checkpoint.path)
    if Path(out).exists():
        notes.append(f"{out} was there before and is replaced")
    keys = Keys(checkpoint.config, checkpoint.path / "config.json")
    family = family_of(keys)
    decoder = family.read_config(keys)
    keys.finish()
    config = decoder.config
    if not any(config.get("n_experts", ())):
        if experts is not None:
            raise ArgumentError(f"experts={experts!r} has no effect: {source} has no experts")
        types = replace(types, experts="")
    parts = embedded.read_embedded(
        checkpoint, config["n_vocab"], family.BOS_DEFAULT, family.EOS_DEFAULT, require_tokenizer
    )
    config["n_vocab_used"] = parts.n_vocab_used
    if config.get("n_encoder_layers"):
        parts.blobs["generation.json"] = with_encoder(checkpoint, parts.blobs, decoder.start_id)
    with reading() as read, _pool() as pool:
        _require_equal(checkpoint, decoder.equal, config, read)
        notes += parts.notes + _untie_if_different(checkpoint, config, family.TENSORS["embedding"][0], read)
        blobs = parts.blobs | {
            "source.json": embedded.source_json(
                checkpoint, checkpoint.config["model_type"], str(types), CONVERTER_VERSION
            )
        }
        made = {"rope_inv_freq": decoder.inv_freq, **decoder.made}
        decoder = decoder._replace(made=made)
        writer = Writer(out, config, types, blobs)
        views, ignored = resolve(checkpoint, family, writer.tensors, writer.config, decoder)
        with writer:
            count = _counter(progress, sum(entry.bytes for entry in writer.tensors))
            for entry in writer.tensors:
                values = made.get(pattern_of(entry.name, writer.config["n_encoder_layers"])[0])
                if values is not None:
                    chunks = iter([memoryview(values.astype("<f4").tobytes())])
                else:
                    chunks = _packed(entry, views[entry.name], read, pool)
                writer.write(entry.name, count(entry.name, chunks))
    return ConversionReport(
        path=writer.path,
        type=str(types),
        model_type=checkpoint.config["model_type"],
        entries=len(writer.entries),
        bytes=writer.bytes,
        source_bytes=sum(view.bytes(view.rows) for entry in views.values() for view in entry),
        bytes_by_class=bytes_by_class(writer.entries),
        ignored_tensors=ignored,
        defaults_used=keys.defaults,
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _check_output(out: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    real = Path(os.path.realpath(out))
    if real.is_dir():
        raise ConversionError(
            f"The output {out} is a directory; give the name of a file, such as model.colibri."
        )
    if not real.parent.is_dir():
        raise ModelIOError(
            f"Cannot write {out}: the directory {real.parent} does not exist. Create it first."
        )
    if not os.access(real.parent, os.W_OK):
        raise ModelIOError(f"Cannot write {out}: no permission to create files in {real.parent}.")
    if not is_container(real) and any(real == file.resolve() for file in checkpoint.path.iterdir()):
        raise ConversionError(f"The output {out} is a file of the source checkpoint. Choose another name.")
    if real.exists() and not (overwrite and is_container(real)):
        kind = "exists already" if overwrite is False else "exists and is not a .colibri file"
        raise ConversionError(
            f"The output {out} {kind}, so it is left as it is. Choose another name or remove it."
        )


def _untie_if_different(
    checkpoint: Checkpoint, config: dict[str, Any], embedding_name: str, read: ReadRows
) -> list[str]:
    """tie_word_embeddings is true and both tensors exist: Transformers ties them only if they are equal."""
    embedding, head = (checkpoint.tensors.get(name) for name in (embedding_name, "lm_head.weight"))
    if not config["tied_output"] or embedding is None or head is None:
        return []
    if _equal(embedding, head, config, read):
        return []
    config["tied_output"] = 0
    return ["tie_word_embeddings is true, but lm_head.weight differs from the embedding: both are kept"]


def _equal(one: SourceTensor, other: SourceTensor, config: dict[str, Any], read: ReadRows) -> bool:
    """Whether two tensors of the embedding's shape hold the same numbers."""
    rows, cols = config["n_vocab"], config["n_embd"]
    first, second = View(one, rows, cols), View(other, rows, cols)
    step = max(1, (1 << 20) // cols)
    return one.shape == other.shape == (rows, cols) and all(
        np.array_equal(read(first, at, min(at + step, rows)), read(second, at, min(at + step, rows)))
        for at in range(0, rows, step)
    )


def _require_equal(
    checkpoint: Checkpoint, names: tuple[str, ...], config: dict[str, Any], read: ReadRows
) -> None:
    found = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
    for tensor in found[1:]:
        if not _equal(found[0], tensor, config, read):
            raise ConversionError(
                f"{tensor.name} in {tensor.file.name} differs from {found[0].name}: an encoder and a "
                "decoder with embeddings of their own are not supported."
            )


def _counter(
    progress: Progress | None, total: int
) -> Callable[[str, Iterator[memoryview]], Iterator[memoryview]]:
    """Passes chunks on and reports how many bytes of all tensors are written."""
    done = 0

    def count(name: str, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += chunk.nbytes
            if progress is not None:
                progress(done, total, name)

    return count


def _pool() -> ThreadPoolExecutor:
    """Packing lets other threads run, so blocks are packed side by side."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8), "colibri-convert")


def _packed(
    entry: Entry, views: tuple[View, ...], read: ReadRows, pool: ThreadPoolExecutor
) -> Iterator[memoryview]:
    """The bytes of an entry, block after block. Errors name the source tensor."""
    if entry.kind == "vector":
        for view in views:
            yield _packed_vector(view, read)
        return
    pending: deque[Future[memoryview]] = deque()
    for view, (rows, cols, type) in zip(views, entry.matrices, strict=True):
        step = block_rows(cols)
        for first in range(0, rows, step):
            block = read(view, first, min(first + step, rows))
            pending.append(pool.submit(_pack_block, block, type, view, first))
            if len(pending) > _BLOCKS_AHEAD:
                yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _pack_block(block: npt.NDArray[Any], type: str, view: View, first: int) -> memoryview:
    name = view.tensor.name + ("" if view.expert is None else f"[{view.expert}]")
    if type == KEPT:
        return panels(block, name, first)
    rows = widen(block) if view.scales is None else widen_mxfp4(block, name, first)
    return pack(rows, type, name=name, first_row=view.start + first)


def _packed_vector(view: View, read: ReadRows) -> memoryview:
    row = widen(read(view, 0, 1))
    if not np.isfinite(row).all():
        at = int(np.argwhere(~np.isfinite(row[0]))[0, 0])
        raise ConversionError(
            f"{view.tensor.name}[{at}] is {row[0, at]}: weights must be finite. The checkpoint is damaged "
            "or its training diverged; download it again."
        )
    if view.affine != (0.0, 1.0):
        row = ((row.astype(np.float64) + view.affine[0]) * view.affine[1]).astype(np.float32)
    return np.ascontiguousarray(row, dtype="<f4").reshape(-1).data.cast("B")
