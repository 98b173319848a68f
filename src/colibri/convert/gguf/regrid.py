"""ggml's blocks of codes with a scale and a minimum as panels of q6, rounded, without a search over weights.

Owns: which scale a run gets, and what rounding costs. Refuses: scales that are not finite.

The 16 weights of a run are a q + b with whole q. By a scale a / n, n whole, all of them are equally far from the
next number of q6, and how far, b alone says. So a run takes the best of a few n, or, where none of them is better than
rounding at random, the finest scale that its largest weight leaves: no weight is looked at for that. Arrays have
runs and rows last, so that numpy's loops are long. Layouts of blocks: ggml-common.h of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.convert.gguf.blocks import Blocks, sizes
from colibri.convert.gguf.repack import Check, checker
from colibri.quantize import PANEL_ROWS, panel_bytes

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
# Codes, words of 4 neighbours [panels, 2 runs of a group, 4 words of a run, groups, 16 rows]; scale a and minimum b
# [panels, groups, 16 rows].
Grid = tuple[Words, Floats, Floats]

_WHOLE = 3  # whole n that are tried
# The largest quant before rounding, and when scales are rounded too: from 32.5 on it would be 33.
_FINEST, _LARGEST = np.float32(32.4), np.float32(32.49)
_TINY = np.float32(1e-30)  # below every number of a block but 0


def regrid(blocks: Blocks, place: Callable[[int], str]) -> tuple[memoryview, tuple[float, float]]:
    """The bytes of these rows in q6; the sums of squared errors and of squares. place: what a row's first
    number is called."""
    data, dtype = blocks
    block, width = sizes()[dtype]
    n = -(-len(data) // PANEL_ROWS)
    cols = data.shape[1] // width * block
    if len(data) % PANEL_ROWS:  # rows that do not exist are zeros
        data = np.concatenate([data, np.zeros((-len(data) % PANEL_ROWS, data.shape[1]), np.uint8)])
    words = data.view("<u4").reshape(n, PANEL_ROWS, -1, width // 4).transpose(0, 3, 2, 1)
    out = np.zeros((n, panel_bytes(cols, "q6")), np.uint8)
    squares = _fill(out, *_GRIDS[dtype](np.ascontiguousarray(words), checker(dtype, place)))
    return out.reshape(-1).data, squares


def _fill(out: Bytes, words: Words, a: Floats, b: Floats) -> tuple[float, float]:
    n, groups = a.shape[:2]
    codes = words.view(np.uint8).reshape(n, 2, 4, -1)
    units, steps = _scales(*_range(codes, a, b), a[:, None], b[:, None])
    scale = steps * np.repeat(units, 8, axis=1)[:, None, :groups]
    inverse = 1 / (scale + (scale == 0))
    # A value for each byte of a word, the same for all words of a run.
    a, b, scale, inverse = (
        np.repeat(x.reshape(n, -1, 1, groups * PANEL_ROWS), 4, -1) for x in (a, b, scale, inverse)
    )
    x = codes.astype(np.float32)
    x *= a
    x += b
    squares = float(np.vdot(x, x))
    x *= inverse
    quants = np.rint(x).astype(np.int8)
    np.minimum(quants, 31, out=quants)
    x -= quants
    x *= scale
    quants += 32
    quads = quants.view(np.uint32).reshape(n, 2, 4, groups, PANEL_ROWS)
    lines = out[:, : 384 * groups].view("<u4").reshape(n, groups, 2, 3, PANEL_ROWS)
    for i in range(3):
        line = quads[:, :, i] | (quads[:, :, 3] >> 2 * i & 0x03030303) << 6
        lines[:, :, :, i] = line.transpose(0, 2, 1, 3)
    records = out[:, 384 * groups :][:, : 288 * units.shape[1]].reshape(n, -1, 288)
    records[:, :, :32] = units.astype("<f2").view(np.uint8)
    signed = np.zeros((n, units.shape[1] * 8, 2, PANEL_ROWS), np.int8)
    signed[:, :groups] = steps.transpose(0, 2, 1, 3)
    records[:, :, 32:] = signed.view(np.uint8).reshape(n, -1, 256)
    return float(np.vdot(x, x)), squares


def _range(codes: Bytes, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The values of the lowest and the largest code of each run [panels, 2, groups, 16 rows]."""
    ends = []
    for of in (np.minimum, np.maximum):
        four = of.reduce(codes, axis=2).reshape(len(a), 2, *a.shape[1:], 4)
        code = of(of(four[..., 0], four[..., 1]), of(four[..., 2], four[..., 3]))
        ends.append(code * a[:, None] + b[:, None])
    return ends[0], ends[1]


