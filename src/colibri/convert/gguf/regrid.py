"""ggml's blocks with a scale and a minimum as panels of q6 or q4: rounded, but without a search over weights.

Owns: which scales of ours a grid gets, and what rounding costs. Refuses: what grids.py does.

Weights are a q + b with few whole q. By a scale a / n, n whole, all of a run are equally far from the next
number, and how far, b alone says. So a run in q6 takes the better of two n, or, where neither is better than
rounding at random, the finest scale that its largest weight leaves. A group in q4 has two runs and one scale:
a few scales, some of them a / n, are tried on the 4 values that each run of Q2_K can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from colibri.convert.gguf.blocks import ON_GRIDS, Blocks, sizes
from colibri.convert.gguf.grids import Bytes, Floats, Grid, grid
from colibri.convert.gguf.repack import put_q4
from colibri.quantize import PANEL_ROWS, panel_bytes

Squares = tuple[float, float]  # sums of squared errors and of squares

_TINY = np.float32(1e-30)  # below every number of a block but 0
_ONE, _ONES = np.float32(1), np.uint32(0x01010101)

# q6: the largest quant before rounding, and when scales are rounded too: from 32.5 on it would be 33.
_FINEST, _LARGEST = np.float32(32.4), np.float32(32.49)
_SHORTER = np.float32(32.45 / 31.45)  # on the other side there is one number less
_WHOLE = 2  # whole n that are tried

# q4: the unit leaves room for scales so much larger; the finest may leave the largest quant at 15.46.
_ROOM, _TIGHT = np.float32(1.6), np.float32(0.97)
_MOST = 63  # the largest step
_NEXT = 4  # scales from the finest on that are tried


def regrid(blocks: Blocks, place: Callable[[int], str]) -> tuple[memoryview, Squares]:
    """The bytes of these rows in their type of ON_GRIDS. place: what a row's first number is called."""
    data, dtype = blocks
    block, width = sizes()[dtype]
    found, type = grid(blocks, place), ON_GRIDS[dtype]
    out = np.zeros((len(found.a), panel_bytes(data.shape[1] // width * block, type)), np.uint8)
    return out.reshape(-1).data, (_fill_q6 if type == "q6" else _fill_q4)(out, found)


def _bytes_of(values: Floats) -> Floats:
    """[panels, runs, groups, 16 rows] as one for each byte of a word, the same for the words of a run."""
    return np.repeat(values.reshape(*values.shape[:2], 1, -1), 4, -1)


def _units(largest: Floats) -> Floats:
    """The next larger numbers of f16."""
    near = (largest + np.float32(0)).astype(np.float16)  # no -0
    return np.where(near < largest, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)


def _each(units: Floats, groups: int) -> Floats:
    """Of super-groups [panels, super-groups, 16 rows], for each of their groups."""
    return np.repeat(units, 8, axis=1)[:, :groups]


def _highest(values: Floats) -> Floats:
    """Of super-groups, from [panels, groups, 16 rows]."""
    found: Floats = np.maximum.reduceat(values, np.arange(0, values.shape[1], 8), axis=1)
    return found


# ------------------------------------------------------------------ q6: -32 to 31, a scale for each run


def _fill_q6(out: Bytes, found: Grid) -> Squares:
    n, groups = len(out), found.a.shape[2]
    codes = found.codes.view(np.uint8).reshape(n, 2, 4, -1)
    units, steps = _scales_q6(found, *_ends(codes, found))
    scale = steps * _each(units, groups)[:, None]
    scale += scale == 0  # of runs of zeros
    x = codes.astype(np.float32)
    x *= _bytes_of(found.a)
    x += _bytes_of(found.b)
    squares = float(np.vdot(x, x))
    x *= _bytes_of(_ONE / scale)
    nearest = np.rint(x)
    x -= nearest
    x *= _bytes_of(scale)
    quants = nearest.astype(np.int8)
    quants += 32
    quads = quants.view(np.uint32).reshape(n, 2, 4, groups, PANEL_ROWS)
    lines = out[:, : 384 * groups].view("<u4").reshape(n, groups, 2, 3, PANEL_ROWS)
    for i in range(3):
        line = quads[:, :, i] | (quads[:, :, 3] >> 2 * i & 3 * _ONES) << 6
        lines[:, :, :, i] = line.transpose(0, 2, 1, 3)
    records = out[:, 384 * groups :][:, : 288 * units.shape[1]].reshape(n, -1, 288)
    records[:, :, :32] = units.astype("<f2").view(np.uint8)
    signed = np.zeros((n, units.shape[1] * 8, 2, PANEL_ROWS), np.int8)
    signed[:, :groups] = steps.transpose(0, 2, 1, 3)
    records[:, :, 32:] = signed.view(np.uint8).reshape(n, -1, 256)
    return float(np.vdot(x, x)), squares


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
    finest = room / _FINEST
    target, least = finest.copy(), finest * finest * np.float32(1 / 12)
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
    units = _units(_highest(target.max(1)) * (_ONE / 127))
    unit = np.maximum(_each(units, target.shape[2]), _TINY)[:, None]
    steps = np.maximum(np.rint(target / unit), np.ceil(room / (unit * _LARGEST)))
    steps *= 1 - 2 * (up > down).astype(np.float32)  # what is farthest from 0 may become -32, the others 31
    return units, steps


# ------------------------------------------------------------------ q4: 0 to 15, scale and minimum of a group


def _fill_q4(out: Bytes, found: Grid) -> Squares:
    n, groups = len(out), found.a.shape[2]
    units, (sc, m) = _scales_q4(found)
    scale, least = (x * _each(unit, groups) for x, unit in zip((sc, m), units, strict=True))
    scale += scale == 0
    x = found.codes.view(np.uint8).reshape(n, 2, 4, -1).astype(np.float32)
    x *= _bytes_of(found.a)
    x += _bytes_of(found.b)
    squares = float(np.vdot(x, x))
    x += _bytes_of(least[:, None])
    x *= _bytes_of(_ONE / scale[:, None])
    quants = np.rint(x).astype(np.int8)
    for bound, of in ((0, np.maximum), (15, np.minimum)):
        of(quants, np.full(quants.shape[-1], bound, np.int8), out=quants)  # numpy is slow with a number
    x -= quants
    x *= _bytes_of(scale[:, None])
    quads = quants.view(np.uint32).reshape(n, 2, 4, groups, PANEL_ROWS)
    words = (quads[:, 0] | quads[:, 1] << 4).transpose(0, 2, 1, 3)
    numbers = [part[:, group::8].astype(np.uint32) for part in (sc, m) for group in range(8)]
    put_q4(out, words, [unit.astype(np.float16) for unit in units], numbers)
    return float(np.vdot(x, x)), squares


def _scales_q4(found: Grid) -> tuple[list[Floats], list[Floats]]:
    """d and dmin [panels, super-groups, 16 rows], sc and m [panels, groups, 16 rows]."""
    levels, counts = _levels(found)
    flat = (8, *levels.shape[2:])
    absent = (counts == 0) * np.float32(1e30)
    low = (levels + absent).reshape(flat).min(0)
    depth = np.maximum(-low, 0)
    span = (levels - absent).reshape(flat).max(0) + depth
    levels, counts = levels.reshape(flat), counts.reshape(flat)
    groups = low.shape[1]
    units = [_units(_highest(x) * share) for x, share in ((span, _ROOM / (15 * _MOST)), (depth, _ONE / 61))]
    d, dmin = (np.maximum(_each(unit, groups), _TINY) for unit in units)
    m = np.rint(depth / dmin)
    levels += m * dmin
    finest = np.maximum(np.ceil(span * _TIGHT / (15 * d)), 1)
    best = [finest, m]
    least, most, none = (np.full_like(span, x) for x in (np.inf, _MOST, 0))
    for sc in _tried(np.abs(found.a), finest, most, d):
        scale = sc * d
        inverse = 1 / scale
        off = levels * inverse
        off -= np.rint(off)
        weighted = off * counts
        mean = weighted.sum(0) / 32
        weighted *= off
        step = dmin * inverse
        moved = np.minimum(np.maximum(m - np.rint(mean / step), none), most)
        by = (moved - m) * step
        error = (weighted.sum(0) + 32 * by * (2 * mean + by)) * scale * scale
        better = error < least
        best = [x + (y - x) * better for x, y in zip(best, (sc, moved), strict=True)]
        np.minimum(least, error, out=least)
    best[0] *= _each(units[0], groups) > 0  # none for rows that do not exist
    return units, best


def _levels(found: Grid) -> tuple[Floats, Floats]:
    """The 4 values of each run and how often it has them [4, 2 runs, panels, groups, 16 rows]."""
    words = found.codes
    odd, upper = words & _ONES, words >> 1 & _ONES
    sums = [
        (part.sum(2, dtype=np.uint32) * _ONES) >> 24 for part in (odd, upper, odd & upper)
    ]  # of 4 bytes too
    odds, uppers, threes = (x.astype(np.float32).transpose(1, 0, 2, 3) for x in sums)
    counts = np.stack([16 - odds - uppers + threes, odds - threes, uppers - threes, threes])
    a, b = found.a.transpose(1, 0, 2, 3), found.b.transpose(1, 0, 2, 3)
    return np.stack([b + a * np.float32(q) for q in range(4)]), counts


def _tried(a: Floats, finest: Floats, most: Floats, d: Floats) -> Iterator[Floats]:
    """Steps: near a / n of both runs, and from the finest on."""
    for run in (a.max(1), a.min(1)):
        whole = np.floor(run / (finest * d))
        for _ in range(2):
            yield np.minimum(np.maximum(np.rint(run / (np.maximum(whole, 1) * d)), finest), most)
            whole -= 1
    for more in range(_NEXT):
        yield np.minimum(finest + more, most)
