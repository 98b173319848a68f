"""ggml's blocks of codes with a scale and a minimum, as numbers: a weight is a q + b with q from 0 to 31.

Owns: where blocks have codes, scales and minima. Refuses: scales that are not finite.

Arrays have blocks and rows last, so that numpy's loops are long. Layouts of blocks: ggml-common.h of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.convert.gguf.blocks import Blocks, sizes
from colibri.convert.gguf.repack import Check, checker
from colibri.quantize import PANEL_ROWS

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

_BYTE, _NIBBLES, _PAIRS, _ONES = (np.uint32(n * 0x01010101) for n in (63, 15, 3, 1))


class Grid(NamedTuple):
    """Panels of 16 rows; groups of 32 elements of a row, each two runs of 16, or four words twice."""

    # q of 4 neighbours each [panels, 2 runs, 4 words, groups, 16 rows]; where all are below 16 the second run
    # is in the upper nibbles of the first's [panels, 4 words, groups, 16 rows].
    codes: Words
    a: Floats  # [panels, 2 runs or 1 for both, groups, 16 rows]
    b: Floats


def grid(blocks: Blocks, place: Callable[[int], str]) -> Grid:
    """Of rows in one of four types. place: what a row's first number is called."""
    data, dtype = blocks
    width = sizes()[dtype][1]
    if len(data) % PANEL_ROWS:  # rows that do not exist are zeros
        data = np.concatenate([data, np.zeros((-len(data) % PANEL_ROWS, data.shape[1]), np.uint8)])
    words = data.view("<u4").reshape(-1, PANEL_ROWS, data.shape[1] // width, width // 4)
    return _GRIDS[dtype](np.ascontiguousarray(words.transpose(0, 3, 2, 1)), checker(dtype, place))


# ------------------------------------------------------------------ of words [panels, words, blocks, 16 rows]


def _q4_1(words: Words, check: Check) -> Grid:
    """The low nibbles of a block are its first 16 elements."""
    a, b = _floats(words[:, 0], check)
    return Grid(words[:, 1:], a[:, None], b[:, None])


def _q5_1(words: Words, check: Check) -> Grid:
    codes = np.stack([words[:, 2:], words[:, 2:] >> 4], axis=1)
    codes &= _NIBBLES
    for i in range(8):  # bit e belongs to element e; bits 0 to 3 go to bits 4, 12, 20, 28
        four = (words[:, 1] >> 4 * i & 15) * np.uint32(0x00204081) & _ONES
        codes[:, i // 4, i % 4] |= four << 4
    a, b = _floats(words[:, 0], check)
    return Grid(codes, a[:, None], b[:, None])


def _q5_k(words: Words, check: Check) -> Grid:
    """d, dmin, 12 bytes of 6-bit numbers, 32 of fifth bits (a bit for each group), then 4 x 32 bytes: low
    nibbles are a group, high ones the next."""
    n, _, supers, rows = words.shape
    fifth = words[:, 4:12].reshape(n, 2, 4, supers, rows)
    nibbles = words[:, 12:].reshape(n, 4, 2, 4, supers, rows)
    codes = np.empty((n, 2, 4, supers, 8, rows), np.uint32)
    for group in range(8):
        codes[..., group, :] = nibbles[:, group // 2] >> 4 * (group % 2) & _NIBBLES
        codes[..., group, :] |= (fifth >> group & _ONES) << 4
    first, second, third = words[:, 1], words[:, 2], words[:, 3]  # of groups 0 to 3, and 4 to 7
    sc = [first & _BYTE, third & _NIBBLES | first >> 2 & _PAIRS << 4]
    m = [second & _BYTE, third >> 4 & _NIBBLES | second >> 2 & _PAIRS << 4]
    d, dmin = _floats(words[:, 0], check)
    a, b = (
        np.stack(part, 1).view(np.uint8).reshape(n, 2, supers, rows, 4).transpose(0, 2, 1, 4, 3)
        * unit[:, :, None, None]
        for part, unit in ((sc, d), (m, -dmin))
    )
    return Grid(codes.reshape(n, 2, 4, -1, rows), a.reshape(n, 1, -1, rows), b.reshape(n, 1, -1, rows))


def _q2_k(words: Words, check: Check) -> Grid:
    """A byte for each run, low nibble its scale, high nibble its minimum; 2 x 32 bytes of which each pair of
    bits belongs to one of 4 groups; d, dmin."""
    n, _, supers, rows = words.shape
    pairs = words[:, 4:20].reshape(n, 2, 2, 4, supers, rows)
    codes = np.empty((n, 4, supers, 8, rows), np.uint32)
    for group in range(8):
        first, second = (pairs[:, group // 4, run] >> 2 * (group % 4) & _PAIRS for run in (0, 1))
        codes[..., group, :] = first | second << 4
    steps = words[:, :4].view(np.uint8).reshape(n, 4, supers, rows, 2, 2)  # two groups of two runs in a word
    steps = steps.transpose(0, 5, 2, 1, 4, 3).reshape(n, 2, supers, 8, rows)
    d, dmin = (unit[:, None, :, None] for unit in _floats(words[:, 20], check))
    a, b = (x.reshape(n, 2, -1, rows) for x in ((steps & 15) * d, (steps >> 4) * -dmin))
    return Grid(codes.reshape(n, 4, -1, rows), a, b)


def _floats(words: Words, check: Check) -> tuple[Floats, Floats]:
    """The two f16 of each word."""
    check((words & 0x7C00 == 0x7C00) | (words & 0x7C000000 == 0x7C000000), "a scale that is not finite")
    pairs = words.view("<f2").reshape(*words.shape, 2)
    return pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.float32)


_GRIDS: dict[str, Callable[[Words, Check], Grid]] = {
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q2_K": _q2_k,
}
