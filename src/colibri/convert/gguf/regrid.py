"""ggml's blocks with a scale and a minimum as panels of q6 or q4: rounded, but without a search over weights.

Owns: what is done with which type, and for q6 which scales a grid gets and what rounding costs; q4's are
regrid_q4.py's. Refuses: what grids.py does.

Weights are a q + b with few whole q. By a scale a / n, n whole, all of a run are equally far from the next
number, and how far, b alone says. So a run in q6 takes the better of two n, or, where neither is better than
rounding at random, the finest scale that its largest weight leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from colibri.convert.gguf.blocks import ON_GRIDS, Blocks, sizes, widen
from colibri.convert.gguf.grids import Bytes, Floats, Grid, grid
from colibri.convert.gguf.regrid_q4 import above, as_f16, fill_q2_k, fill_q4_1
from colibri.quantize import PANEL_ROWS, pack, panel_bytes, unpack

Squares = tuple[float, float]  # sums of squared errors and of squares

_TINY = np.float32(1e-30)  # below every number of a block but 0
_ONE, _ONES = np.float32(1), np.uint32(0x01010101)

# The largest quant before rounding: where it stays; at most, by a / n; when scales are rounded too, from 32.5
# on it would be 33. Rounded towards 0 in every run, weights would shrink, which costs likelihood of texts.
_FITTING, _FINEST, _LARGEST = np.float32(32), np.float32(32.4), np.float32(32.49)
_SHORTER = np.float32(32.45 / 31.45)  # on the other side there is one number less
_WHOLE = 2  # whole n that are tried
_NEAR = 1 << 17  # weights whose floats stay in the second cache


def regrid(blocks: Blocks, place: Callable[[int], str]) -> tuple[memoryview, Squares]:
    """The bytes of these rows in their type of ON_GRIDS. place: what a row's first number is called."""
    data, dtype = blocks
    block, width = sizes()[dtype]
    found, type = grid(blocks, place), ON_GRIDS[dtype]
    cols = data.shape[1] // width * block
    out = np.zeros((-(-len(data) // PANEL_ROWS), panel_bytes(cols, type)), np.uint8)
    errors, squares = _FILL[dtype](out, found)
    for panel in np.flatnonzero(errors == np.inf):
        # What keeps the codes is far off there.
        rows = widen(blocks._replace(data=data[panel * PANEL_ROWS :][:PANEL_ROWS]))
        packed = pack(rows, type)
        out[panel] = np.frombuffer(packed, np.uint8)
        off = (unpack(packed, len(rows), cols, type) - rows).astype(np.float64)
        errors[panel] = np.vdot(off, off)
    return out.reshape(-1).data, (float(errors.sum()), float(squares.sum()))


def _bytes_of(values: Floats) -> Floats:
    """[panels, runs, groups, 16 rows] as one for each byte of a word, the same for the words of a run."""
    bytes_of = np.empty((*values.shape[:2], 1, values[0, 0].size, 4), np.float32)
    for byte in range(4):  # np.repeat takes three times as long
        bytes_of[..., byte] = values.reshape(*values.shape[:2], 1, -1)
    return bytes_of.reshape(*values.shape[:2], 1, -1)


# ------------------------------------------------------------------ q6: -32 to 31, a scale for each run


def _fill_q6(out: Bytes, found: Grid) -> tuple[Any, Any]:
    """Squared errors and squares, of all panels."""
    n, groups = len(out), found.a.shape[2]
    codes = found.codes.view(np.uint8).reshape(n, 2, 4, -1)
    units, steps = _scales_q6(found, *_ends(codes, found))
    scale = steps * np.repeat(units, 8, axis=1)[:, None, :groups]
    scale += scale == 0  # of runs of zeros
    sums = np.zeros((2, n))
    lines = out[:, : 384 * groups].view("V64").reshape(n, groups, 2, 3)
    few = max(1, _NEAR // codes[0].size)
    for at in range(0, n, few):
        part = slice(at, at + few)
        quants, sums[:, at] = _quants_q6(codes[part], found.a[part], found.b[part], scale[part])
        *quads, fourth = quants.view(np.uint32).reshape(len(quants), 2, 4, -1).transpose(2, 0, 1, 3)
        for i, line in enumerate(quads):
            line |= (fourth << 6 - 2 * i) & 192 * _ONES
            lines[part, :, :, i] = line.view("V64").transpose(0, 2, 1)
    records = out[:, 384 * groups :][:, : 288 * units.shape[1]].reshape(n, -1, 288)
    records[:, :, :32] = as_f16(units).view(np.uint8)
    signed = np.zeros((n, units.shape[1] * 8, 2, PANEL_ROWS), np.int8)
    signed[:, :groups] = steps.transpose(0, 2, 1, 3)
    records[:, :, 32:] = signed.view(np.uint8).reshape(n, -1, 256)
    return sums[0], sums[1]


def _quants_q6(codes: Bytes, a: Floats, b: Floats, scale: Floats) -> tuple[Any, tuple[float, float]]:
    """Quants + 32 of codes [panels, 2, 4, bytes]; squared errors and squares."""
    x = codes.astype(np.float32)
    x *= _bytes_of(a)
    x += _bytes_of(b)
    squares = np.vdot(x, x)
    x *= _bytes_of(_ONE / scale)
    nearest = np.rint(x)
    x -= nearest
    x *= _bytes_of(scale)
    quants = nearest.astype(np.int8)
    quants += 32
    return quants, (float(np.vdot(x, x)), float(squares))


def _ends(codes: Bytes, found: Grid) -> Iterator[Floats]:
    """The values of the lowest and of the largest code of each run [panels, 2, groups, 16 rows]."""
    for of in (np.minimum, np.maximum):
        four = of.reduce(codes, axis=2).reshape(len(codes), 2, -1, PANEL_ROWS, 4)
        code = of(of(four[..., 0], four[..., 1]), of(four[..., 2], four[..., 3]))
        yield code * found.a + found.b


def _scales_q6(found: Grid, one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Units [panels, super-groups, 16 rows] and steps [panels, 2, groups, 16 rows] of runs that reach from
    `one` to `other`."""
    up, down = np.maximum(one, other), -np.minimum(one, other)
    room = np.maximum(np.maximum(up, down), np.minimum(up, down) * _SHORTER)
    size = np.maximum(np.abs(found.a) + room * (found.a == 0), _TINY)
    finest, target = room / _FINEST, room / _FITTING
    least = target * target * np.float32(1 / 12)
    whole, offset = np.floor(size / np.maximum(finest, _TINY)), found.b / size
    for _ in range(_WHOLE):
        np.maximum(whole, 1, out=whole)
        scale, off = size / whole, offset * whole
        off -= np.rint(off)
        off *= scale
        off *= off
        target += (scale - target) * (off < least)
        np.minimum(least, off, out=least)
        whole -= 1
    np.maximum(target, finest, out=target)
    highest = np.maximum.reduceat(target.max(1), np.arange(0, target.shape[2], 8), axis=1)
    units = above(highest * (_ONE / 127))
    unit = np.maximum(np.repeat(units, 8, axis=1)[:, : target.shape[2]], _TINY)[:, None]
    steps = np.maximum(np.rint(target / unit), np.ceil(room / (unit * _LARGEST)))
    steps *= 1 - 2 * (up > down).astype(np.float32)  # what is farthest from 0 may become -32, the others 31
    return units, steps


_FILL: dict[str, Callable[[Bytes, Grid], tuple[Any, Any]]] = {
    "Q4_1": fill_q4_1,
    "Q5_1": _fill_q6,
    "Q5_K": _fill_q6,
    "Q2_K": fill_q2_k,
}