def _scales(one: Floats, other: Floats, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Units [panels, super-groups, 16 rows], numbers of f16, and steps [panels, 2, groups, 16 rows] for runs that
    reach from `one` to `other`."""
    high, low = np.maximum(one, other), np.minimum(one, other)
    peak = np.maximum(high, -low)
    size = np.maximum(np.abs(a) + peak * (a == 0), _TINY)
    finest = peak / _FINEST
    target, least = finest.copy(), finest * finest * np.float32(1 / 12)
    whole, offset = np.floor(size / np.maximum(finest, _TINY)), b / size
    for _ in range(_WHOLE):
        np.maximum(whole, 1, out=whole)
        scale, off = size / whole, offset * whole
        off -= np.rint(off)
        off *= scale
        off *= off
        better = off < least
        target += (scale - target) * better
        np.minimum(least, off, out=least)
        whole -= 1
    np.maximum(target, finest, out=target)
    largest = np.maximum.reduceat(target.max(1), np.arange(0, a.shape[2], 8), axis=1) / 127
    nearest = largest.astype(np.float16)
    units = np.where(nearest < largest, np.nextafter(nearest, np.float16(np.inf)), nearest).astype(np.float32)
    unit = np.maximum(np.repeat(units, 8, axis=1)[:, None, : a.shape[2]], _TINY)
    steps = np.maximum(np.rint(target / unit), np.ceil(peak / (unit * _LARGEST)))
    steps *= 1 - 2 * (high > -low).astype(np.float32)  # what is farthest from 0 becomes -32
    return units, steps


# ------------------------------------------------------------------ blocks as grids: words [panels, words, blocks, rows]


def _q4_1(words: Words, check: Check) -> Grid:
    return _of_32(words, words[:, 1:], check)


def _q5_1(words: Words, check: Check) -> Grid:
    codes, a, b = _of_32(words, words[:, 2:], check)
    for i in range(8):  # bit e belongs to element e; bits 0 to 3 go to bits 4, 12, 20, 28
        codes[:, i // 4, i % 4] |= ((words[:, 1] >> 4 * i & 15) * np.uint32(0x00204081) & 0x01010101) << 4
    return codes, a, b


def _of_32(words: Words, nibbles: Words, check: Check) -> Grid:
    """The low nibbles of a block are its first 16 elements."""
    a, b = _floats(words[:, 0], check)
    return np.stack([nibbles & 0x0F0F0F0F, nibbles >> 4 & 0x0F0F0F0F], axis=1), a, b


def _q5_k(words: Words, check: Check) -> Grid:
    """d, dmin, 12 bytes of 6-bit numbers, 32 of fifth bits (a bit for each group), then 4 x 32 bytes: low
    nibbles are a group, high ones the next."""
    n, _, supers, rows = words.shape
    fifth, nibbles = words[:, 4:12].reshape(n, 2, 4, supers, rows), words[:, 12:].reshape(n, 4, 2, 4, supers, rows)
    codes = np.empty((n, 2, 4, supers, 8, rows), np.uint32)
    for group in range(8):
        codes[..., group, :] = nibbles[:, group // 2] >> 4 * (group % 2) & 0x0F0F0F0F
        codes[..., group, :] |= (fifth >> group & 0x01010101) << 4
    first, second, third = words[:, 1], words[:, 2], words[:, 3]
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    numbers = [first & six, third & four | first >> 2 & two, second & six, third >> 4 & four | second >> 2 & two]
    steps = np.stack(numbers, 1).view(np.uint8).reshape(n, 2, 2, supers, rows, 4)
    d, dmin = _floats(words[:, 0], check)
    a, b = (
        (steps[:, i].transpose(0, 2, 1, 4, 3).reshape(n, supers, 8, rows) * unit[:, :, None]).reshape(n, -1, rows)
        for i, unit in enumerate((d, -dmin))
    )
    return codes.reshape(n, 2, 4, -1, rows), a, b


def _floats(words: Words, check: Check) -> tuple[Floats, Floats]:
    """The two f16 of each word."""
    pairs = words.view(np.float16).reshape(*words.shape, 2)
    check((words & 0x7C00 == 0x7C00) | (words & 0x7C000000 == 0x7C000000), "a scale that is not finite")
    return pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.float32)


_GRIDS: dict[str, Any] = {"Q4_1": _q4_1, "Q5_1": _q5_1, "Q5_K": _q5_k}
