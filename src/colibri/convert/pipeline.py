"""Checkpoint in, `.colibri` out: prepare and check everything, then stream tensor after tensor into the file.

Owns: writing, progress, the report. Only a few blocks of rows of one entry are in memory.
Refuses: an output that would destroy something else. What is wrong with a source is said by prepare.py and
below.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri.convert.checkpoint import Checkpoint, ReadRows, View, reading, stored_bytes, widen
from colibri.convert.gguf.blocks import HELD, ON_GRIDS, PLAIN, Blocks
from colibri.convert.gguf.regrid import regrid
from colibri.convert.gguf.repack import repack
from colibri.convert.mxfp4 import panels
from colibri.convert.mxfp4 import widen as widen_mxfp4
from colibri.convert.prepare import CONVERTER_VERSION, Plan, Request, prepare
from colibri.convert.source import open_source
from colibri.convert.tensors import pattern_of, scales_of
from colibri.convert.types import is_rounded, is_searched
from colibri.entries import Entry, bytes_by_class, entry_class, weight_types
from colibri.errors import ArgumentError, ConversionError, ModelIOError
from colibri.format import Writer, is_container
from colibri.paths import is_there
from colibri.quantize import KEPT, block_rows, pack, unpack

__all__ = ["CONVERTER_VERSION", "ConversionReport", "convert"]

Squares = tuple[float, float]  # sums of squared errors and of squares
Progress = Callable[[int, int, str], object]  # (bytes written, bytes of all tensors, entry name)

_GGML_STEP = 4  # times as many rows at once: moving ggml's blocks, which are small, is so quick that Python's
# share would count
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
    # Keys absent from config.json and the class defaults taken for them; none of GGUF, whose architectures
    # say what holds.
    defaults_used: dict[str, Any]
    notes: list[str]
    # Of matrices in types of GGUF that became others, by class: root of the sum of squared errors over that
    # of squares.
    errors: dict[str, float]
    seconds: float = field(compare=False)

    def error_notes(self) -> list[str]:
        """`errors` as a note, if there are any."""
        shares = ", ".join(f"{name} {100 * error:.3g} %" for name, error in self.errors.items())
        text = f"errors of what was rounded a second time, of the size of its weights: {shares}"
        return [text] if shares else []


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    context: int | None = None,
    requantize: bool = False,
    progress: Progress | None = None,
    planned: Callable[[int], object] | None = None,
    overwrite: bool = True,
    require_tokenizer: bool = True,
    expert_bits: Mapping[str, list[str]] | None = None,
) -> ConversionReport:
    """Converts a Hugging Face directory to f32, bf16, q8 (the default), q6 or q4; or a GGUF file, whose
    matrices stay as they are stored where a type here holds them without loss (the default).

    experts, dense, output: another type than `type` for routed experts; for attention, shared experts and
    dense feed-forward; for embedding and output head. Routers and vectors stay f32. Experts that the
    checkpoint stores as mxfp4 stay so unless `experts` says another type.
    context: the longest text that the file is for, at most and by default what config.json says; RoPE of type
    longrope has one set of frequencies for texts up to its original length, the default, and one beyond.
    requantize: types of GGUF below 4 bits and non-linear ones may be rounded a second time.
    planned(bytes) is called once everything is checked and nothing is written, with the size of the file;
    what it raises comes out.
    overwrite: an existing .colibri file is replaced, atomically and only by a complete one; another kind of
    file is never replaced. require_tokenizer: False allows a checkpoint without tokenizer.json, whose file
    can then only be evaluated by ids.
    expert_bits: the type of each expert, by layer (colibri.expert_bits.read_plan), in place of `experts`.
    """
    started = time.perf_counter()
    weight_types(type, experts=experts, dense=dense, output=output)  # wrong ones are told first
    request = Request(type, experts, dense, output, context, requantize, require_tokenizer, expert_bits)
    if expert_bits is not None and experts is not None:
        raise ArgumentError(f"experts={experts!r} has no effect: expert_bits says the type of each expert")
    checkpoint = open_source(Path(source))
    _check_output(Path(out), checkpoint, overwrite)
    replaced = [f"{out} was there before and is replaced"] if Path(out).exists() else []
    _keep_freed_memory()
    with reading() as read, _pool() as pool:
        plan = prepare(checkpoint, request, read)
        errors = Errors()
        writer = Writer(out, plan.config, plan.types, plan.blobs)
        if planned is not None:
            planned(writer.bytes)
        with writer:
            count = _counter(progress, sum(entry.bytes for entry in writer.tensors))
            for entry in writer.tensors:
                pattern = pattern_of(entry.name, plan.config["n_encoder_layers"])[0]
                values = plan.decoder.made.get(pattern)
                if values is not None:
                    chunks = iter([memoryview(values.astype("<f4").tobytes())])
                else:
                    chunks = _packed(entry, plan.views[entry.name], read, pool, errors)
                writer.write(entry.name, count(entry.name, chunks))
    return ConversionReport(
        path=writer.path,
        type=str(plan.types),
        model_type=checkpoint.config["model_type"],
        entries=len(writer.entries),
        bytes=writer.bytes,
        source_bytes=_source_bytes(plan),
        bytes_by_class=bytes_by_class(writer.entries),
        ignored_tensors=list(plan.left_out),
        defaults_used=plan.keys.defaults if checkpoint.gguf is None else {},
        notes=replaced + plan.notes,
        errors=errors.relative(),
        seconds=time.perf_counter() - started,
    )


def _source_bytes(plan: Plan) -> int:
    views = [view for entry in plan.views.values() for view in entry]
    grids = {tensor.name: tensor for view in views if view.grid for tensor in scales_of(view)}
    of_grids = sum(stored_bytes(tensor, math.prod(tensor.shape)) for tensor in grids.values())
    return sum(view.bytes(view.rows) for view in views) + of_grids


def _check_output(out: Path, checkpoint: Checkpoint, overwrite: bool) -> None:
    if is_there(out) and not (
        out.is_file() or out.is_dir()
    ):  # such as /dev/stdout, which leads nowhere that has a name
        raise ModelIOError(f"The output {out} is a pipe or a device; give the name of a file.")
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
    if not is_container(real) and any(real == file.resolve() for file in checkpoint.beside()):
        raise ConversionError(f"The output {out} is a file of the source checkpoint. Choose another name.")
    if real.exists() and not (overwrite and is_container(real)):
        kind = "exists already" if overwrite is False else "exists and is not a .colibri file"
        raise ConversionError(
            f"The output {out} {kind}, so it is left as it is. Choose another name or remove it."
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


def _keep_freed_memory() -> None:
    """Has glibc keep up to 32 MiB of freed blocks: its measure is the largest one that was freed so far.
    The arrays of a step then have the pages of the last step; new pages cost more than the work on them."""
    np.empty(16 << 20, np.uint8)


def _pool() -> ThreadPoolExecutor:
    """Packing lets other threads run, so blocks are packed side by side."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8), "colibri-convert")


