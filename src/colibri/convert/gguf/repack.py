"""ggml's block types as panels of ours with the same values (docs/FORMAT.md, section 4).

Owns: the order of codes and scales in both. Refuses: scales that are not finite, and the few codes that a
type of ggml can spell but ours cannot.

Panels hold 16 rows; a line of 64 bytes is 4 neighbouring elements of each row. So codes are handled as 32-bit
words of 4 codes, turned to [panels, words along a row, 16 rows]. Layouts of blocks: ggml-common.h and
ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.convert.gguf.blocks import HELD, Blocks, sizes
from colibri.errors import ConversionError
from colibri.panels import MXFP4_LARGEST
from colibri.quantize import PANEL_ROWS, panel_bytes

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Check = Callable[[Any, str], None]  # (what is wrong, [panels, anything, 16 rows]; the text of the error)

_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def repack(blocks: Blocks, place: Callable[[int], str]) -> memoryview:
    """The bytes of these rows in the type of ours that holds them. place: what a row's first number is
    called."""
    data, dtype = blocks
    block, width = sizes()[dtype]
    n = -(-len(data) // PANEL_ROWS)
    cols = data.shape[1] // width * block
    if len(data) % PANEL_ROWS:
        data = np.concatenate([data, _zero_rows(n * PANEL_ROWS - len(data), data.shape[1] // width, dtype)])
    out = np.zeros((n, panel_bytes(cols, HELD[dtype])), np.uint8)

    _REPACK[dtype](out, data.reshape(n, PANEL_ROWS, -1, width), checker(dtype, place))
    if len(blocks.data) % PANEL_ROWS and HELD[dtype] == "q8":
        out[-1, : PANEL_ROWS * cols].reshape(-1, PANEL_ROWS, 4)[:, len(blocks.data) % PANEL_ROWS :] = 128
    return out.reshape(-1).data


def checker(dtype: str, place: Callable[[int], str]) -> Check:
    """Tells what is wrong with rows in `dtype`."""

    def check(wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            panel, _, row = (int(i) for i in np.argwhere(wrong)[0])
            raise ConversionError(
                f"{place(panel * PANEL_ROWS + row)}: its row in {dtype} has {what}. If the file is whole, "
                "convert it to another type with --type."
            )

    return check


def _zero_rows(count: int, n_blocks: int, dtype: str) -> Bytes:
    """Rows that do not exist, so that codes and scales become 0 as docs/FORMAT.md has them."""
    block = np.zeros(sizes()[dtype][1], np.uint8)
    if dtype == "Q6_K":
        block[128:192] = 0xAA
    elif dtype == "Q3_K":
        block[:32], block[104:108] = 0xFF, 0xAA
    return np.tile(block, (count, n_blocks))


def _turned(data: Bytes) -> Words:
    """uint32 [panels, words, 16] of bytes [panels, 16 rows, blocks, a multiple of 4]."""
    flat = np.ascontiguousarray(data).reshape(*data.shape[:2], -1)
    return np.ascontiguousarray(flat.view("<u4").transpose(0, 2, 1))


def scales(data: Bytes, check: Check) -> npt.NDArray[np.float16]:
    """f16 [panels, blocks, 16] of bytes [panels, 16 rows, blocks, 2]."""
    found = np.ascontiguousarray(np.ascontiguousarray(data).view("<f2")[..., 0].transpose(0, 2, 1))
    check((found.view(np.uint16) & 0x7C00) == 0x7C00, "a scale that is not finite")
    return found


def _put(out: Bytes, at: int, values: npt.NDArray[Any]) -> int:
    """Writes values [panels, ...] into all panels from byte `at` on; where they end."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(out), -1)
    out[:, at : at + raw.shape[1]] = raw
    return at + raw.shape[1]


# ------------------------------------------------------------------ q8: codes + 128, one scale for 32


