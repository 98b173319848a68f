"""Tensors in ggml's block types: their rows from a file, as float32, and the types of ours that hold them.

Owns: which of our types holds which of ggml's without loss, and which one comes next. Sizes of blocks and
decoding to floats are the gguf package's, the bytes of panels repack.py's. Refuses: a file that shrinks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.convert.source_tensor import SourceTensor
from colibri.errors import ConversionError

Bytes = npt.NDArray[np.uint8]

# Our type that has the same values. q8 is any 8-bit codes with an f16 scale for 32, q6 those of 6 bits with
# scales of 16.
HELD = {
    "F32": "f32",
    "F16": "f32",
    "BF16": "bf16",
    "Q8_0": "q8",
    "Q5_0": "q8",
    "Q4_0": "q8",
    "IQ4_NL": "q8",
    "Q6_K": "q6",
    "Q3_K": "q6",
    "Q4_K": "q4",
    "MXFP4": "mxfp4",
}
# Our type that regrid.py rounds to, by the scales of the blocks alone.
ON_GRIDS = {"Q4_1": "q4", "Q5_1": "q6", "Q5_K": "q6", "Q2_K": "q4"}
PLAIN = ("F32", "F16", "BF16")
_BITS = {"q4": 4.5, "q6": 6.5625, "q8": 8.5, "f32": 32.0}


class Blocks(NamedTuple):
    """Rows as they are stored: uint8 [rows, bytes of a row]."""

    data: Bytes
    dtype: str


@cache
def sizes() -> dict[str, tuple[int, int]]:
    """Of every ggml type: elements and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {type.name: size for type, size in GGML_QUANT_SIZES.items()}


@cache
def names() -> dict[int, str]:
    from gguf.constants import GGML_QUANT_SIZES

    return {int(type): type.name for type in GGML_QUANT_SIZES}


def row_bytes(dtype: str, cols: int) -> int:
    block, width = sizes()[dtype]
    return cols // block * width


def next_type(dtype: str) -> str:
    """The smallest type of ours that spends at least as many bits on a weight."""
    block, width = sizes()[dtype]
    return next(type for type, bits in _BITS.items() if bits >= 8 * width / block)


@cache
def decodable() -> frozenset[str]:
    """Types whose values the gguf package can tell."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def can(dtype: str) -> bool:
        try:
            dequantize(np.zeros((1, sizes()[dtype][1]), np.uint8), GGMLQuantizationType[dtype])
        except RuntimeError:  # the package has no decoder
            return False
        return True

    return frozenset({"F32", "F16", *filter(can, sizes())})


def read_rows(tensor: SourceTensor, shape: tuple[int, ...], expert: int, rows: slice) -> Any:
    """Rows of a matrix, or of one of a stack [experts, rows, cols]. An array for plain floats, else
    Blocks."""
    assert tensor.offset is not None
    width = row_bytes(tensor.dtype, shape[-1])
    before = expert * shape[-2] if len(shape) > 2 else 0
    at, count = tensor.offset + (before + rows.start) * width, (rows.stop - rows.start) * width
    with tensor.file.open("rb", buffering=0) as stream:
        data = np.empty(count, np.uint8)
        done = 0
        while done < count:
            found = os.preadv(stream.fileno(), [data[done:].data], at + done)
            if not found:
                raise ConversionError(f"{tensor.file} became shorter while it was being converted.")
            done += found
    lines = data.reshape(rows.stop - rows.start, width)
    if tensor.dtype not in PLAIN:
        return Blocks(lines, tensor.dtype)
    import ml_dtypes

    plain = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
    return lines.view(plain[tensor.dtype])


def with_columns(lines: Any, columns: Sequence[int]) -> Any:
    """Columns in this order: whole blocks where none is torn, else numbers."""
    at = np.array(columns, np.intp)
    if not isinstance(lines, Blocks):
        return lines[:, at]
    if not are_whole(lines.dtype, columns):
        return widen(lines)[:, at]
    block, width = sizes()[lines.dtype]
    by_block = lines.data.reshape(len(lines.data), -1, width)[:, at[::block] // block]
    return lines._replace(data=by_block.reshape(len(lines.data), -1))


def are_whole(dtype: str, columns: Sequence[int]) -> bool:
    """Whether columns in this order tear no block of a row apart."""
    block = sizes()[dtype][0]
    if len(columns) % block:
        return False
    runs = np.array(columns, np.intp).reshape(-1, block)
    return not (runs[:, 0] % block).any() and bool((runs == runs[:, :1] + np.arange(block)).all())


def widen(blocks: Blocks) -> npt.NDArray[np.float32]:
    """float32 [rows, cols], as ggml's own decoding has them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # values are checked where they are packed
        values: npt.NDArray[np.float32] = dequantize(blocks.data, GGMLQuantizationType[blocks.dtype])
    return values