class Errors:
    """Sums over what was rounded a second time, by class of entry."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, entry: Entry, squares: tuple[float, float]) -> None:
        """squares: of errors, of values"""
        sums = self.sums.setdefault(entry_class(entry), [0.0, 0.0])
        sums[0] += squares[0]
        sums[1] += squares[1]

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(e / v) if v else 0.0 for name, (e, v) in self.sums.items()}


def _packed(
    entry: Entry, views: tuple[View, ...], read: ReadRows, pool: ThreadPoolExecutor, errors: Errors
) -> Iterator[memoryview]:
    """The bytes of an entry, block after block. Errors name the source tensor."""
    if entry.kind == "vector":
        for view in views:
            yield _packed_vector(view, read)
        return
    pending: deque[Future[tuple[memoryview, Squares | None]]] = deque()

    def next_chunk() -> memoryview:
        chunk, squares = pending.popleft().result()
        if squares is not None:
            errors.add(entry, squares)
        return chunk

    for view, (rows, cols, type) in zip(views, entry.matrices, strict=True):
        small = view.tensor.dtype in PLAIN or is_searched(view, type)
        step = block_rows(cols) * (1 if small else _GGML_STEP)
        for first in range(0, rows, step):
            block = read(view, first, min(first + step, rows))
            pending.append(pool.submit(_pack_block, block, type, view, first))
            if len(pending) > _BLOCKS_AHEAD:
                yield next_chunk()
    while pending:
        yield next_chunk()


def _pack_block(block: Any, type: str, view: View, first: int) -> tuple[memoryview, Squares | None]:
    """The block's bytes, and if a type of GGUF became another one, what that changed."""
    name = view.tensor.name + ("" if view.expert is None else f"[{view.expert}]")
    if isinstance(block, Blocks) and HELD.get(block.dtype) == type:
        return repack(block, lambda row: view.place(first + row, 0)), None
    if isinstance(block, Blocks) and ON_GRIDS.get(block.dtype) == type:
        return regrid(block, lambda row: view.place(first + row, 0))
    if type == KEPT:
        return panels(block, name, first), None
    rows = widen(block) if view.scales is None else widen_mxfp4(block, name, first)
    packed = pack(rows, type, name=name, place=lambda row, col: view.place(first + row, col))
    if not is_rounded(view, type):
        return packed, None
    errors = unpack(packed, len(rows), rows.shape[1], type) - rows
    return packed, (float(np.vdot(errors, errors)), float(np.vdot(rows, rows)))


def _packed_vector(view: View, read: ReadRows) -> memoryview:
    row = widen(read(view, 0, 1))
    if not np.isfinite(row).all():
        at = int(np.argwhere(~np.isfinite(row[0]))[0, 0])
        raise ConversionError(
            f"{view.place(0, at)} is {row[0, at]}: weights must be finite. The checkpoint is damaged "
            "or its training diverged; download it again."
        )
    if view.affine != (0.0, 1.0):
        row = ((row.astype(np.float64) + view.affine[0]) * view.affine[1]).astype(np.float32)
    if view.log:
        if not (row < 0).all():
            raise ConversionError(
                f"{view.tensor.name} holds {row.max()}; expected the negative of a rate in every place. "
                "Download the file again."
            )
        row = np.log(-row.astype(np.float64)).astype(np.float32)
    return np.ascontiguousarray(row, dtype="<f4").reshape(-1).data.cast("B")
