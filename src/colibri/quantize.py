"""Weight types: packs matrices into the panels that the kernels read, and back (docs/FORMAT.md, section 4).

Owns: names, numbers and sizes of all weight types; what values they can hold; blocks over threads.
Refuses: values that a type cannot hold (NaN, infinity, beyond bf16 or f16 scales); files are the caller's.

Panels of 16 rows are independent, so a matrix may be packed in blocks of `block_rows` rows; joined, the
blocks are the bytes of the whole matrix, and beside them nothing is held.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from colibri import panels
from colibri.errors import ArgumentError, ConversionError, ModelFileError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

TYPE_IDS: dict[str, int] = {"f32": 1, "bf16": 2, "q8": 4, "q6": 6, "q4": 5}
KEPT = "mxfp4"  # never made of floats: experts of some checkpoints come in it and stay in it
STORED_IDS = TYPE_IDS | {KEPT: 7}
TYPE_NAMES: dict[int, str] = {number: name for name, number in STORED_IDS.items()}
PANEL_ROWS = panels.ROWS

# The largest magnitude that a type can hold, and how that is told. For q8, the next float over 127 rounds to
# 65520, which f16 lacks.
_LIMITS: dict[str, tuple[float, str]] = {
    "f32": (float(np.finfo(np.float32).max), ""),
    "bf16": (float.fromhex("0x1.fefffep127"), "bf16 (at most 3.39e38). Convert with type f32."),
    "q8": (
        float.fromhex("0x1.fbe03ep22"),
        "the f16 scale of q8 (at most 65504 x 127). Convert with type bf16 or f32.",
    ),
    "q6": (
        65504.0 * 127 * 31,
        "the f16 scales of q6 (at most 65504 x 3937). Convert with type bf16 or f32.",
    ),
    "q4": (65504.0 * 63, "the f16 scales of q4 (at most 65504 x 63). Convert with type bf16 or f32."),
}
# Elements packed at a time: a few milliseconds, so that threads end together and Ctrl-C is quick.
_BLOCK_ELEMENTS = 256 * 1024


def check_type(type: str) -> None:
    """An error for what is no weight type."""
    if type not in TYPE_IDS:
        raise ArgumentError(f"weight type {type!r} is not known; choose one of: {', '.join(TYPE_IDS)}")


def panel_bytes(cols: int, type: str) -> int:
    """Bytes of 16 rows of `cols` elements."""
    if type != KEPT:
        check_type(type)
    groups, supers = -(-cols // panels.GROUP), -(-cols // (panels.GROUP * panels.SUPER))
    fours = -(-groups // 4)
    bytes_of = {
        "f32": 64 * cols,
        "bf16": 64 * ((cols + 1) // 2),
        "q8": 544 * groups,
        "q6": 384 * groups + 288 * supers,
        "q4": 256 * (groups + supers),
        KEPT: 256 * groups + 64 * fours,
    }
    return -(-bytes_of[type] // 64) * 64


def matrix_bytes(rows: int, cols: int, type: str) -> int:
    """Bytes of a whole matrix; the last panel is filled up with zero rows."""
    return -(-rows // PANEL_ROWS) * panel_bytes(cols, type)


def pack(
    matrix: Floats,
    type: str,
    *,
    importance: Floats | None = None,
    name: str = "matrix",
    first_row: int = 0,
    place: Callable[[int, int], str] | None = None,
) -> memoryview:
    """The bytes of float32 [rows, cols] in `type`.

    importance [cols], used by q6 and q4 only: how much squared errors in a column count, such as the mean
    square of its activations. `name` and `first_row` serve error texts only, and so does `place`, what to
    call the number of a row and a column.
    """
    called = place or (lambda row, col: f"{name}[{first_row + row}, {col}]")
    check_type(type)
    matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    rows, cols = matrix.shape
    columns = None if importance is None else _column_costs(importance, cols, name)
    out = np.empty((-(-rows // PANEL_ROWS), panel_bytes(cols, type)), dtype=np.uint8)
    step = block_rows(cols)

    def pack_block(start: int) -> None:
        block = matrix[start : start + step]
        _check_values(block, type, called, start)
        with np.errstate(all="ignore"):
            panels.fill(out[start // PANEL_ROWS : (start + step) // PANEL_ROWS], block, type, columns)

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


def _column_costs(importance: Floats, cols: int, name: str) -> Floats:
    """Importances over their mean, softened, since they are estimates; [cols]."""
    importance = np.ascontiguousarray(importance, dtype=np.float32)
    if importance.shape != (cols,):
        raise ConversionError(
            f"{name}: expected an importance for each of {cols} columns, found {list(importance.shape)}."
        )
    wrong = np.flatnonzero(~((importance >= 0) & np.isfinite(importance)))
    if wrong.size:
        raise ConversionError(
            f"{name}: importance[{wrong[0]}]: expected a finite number, 0 or more (a mean of squares), found "
            f"{importance[wrong[0]]:g}; leave importance out if it is not known."
        )
    mean = math.fsum(importance) / max(cols, 1)
    if mean == 0:
        return np.ones(cols, np.float32)
    costs: Floats = (importance.astype(np.float64) / mean).astype(np.float32) + np.float32(0.125)
    return costs


def _check_values(block: Floats, type: str, called: Callable[[int, int], str], start: int) -> None:
    largest, text = _LIMITS[type]
    if max(float(block.max()), -float(block.min())) <= largest:  # NaN is not
        return
    row, col = (int(i) for i in np.argwhere(~(np.abs(block) <= largest))[0])
    place, found = called(start + row, col), float(block[row, col])
    if math.isfinite(found):
        raise ConversionError(f"{place} is {found:g}, too large for {text}")
    raise ConversionError(
        f"{place} is {found}: weights must be finite. The checkpoint is damaged or its training diverged; "
        "download it again."
    )


def unpack(buffer: bytes | bytearray | memoryview | Bytes, rows: int, cols: int, type: str) -> Floats:
    """float32 [rows, cols] from the bytes of a packed matrix."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    if data.size != matrix_bytes(rows, cols, type):
        raise ModelFileError(
            f"A {type} matrix of {rows} x {cols} takes {matrix_bytes(rows, cols, type)} bytes, but "
            f"{data.size} were given. Pass exactly the bytes of its directory entry."
        )
    values = panels.read(data.reshape(-1, panel_bytes(cols, type)), cols, type)
    return np.ascontiguousarray(values[:rows, :cols])


def block_rows(cols: int) -> int:
    """Rows that are best packed at a time, a multiple of 16."""
    return max(1, _BLOCK_ELEMENTS // max(cols, 1) // PANEL_ROWS) * PANEL_ROWS
