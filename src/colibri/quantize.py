"""Packs matrices into the panels that the kernels read, and back (docs/FORMAT.md, section 4).

Owns: the byte layout of the weight types f32, bf16 and q8, and their rounding.
Refuses: values that a type cannot hold (NaN, infinity, beyond bf16 or f16 scales); files are the caller's.

Panels of 16 rows are independent, so a matrix may be packed in blocks of `block_rows` rows; joined, the
blocks are the bytes of the whole matrix, and peak memory is that of one block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from colibri.errors import ConversionError, ModelFileError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

TYPE_IDS: dict[str, int] = {"f32": 1, "bf16": 2, "q8": 4}
TYPE_NAMES: dict[int, str] = {number: name for name, number in TYPE_IDS.items()}

PANEL_ROWS = 16
GROUP = 32  # elements along k that share a q8 scale
_GROUP_BYTES = GROUP * PANEL_ROWS
_SCALE_BYTES = 2 * PANEL_ROWS
_ZERO_QUANT = 128  # the byte of q = 0
# Adding 1.5 x 2^23 leaves no fraction bits: the sum rounds to nearest even and its low byte is the integer's.
_ROUND_TO_BYTE = np.float32(1.5 * 2**23 + _ZERO_QUANT)
_SMALLEST_NORMAL_F16 = np.float32(2.0**-14)
# Elements packed at a time: enough to hide numpy's cost per call, few enough for the cache (measured).
_BLOCK_ELEMENTS = 256 * 1024


def panel_bytes(cols: int, type: str) -> int:
    """Bytes of 16 rows of `cols` elements."""
    if type == "f32":
        return 64 * cols
    if type == "bf16":
        return 64 * ((cols + 1) // 2)
    if type == "q8":
        groups = -(-cols // GROUP)
        return -(-(_GROUP_BYTES + _SCALE_BYTES) * groups // 64) * 64
    raise _unknown(type)


def matrix_bytes(rows: int, cols: int, type: str) -> int:
    """Bytes of a whole matrix; the last panel is filled up with zero rows."""
    return -(-rows // PANEL_ROWS) * panel_bytes(cols, type)


def pack(matrix: Floats, type: str, *, name: str = "matrix", first_row: int = 0) -> memoryview:
    """The bytes of float32 [rows, cols] in `type`. `name` and `first_row` serve error texts only."""
    matrix = np.asarray(matrix, dtype=np.float32)
    rows, cols = matrix.shape
    out = np.zeros((-(-rows // PANEL_ROWS), panel_bytes(cols, type)), dtype=np.uint8)
    step = block_rows(cols)
    for start in range(0, rows, step):
        block = matrix[start : start + step]
        panels = out[start // PANEL_ROWS : -(-(start + block.shape[0]) // PANEL_ROWS)]
        _pack_panels(block, type, panels, name, first_row + start)
    return out.reshape(-1).data


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
    else:
        groups = -(-cols // GROUP)
        quants = panels[:, : _GROUP_BYTES * groups].reshape(n, groups, GROUP // 4, PANEL_ROWS, 4)
        q = quants.transpose(0, 3, 1, 2, 4).astype(np.float32) - _ZERO_QUANT
        scales = panels[:, _GROUP_BYTES * groups : (_GROUP_BYTES + _SCALE_BYTES) * groups]
        s = np.ascontiguousarray(scales).view("<f2").reshape(n, groups, PANEL_ROWS).transpose(0, 2, 1)
        values = (q * s.astype(np.float32)[..., None, None]).reshape(n * PANEL_ROWS, -1)
    return np.ascontiguousarray(values[:rows, :cols])


def block_rows(cols: int) -> int:
    """Rows that are best packed at a time, a multiple of 16."""
    return max(1, _BLOCK_ELEMENTS // max(cols, 1) // PANEL_ROWS) * PANEL_ROWS


def _pack_panels(block: Floats, type: str, out: Bytes, name: str, first_row: int) -> None:
    """Packs up to n x 16 rows into `out` [n, panel bytes], which is zero."""
    rows, cols = block.shape
    n = out.shape[0]
    width = cols if type == "f32" else -(-cols // 2) * 2 if type == "bf16" else -(-cols // GROUP) * GROUP
    if (n * PANEL_ROWS, width) != block.shape:
        padded = np.zeros((n * PANEL_ROWS, width), dtype=np.float32)
        padded[:rows, :cols] = block
        block = padded
    if type == "q8":
        _pack_q8(block, out, name, first_row)
        return
    _refuse_non_finite(block, name, first_row)
    if type == "f32":
        out.view("<f4").reshape(n, cols, PANEL_ROWS)[:] = block.reshape(n, PANEL_ROWS, cols).transpose(
            0, 2, 1
        )
        return
    pairs = _round_to_bf16(block, name, first_row).view(np.uint32).reshape(n, PANEL_ROWS, width // 2)
    out.view("<u4").reshape(n, width // 2, PANEL_ROWS)[:] = pairs.transpose(0, 2, 1)


def _round_to_bf16(block: Floats, name: str, first_row: int) -> npt.NDArray[np.uint16]:
    """Upper halves of the floats, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(block).view(np.uint32)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    beyond = (half & 0x7F80) == 0x7F80
    if beyond.any():
        row, col = np.argwhere(beyond)[0]
        raise ConversionError(
            f"{name}[{first_row + row}, {col}] is {block[row, col]:g}, too large for bf16 (at most "
            "3.39e38). Convert with type f32."
        )
    return half.astype("<u2")