def _q8_0(out: Bytes, blocks: Bytes, check: Check) -> None:
    words = _turned(blocks[..., 2:])
    words ^= 0x80808080
    if (words.view(np.uint8) == 0).any():  # only then look where: it takes ten times as long
        lowest = (words.view(np.uint8).reshape(*words.shape, 4) == 0).any(-1)
        check(lowest, "the code -128, which q8 does not have")
    _put_q8(out, words, blocks, check)


def _q4_0(out: Bytes, blocks: Bytes, check: Check) -> None:
    _put_q8(out, _two_halves(_turned(blocks[..., 2:])) + np.uint32(0x78787878), blocks, check)


def _q5_0(out: Bytes, blocks: Bytes, check: Check) -> None:
    fifth = _turned(blocks[..., 2:6])[:, :, None]  # bit e of a group's word belongs to element e
    fours = fifth >> (4 * np.arange(8, dtype=np.uint32))[:, None] & 15
    fours *= 0x00204081  # bits 0 to 3 to bits 0, 8, 16, 24
    words = _two_halves(_turned(blocks[..., 6:])).reshape(fours.shape)
    words |= (fours & 0x01010101) << 4
    _put_q8(out, words + np.uint32(0x70707070), blocks, check)


def _iq4_nl(out: Bytes, blocks: Bytes, check: Check) -> None:
    table = _IQ4_NL.view(np.uint8) ^ 0x80
    _put_q8(out, table[_two_halves(_turned(blocks[..., 2:])).view(np.uint8)], blocks, check)


def _two_halves(words: Words) -> Words:
    """Codes of groups whose lower 16 are the low nibbles of 16 bytes."""
    fours = words.reshape(len(words), -1, 1, 4, PANEL_ROWS)
    return np.concatenate([fours & 0x0F0F0F0F, fours >> 4 & 0x0F0F0F0F], axis=2)


def _put_q8(out: Bytes, words: npt.NDArray[Any], blocks: Bytes, check: Check) -> None:
    _put(out, _put(out, 0, words), scales(blocks[..., :2], check))


# ------------------------------------------------------------------ q4


def _q4_k(out: Bytes, blocks: Bytes, check: Check) -> None:
    """d, dmin, 12 bytes of 6-bit numbers, then 4 x 32 bytes: low nibbles are a group, high ones the next."""
    words = _turned(blocks[..., 16:]).reshape(len(out), -1, 2, 4, PANEL_ROWS)
    low, high = words[:, :, 0], words[:, :, 1]  # elements 0 to 15 and 16 to 31 of both groups
    quants = np.empty((len(out), words.shape[1], 2, 4, PANEL_ROWS), np.uint32)
    quants[:, :, 0] = (low & 0x0F0F0F0F) | (high & 0x0F0F0F0F) << 4
    quants[:, :, 1] = (low >> 4 & 0x0F0F0F0F) | (high & 0xF0F0F0F0)
    units = [scales(blocks[..., at : at + 2], check) for at in (0, 2)]
    for unit in units:
        check(unit.view(np.uint16) > 0x8000, "a negative scale, which q4 does not have")
    first, second, third = np.moveaxis(_turned(blocks[..., 4:16]).reshape(len(out), -1, 3, PANEL_ROWS), 2, 0)
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    steps = [first & six, third & four | first >> 2 & two]  # of groups 0 to 3 and 4 to 7, a byte each
    least = [second & six, third >> 4 & four | second >> 2 & two]
    numbers = [word >> 8 * byte & 63 for word in (*steps, *least) for byte in range(4)]
    put_q4(out, quants, units, numbers)


def put_q4(
    out: Bytes,
    quants: npt.NDArray[Any],
    units: list[npt.NDArray[np.float16]],
    numbers: list[npt.NDArray[Any]],
) -> None:
    """quants: words [panels, groups, 4, 16 rows]; units: d and dmin, numbers: sc and m of 8 groups, each
    [panels, super-groups, 16 rows]"""
    packed = [
        sum(numbers[5 * w + i] << 6 * i for i in range(5)) | numbers[15] >> 2 * w << 30 for w in range(3)
    ]
    records = [
        np.stack(part, 2).view(np.uint8).reshape(len(out), part[0].shape[1], -1) for part in (units, packed)
    ]
    _put(out, _put(out, 0, quants), np.concatenate(records, axis=2))


