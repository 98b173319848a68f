"""ggml's block types: those that a type of ours holds have the same values, bit by bit; the others are told.

The oracle is the gguf package's decoding of the same bytes. Owns: blocks and panels, no files of models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from colibri import quantize
from colibri.convert.gguf import blocks
from colibri.convert.gguf.blocks import HELD, PLAIN, Blocks
from colibri.convert.gguf.repack import repack
from colibri.errors import ConversionError

PACKED = sorted(HELD.keys() - set(PLAIN))
# Where the f16 scales of a block are.
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}


def random_blocks(dtype: str, rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """[rows, blocks, bytes]: all codes, scales of every size from subnormal to large."""
    block, width = blocks.sizes()[dtype]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, cols // block, width), dtype=np.uint8)
    for at in SCALES.get(dtype, (0,)):
        scales = np.exp2(rng.uniform(-24, 12, data.shape[:2])).astype("<f2")
        if dtype != "Q4_K":
            scales *= rng.choice([-1, 1], scales.shape).astype("<f2")
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    if dtype == "Q8_0":
        data[..., 2:][data[..., 2:] == 0x80] = 0x81
    if dtype == "MXFP4":
        data[..., 0] %= 253
    return data


def as_blocks(data: npt.NDArray[np.uint8], dtype: str) -> Blocks:
    return Blocks(data.reshape(len(data), -1), dtype)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (16, 256), (40, 768), (31, 2304)])
def test_panels_hold_the_same_values(dtype: str, rows: int, cols: int) -> None:
    found = as_blocks(random_blocks(dtype, rows, cols, rows + cols), dtype)
    wanted = blocks.widen(found)
    packed = repack(found, str)
    assert packed.nbytes == quantize.matrix_bytes(rows, cols, HELD[dtype])
    got = quantize.unpack(packed, rows, cols, HELD[dtype])
    if dtype == "MXFP4":  # the package spells -0 as 0
        wanted, got = wanted + np.float32(0), got + np.float32(0)
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("dtype", [name for name in PACKED if blocks.sizes()[name][0] == 32])
@pytest.mark.parametrize("cols", [32, 96, 288, 576])
def test_narrow_groups_need_no_256_columns(dtype: str, cols: int) -> None:
    found = as_blocks(random_blocks(dtype, 20, cols), dtype)
    got = quantize.unpack(repack(found, str), 20, cols, HELD[dtype])
    assert np.array_equal(got, blocks.widen(found))


@pytest.mark.parametrize("dtype", PACKED)
def test_rows_that_do_not_exist_are_as_the_format_has_them(dtype: str) -> None:
    """Codes are those of zeros, and every scale is 0 bits."""
    type = HELD[dtype]
    ours = np.frombuffer(repack(as_blocks(random_blocks(dtype, 3, 512), dtype), str), np.uint8)
    zeros = np.zeros((16, 512), np.float32)
    packed = bytes(len(ours)) if type == "mxfp4" else quantize.pack(zeros, type)
    quants = {"q8": 512, "q4": 256, "q6": 384, "mxfp4": 256}[type] * 512 // 32
    assert np.array_equal(
        ours[:quants].reshape(-1, 16, 4)[:, 3:],
        np.frombuffer(packed, np.uint8)[:quants].reshape(-1, 16, 4)[:, 3:],
    )
    scales = ours[quants:]
    records = scales.reshape(2, -1)
    if type in ("q8", "mxfp4"):
        fields: list[Any] = [scales.view("<u2" if type == "q8" else "<u4")]
    elif type == "q4":
        fields = [records[:, :64].view("<u2"), records[:, 64:].view("<u4")]
    else:
        fields = [records[:, :32].view("<u2"), records[:, 32:]]
    for field in (one.reshape(-1, 16) for one in fields):
        assert field[:, :3].any() and not field[:, 3:].any()


@pytest.mark.parametrize("dtype", PACKED)
def test_blocks_of_rows_join_to_the_whole(dtype: str) -> None:
    data = random_blocks(dtype, 50, 512)
    whole = bytes(repack(as_blocks(data, dtype), str))
    parts = (repack(as_blocks(data[at : at + 16], dtype), str) for at in range(0, 50, 16))
    assert b"".join(map(bytes, parts)) == whole


@pytest.mark.parametrize("dtype", sorted(set(PACKED) - {"MXFP4"}))
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_are_refused_by_place(dtype: str, bits: int) -> None:
    for at in SCALES.get(dtype, (0,)):
        data = random_blocks(dtype, 40, 512)
        data[37, -1, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(ConversionError, match=rf"w\[1037\]: its row in {dtype} has a scale"):
            repack(as_blocks(data, dtype), lambda row: f"w[{1000 + row}]")


def test_what_only_ggml_can_spell_is_refused() -> None:
    data = random_blocks("Q8_0", 20, 64)
    data[18, 1, 33] = 0x80
    with pytest.raises(ConversionError, match=r"18: its row .* the code -128"):
        repack(as_blocks(data, "Q8_0"), str)
    data = random_blocks("Q4_K", 20, 512)
    data[5, 1, 3] |= 0x80
    with pytest.raises(ConversionError, match=r"5: its row .* a negative scale"):
        repack(as_blocks(data, "Q4_K"), str)
    data = random_blocks("MXFP4", 20, 64)
    data[19, 1, 0] = 253
    with pytest.raises(ConversionError, match=r"19: its row .* a scale above 252"):
        repack(as_blocks(data, "MXFP4"), str)


def test_the_next_larger_type_is_no_smaller() -> None:
    bits = {"q4": 4.5, "q6": 6.5625, "q8": 8.5, "f32": 32}
    for dtype in blocks.decodable():
        block, width = blocks.sizes()[dtype]
        found = blocks.next_type(dtype)
        smaller = [other for other, size in bits.items() if 8 * width / block <= size < bits[found]]
        assert bits[found] >= 8 * width / block and not smaller, dtype
    assert blocks.next_type("Q5_K") == "q6" and blocks.next_type("Q2_K") == "q4"
    assert blocks.next_type("Q4_1") == "q6"