def _pack_q8(block: Floats, out: Bytes, name: str, first_row: int) -> None:
    n, groups = out.shape[0], block.shape[1] // GROUP
    x = block.reshape(n * PANEL_ROWS, groups, GROUP)
    with np.errstate(invalid="ignore", over="ignore"):
        # Halving folds keep the inner loops long; numpy's max over a short last axis is several times slower.
        peak = np.abs(x)
        for half in (16, 8, 4, 2, 1):
            peak = np.maximum(peak[..., :half], peak[..., half : 2 * half])
        scale = (peak[..., 0] * np.float32(1 / 127)).astype("<f2")  # [rows, groups]
    if not np.isfinite(scale).all():
        _refuse_non_finite(block, name, first_row)
        row, group = np.argwhere(~np.isfinite(scale))[0]
        raise ConversionError(
            f"{name} row {first_row + row} holds {np.abs(x[row, group]).max():g} near column "
            f"{group * GROUP}, too large for the f16 scale of q8 (at most 65504 x 127). Convert with type "
            "bf16 or f32."
        )
    divisor = scale.astype(np.float32)
    np.copyto(divisor, np.float32(np.inf), where=divisor == 0)  # a scale that rounds to 0 gives quants 0
    q = x / divisor[..., None]
    if (divisor < _SMALLEST_NORMAL_F16).any():  # subnormal scales are coarse: a quotient may pass 127
        np.clip(q, -127, 127, out=q)
    q += _ROUND_TO_BYTE
    quads = q.view(np.uint32).astype(np.uint8).view(np.uint32).reshape(n, PANEL_ROWS, groups * (GROUP // 4))
    quants_end = _GROUP_BYTES * groups
    out[:, :quants_end].view("<u4").reshape(n, -1, PANEL_ROWS)[:] = quads.transpose(0, 2, 1)
    scales = (
        out[:, quants_end : quants_end + _SCALE_BYTES * groups].view("<f2").reshape(n, groups, PANEL_ROWS)
    )
    scales[:] = scale.reshape(n, PANEL_ROWS, groups).transpose(0, 2, 1)


def _refuse_non_finite(block: Floats, name: str, first_row: int) -> None:
    finite = np.isfinite(block)
    if finite.all():
        return
    row, col = np.argwhere(~finite)[0]
    raise ConversionError(
        f"{name}[{first_row + row}, {col}] is {block[row, col]}: weights must be finite. The checkpoint is "
        "damaged or its training diverged; download it again."
    )


def _unknown(type: str) -> ConversionError:
    return ConversionError(f"Weight type {type!r} is not known. Choose one of: {', '.join(TYPE_IDS)}.")