# ------------------------------------------------------------------ q6: codes + 32, a scale for 16


def _q6_k(out: Bytes, blocks: Bytes, check: Check) -> None:
    """2 x 64 bytes of lower nibbles, 2 x 32 of upper pairs of bits, 16 scales, d."""
    low = _turned(blocks[..., :128]).reshape(len(out), -1, 1, 2, 8, PANEL_ROWS)  # halves x 64 bytes
    upper = _turned(blocks[..., 128:192]).reshape(len(out), -1, 1, 8, PANEL_ROWS)
    nibbles = np.concatenate([low & 0x0F0F0F0F, low >> 4 & 0x0F0F0F0F], axis=2)
    nibbles = nibbles.reshape(len(out), -1, 4, 8, PANEL_ROWS)
    nibbles |= (upper >> (2 * np.arange(4, dtype=np.uint32))[:, None, None] & 0x03030303) << 4
    _put_q6(out, nibbles, blocks[..., 192:208].view(np.int8), scales(blocks[..., 208:], check))


def _q3_k(out: Bytes, blocks: Bytes, check: Check) -> None:
    """32 bytes of upper bits, 2 x 32 of lower pairs of bits, 12 of 6-bit scales, d."""
    shifts = np.arange(4, dtype=np.uint32)[:, None, None]
    pairs = _turned(blocks[..., 32:96]).reshape(len(out), -1, 2, 1, 8, PANEL_ROWS)
    tops = _turned(blocks[..., :32]).reshape(len(out), -1, 1, 1, 8, PANEL_ROWS)
    top = tops >> (shifts + 4 * np.arange(2, dtype=np.uint32)[:, None, None, None]) & 0x01010101
    codes = (pairs >> 2 * shifts & 0x03030303) + (top << 2) + np.uint32(28 * 0x01010101)
    packed = blocks[..., 96:108]
    lower = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    upper = np.concatenate([packed[..., 8:] >> 2 * i & 3 for i in range(4)], axis=-1)
    steps = (lower | upper << 4).view(np.int8) - np.int8(32)
    _put_q6(out, codes, steps, scales(blocks[..., 108:], check))


def _put_q6(out: Bytes, codes: Words, steps: npt.NDArray[np.int8], units: npt.NDArray[np.float16]) -> None:
    """codes: words in the order of elements; steps [panels, 16 rows, super-groups, 16]"""
    runs = codes.reshape(len(out), -1, 4, PANEL_ROWS)
    pairs = (2 * np.arange(3, dtype=np.uint32))[:, None]
    at = _put(out, 0, runs[:, :, :3] | (runs[:, :, 3:] >> pairs & 0x03030303) << 6)
    turned = np.ascontiguousarray(steps.transpose(0, 2, 3, 1)).view(np.uint8)
    records = [np.ascontiguousarray(units).view(np.uint8), turned.reshape(*units.shape[:2], -1)]
    _put(out, at, np.concatenate(records, axis=2))


# ------------------------------------------------------------------ mxfp4


def _mxfp4(out: Bytes, blocks: Bytes, check: Check) -> None:
    """An exponent, then 16 bytes in the order of our lines."""
    exponents = blocks[..., 0]
    check(exponents.transpose(0, 2, 1) > MXFP4_LARGEST, f"a scale above {MXFP4_LARGEST}")
    at = _put(out, 0, _turned(blocks[..., 1:]))
    padded = np.zeros((len(out), PANEL_ROWS, -(-exponents.shape[2] // 4) * 4), np.uint8)
    padded[..., : exponents.shape[2]] = exponents
    _put(out, at, padded.reshape(len(out), PANEL_ROWS, -1, 4).transpose(0, 2, 1, 3))


_REPACK = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "MXFP4": _mxfp4,
}
