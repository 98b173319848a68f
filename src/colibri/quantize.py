"""Weight types: packs matrices into the panels that the kernels read (C does it), and back
(docs/FORMAT.md, section 4).

Owns: names, numbers and sizes of all weight types; blocks over threads; unpacking.
Refuses: values that a type cannot hold (NaN, infinity, beyond bf16 or f16 scales); files are the caller's.

Panels of 16 rows are independent, so a matrix may be packed in blocks of `block_rows` rows; joined, the
blocks are the bytes of the whole matrix, and beside them nothing is held.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from colibri import _native
from colibri.errors import ArgumentError, ConversionError, ModelFileError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

TYPE_IDS: dict[str, int] = {"f32": 1, "bf16": 2, "q8": 4, "q6": 6, "q4": 5}
KEPT = "mxfp4"  # never made of floats: experts of some checkpoints come in it and stay in it
STORED_IDS = TYPE_IDS | {KEPT: 7}
TYPE_NAMES: dict[int, str] = {number: name for name, number in STORED_IDS.items()}
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

PANEL_ROWS = 16
GROUP = 32  # elements along k that share a scale
SUPER = 8  # groups of q4 and q6 that share their f16 units
_GROUP_BYTES = GROUP * PANEL_ROWS
_SCALE_BYTES = 2 * PANEL_ROWS
_Q4_BYTES = 256  # of a group's quants, and of a super-group's scales
_Q6_BYTES, _Q6_RECORD = 384, 288  # the same of q6
_ZERO_QUANT = 128  # the byte of q = 0
# Elements packed at a time: a few milliseconds, so that threads end together and Ctrl-C is quick.
_BLOCK_ELEMENTS = 256 * 1024
_PLACE = re.compile(r"weights\[(\d+), ")  # how texts of refused weights begin


def check_type(type: str) -> None:
    """An error for what is no weight type."""
    if type not in TYPE_IDS:
        raise ArgumentError(f"weight type {type!r} is not known; choose one of: {', '.join(TYPE_IDS)}")


def panel_bytes(cols: int, type: str) -> int:
    """Bytes of 16 rows of `cols` elements."""
    if type != KEPT:
        check_type(type)
    groups = -(-cols // GROUP)
    if type == "f32":
        return 64 * cols
    if type == "bf16":
        return 64 * ((cols + 1) // 2)
    if type == "q8":
        return -(-(_GROUP_BYTES + _SCALE_BYTES) * groups // 64) * 64
    if type == KEPT:
        return _Q4_BYTES * groups + 64 * -(-groups // 4)
    supers = -(-groups // SUPER)
    if type == "q6":
        return -(-(_Q6_BYTES * groups + _Q6_RECORD * supers) // 64) * 64
    return _Q4_BYTES * (groups + supers)


def matrix_bytes(rows: int, cols: int, type: str) -> int:
    """Bytes of a whole matrix; the last panel is filled up with zero rows."""
    return -(-rows // PANEL_ROWS) * panel_bytes(cols, type)


def pack(
    matrix: Floats, type: str, *, importance: Floats | None = None, name: str = "matrix", first_row: int = 0
) -> memoryview:
    """The bytes of float32 [rows, cols] in `type`.

    importance [cols], used by q4 and q6 only: how much squared errors in a column count, such as the mean
    square of its activations. `name` and `first_row` serve error texts only.
    """
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    rows, cols = matrix.shape
    if importance is not None:
        importance = np.ascontiguousarray(importance, dtype=np.float32)
        if importance.shape != (cols,):
            raise ConversionError(
                f"{name}: expected an importance for each of {cols} columns, found {list(importance.shape)}."
            )
    out = np.empty((-(-rows // PANEL_ROWS), panel_bytes(cols, type)), dtype=np.uint8)
    step = block_rows(cols)

    def pack_block(start: int) -> None:
        block = matrix[start : start + step]
        panels = out[start // PANEL_ROWS : (start + step) // PANEL_ROWS]
        try:
            _native.quantize(TYPE_IDS[type], block, importance, panels)
        except ArgumentError as error:
            raise ConversionError(_with_place(str(error), name, first_row + start)) from None

    starts = range(0, rows if cols else 0, step)
    threads = min(len(starts), len(os.sched_getaffinity(0)))
    if threads < 2:
        for start in starts:
            pack_block(start)
    else:
        pool = ThreadPoolExecutor(threads, "colibri-pack")
        try:
            for _ in pool.map(pack_block, starts):  # in order: the first error is that of the first wrong row
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    return out.reshape(-1).data


def _with_place(text: str, name: str, first_row: int) -> str:
    """The library's text with the tensor's name and row."""
    found = _PLACE.match(text)
    return f"{name}[{first_row + int(found[1])}, {text[found.end() :]}" if found else f"{name}: {text}"


def unpack(buffer: bytes | bytearray | memoryview | Bytes, rows: int, cols: int, type: str) -> Floats:
    """float32 [rows, cols] from the bytes of a packed matrix."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    if data.size != matrix_bytes(rows, cols, type):
        raise ModelFileError(
            f"A {type} matrix of {rows} x {cols} takes {matrix_bytes(rows, cols, type)} bytes, but "
            f"{data.size} were given. Pass exactly the bytes of its directory entry."
        )
    panels = data.reshape(-1, panel_bytes(cols, type))
    n = panels.shape[0]
    if type == "f32":
        values = panels.view("<f4").reshape(n, cols, PANEL_ROWS).transpose(0, 2, 1).reshape(-1, cols)
    elif type == "bf16":
        pairs = panels.view("<u2").reshape(n, -1, PANEL_ROWS, 2).transpose(0, 2, 1, 3)
        bits = pairs.reshape(n * PANEL_ROWS, -1).astype(np.uint32) << 16
        values = bits.view(np.float32)
    elif type == "q4":
        values = _unpack_q4(panels, -(-cols // GROUP))
    elif type == KEPT:
        values = _unpack_mxfp4(panels, -(-cols // GROUP))
    elif type == "q6":
        values = _unpack_q6(panels, -(-cols // GROUP))
    else:
        groups = -(-cols // GROUP)
        quants = panels[:, : _GROUP_BYTES * groups].reshape(n, groups, GROUP // 4, PANEL_ROWS, 4)
        q = quants.transpose(0, 3, 1, 2, 4).astype(np.float32) - _ZERO_QUANT
        scales = panels[:, _GROUP_BYTES * groups : (_GROUP_BYTES + _SCALE_BYTES) * groups]
        s = np.ascontiguousarray(scales).view("<f2").reshape(n, groups, PANEL_ROWS).transpose(0, 2, 1)
        values = (q * s.astype(np.float32)[..., None, None]).reshape(n * PANEL_ROWS, -1)
    return np.ascontiguousarray(values[:rows, :cols])


def _unpack_q4(panels: Bytes, groups: int) -> Floats:
    """q x (d x sc) - (dmin x m), float32 [rows, groups x 32]; products are exact."""
    n = panels.shape[0]
    q = _nibbles(panels, groups).astype(np.float32)
    records = panels[:, _Q4_BYTES * groups :].reshape(n, -1, _Q4_BYTES)
    units = np.ascontiguousarray(records[..., :64]).view("<f2").astype(np.float32)
    units = units.reshape(n, -1, 2, PANEL_ROWS)  # d, dmin
    words = np.ascontiguousarray(records[..., 64:]).view("<u4").reshape(n, -1, 3, PANEL_ROWS)
    steps = [words[:, :, i // 5] >> 6 * (i % 5) & 63 for i in range(15)]
    steps.append(words[:, :, 0] >> 30 | words[:, :, 1] >> 30 << 2 | words[:, :, 2] >> 30 << 4)
    scales = np.stack(steps, axis=-1).astype(np.float32).reshape(n, -1, PANEL_ROWS, 2, SUPER)
    scales *= units.transpose(0, 1, 3, 2)[..., None]
    scale, least = scales.transpose(3, 0, 2, 1, 4).reshape(2, n, PANEL_ROWS, -1)[..., :groups]
    values: Floats = (q * scale[..., None] - least[..., None]).reshape(n * PANEL_ROWS, -1)
    return values


def _unpack_mxfp4(panels: Bytes, groups: int) -> Floats:
    """4-bit floats x 2^(scale - 127), float32 [rows, groups x 32], exact."""
    n = panels.shape[0]
    values = np.array(MXFP4_VALUES, np.float32)[_nibbles(panels, groups)]
    scales = panels[:, _Q4_BYTES * groups :].reshape(n, -1, PANEL_ROWS, 4).transpose(0, 2, 1, 3)
    exponents = scales.reshape(n, PANEL_ROWS, -1)[..., :groups, None].astype(np.int32) - 127
    return np.ldexp(values, exponents).reshape(n * PANEL_ROWS, -1)


def _nibbles(panels: Bytes, groups: int) -> Bytes:
    """[panels, 16 rows, groups, 32 elements], each 0 to 15."""
    n = panels.shape[0]
    bytes_of = panels[:, : _Q4_BYTES * groups].reshape(n, groups, 4, PANEL_ROWS, 4)
    q = np.stack([bytes_of & 15, bytes_of >> 4], axis=2)  # [n, group, half, quad, row, element of the quad]
    return q.transpose(0, 4, 1, 2, 3, 5).reshape(n, PANEL_ROWS, groups, GROUP)

def _unpack_q6(panels: Bytes, groups: int) -> Floats:
    """q x (d x sc), float32 [rows, groups x 32]; products are exact."""
    n, supers = panels.shape[0], -(-groups // SUPER)
    lines = panels[:, : _Q6_BYTES * groups].reshape(n, groups * 2, 3, PANEL_ROWS, 4)
    upper = lines[:, :, 0] >> 6 | lines[:, :, 1] >> 6 << 2 | lines[:, :, 2] >> 6 << 4
    q = np.concatenate([lines & 63, upper[:, :, None]], axis=2)  # [n, run of 16, quad, row, element]
    q = q.transpose(0, 3, 1, 2, 4).reshape(n, PANEL_ROWS, groups * 2, GROUP // 2).astype(np.float32) - 32
    records = panels[:, _Q6_BYTES * groups :][:, : _Q6_RECORD * supers].reshape(n, supers, _Q6_RECORD)
    units = np.ascontiguousarray(records[..., :32]).view("<f2").astype(np.float32)  # [n, super-group, row]
    steps = np.ascontiguousarray(records[..., 32:]).view(np.int8).reshape(n, supers, 2 * SUPER, PANEL_ROWS)
    scale = (units[:, :, None] * steps).transpose(0, 3, 1, 2).reshape(n, PANEL_ROWS, -1)[..., : groups * 2]
    values: Floats = (q * scale[..., None]).reshape(n * PANEL_ROWS, -1)
    return values


def block_rows(cols: int) -> int:
    """Rows that are best packed at a time, a multiple of 16."""
    return max(1, _BLOCK_ELEMENTS // max(cols, 1) // PANEL_ROWS) * PANEL_ROWS
