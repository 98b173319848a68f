"""ggml's grids that no type of ours holds: read as the gguf package reads them, rounded as a search would.

The oracles are the gguf package's decoding and the search over weights of `colibri.quantize`, a slower one.
Owns: blocks and panels, no files of models.
"""

from __future__ import annotations

import hashlib
import warnings

import numpy as np
import numpy.typing as npt
import pytest

from colibri.convert import CONVERTER_VERSION
from colibri.convert.gguf import blocks
from colibri.convert.gguf.blocks import ON_GRIDS, Blocks
from colibri.convert.gguf.grids import grid
from colibri.convert.gguf.regrid import regrid
from colibri.errors import ConversionError
from colibri.quantize import matrix_bytes, pack, unpack
from test_gguf_blocks import as_blocks

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
TYPES = sorted(ON_GRIDS)
PLACES = {"Q2_K": (80, 82)}  # of the f16 scale and minimum in a block; (0, 2) in the others
LEVELS = {"Q4_1": 16, "Q5_1": 32, "Q5_K": 32, "Q2_K": 4}


def drawn(dtype: str, rows: int, cols: int, seed: int = 0) -> Bytes:
    """[rows, blocks, bytes]: any codes, scales of both signs from subnormal to large."""
    block, width = blocks.sizes()[dtype]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, cols // block, width), dtype=np.uint8)
    for at in PLACES.get(dtype, (0, 2)):
        scales = np.exp2(rng.uniform(-24, 12, data.shape[:2])) * rng.choice([-1, 1], data.shape[:2])
        data[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return data


def like_weights(dtype: str, rows: int, cols: int, seed: int = 0) -> Blocks:
    """Blocks whose codes fall as those of normal weights do, most in the middle of their range."""
    rng = np.random.default_rng(seed)
    data = drawn(dtype, rows, cols, seed)
    levels, block = LEVELS[dtype], blocks.sizes()[dtype][0]
    spread = rng.normal((levels - 1) / 2, levels / 4.5, (*data.shape[:2], block))
    codes = np.clip(np.rint(spread), 0, levels - 1).astype(np.uint8)
    d = rng.uniform(1e-3, 2e-3, data.shape[:2])
    if block == 32:
        high = np.packbits(codes >> 4, axis=-1, bitorder="little")
        data[..., -16:] = (codes[..., :16] & 15) | (codes[..., 16:] & 15) << 4
        if levels == 32:
            data[..., 4:8] = high
        least = -d * rng.uniform(0.4, 0.6, d.shape) * (levels - 1)
    elif dtype == "Q5_K":
        groups = codes.reshape(*data.shape[:2], 8, 32)
        data[..., 4:12] = rng.integers(20, 64, (*data.shape[:2], 8))  # sc, then m, of 4 groups
        data[..., 12:16] = rng.integers(2, 16, (*data.shape[:2], 4)) * 17
        data[..., 16:48] = np.packbits(groups >> 4, axis=-2, bitorder="little").reshape(*data.shape[:2], 32)
        data[..., 48:] = ((groups[..., ::2, :] & 15) | (groups[..., 1::2, :] & 15) << 4).reshape(
            *data.shape[:2], 128
        )
        least = d * (levels - 1) / 2
    else:
        fours = codes.reshape(*data.shape[:2], 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        data[..., :16] = rng.integers(7, 16, (*data.shape[:2], 16)) * 17
        data[..., 16:80] = np.bitwise_or.reduce(fours, axis=-2).reshape(*data.shape[:2], 64)
        least = d * (levels - 1) / 2
    for at, scale in zip(PLACES.get(dtype, (0, 2)), (d, least), strict=True):
        data[..., at : at + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    return as_blocks(data, dtype)


def through(found: Blocks) -> Floats:
    packed, _ = regrid(found, str)
    block, width = blocks.sizes()[found.dtype]
    rows, cols = len(found.data), found.data.shape[1] // width * block
    assert packed.nbytes == matrix_bytes(rows, cols, ON_GRIDS[found.dtype])
    return unpack(packed, rows, cols, ON_GRIDS[found.dtype])


def squares(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def widths(dtype: str) -> tuple[int, ...]:
    return (256, 1536) if blocks.sizes()[dtype][0] == 256 else (32, 96, 256, 576)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 43])
def test_a_grid_has_the_values_of_its_blocks(dtype: str, rows: int) -> None:
    for cols in widths(dtype):
        found = as_blocks(drawn(dtype, rows, cols, rows + cols), dtype)
        q, a, b = grid(found, str)
        if q.ndim == 4:  # both runs in one word
            q = np.stack([q & np.uint32(0x0F0F0F0F), q >> np.uint32(4) & np.uint32(0x0F0F0F0F)], axis=1)
        codes = q.view(np.uint8).reshape(*q.shape, 4)
        values = codes * a[:, :, None, ..., None] + b[:, :, None, ..., None]
        got = values.transpose(0, 4, 3, 1, 2, 5).reshape(-1, cols)  # rows, groups, runs, words, elements
        assert np.array_equal(got[:rows], blocks.widen(found)) and not got[rows:].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_rounded_as_well_as_by_a_search(dtype: str) -> None:
    for seed in range(3):
        found = like_weights(dtype, 48, 1536, seed)
        wanted = blocks.widen(found)
        error = squares(through(found) - wanted)
        type = ON_GRIDS[dtype]
        searched = squares(unpack(pack(wanted, type), 48, 1536, type) - wanted)
        assert error < {"Q4_1": 0.9, "Q5_1": 1, "Q5_K": 1, "Q2_K": 1.15}[dtype] * searched
        assert error < {"q6": 0.025, "q4": 0.08}[type] ** 2 * squares(wanted)
        if dtype == "Q4_1":  # the larger type is farther off, since it has another grid
            assert error < 0.5 * squares(unpack(pack(wanted, "q6"), 48, 1536, "q6") - wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_do_not_shrink(dtype: str) -> None:
    """Rounding the largest of each run towards 0 costs little in squares and much in a text's likelihood."""
    found = like_weights(dtype, 96, 1536, 7)
    wanted = blocks.widen(found)
    off = (through(found) - wanted).astype(np.float64)
    assert abs(np.vdot(off, wanted)) < {"q6": 8e-4, "q4": 3e-3}[ON_GRIDS[dtype]] * squares(wanted)


@pytest.mark.parametrize(("a", "b"), [(1e-3, 2e-3), (-1e-3, 8e-3), (1e-3, -4e-2)])
def test_a_grid_that_q4_has_nothing_like_is_searched(a: float, b: float) -> None:
    """A minimum above 0, a negative scale, a minimum far below: with the codes as they are such a group would
    be far off. Its panel is searched, others are as they were."""
    found = like_weights("Q4_1", 48, 512)
    alone = through(found)
    found.data.reshape(48, -1, 20)[20, 3, :4] = np.array([a, b], "<f2").view(np.uint8)
    wanted, got = blocks.widen(found), through(found)
    assert np.array_equal(got[:16], alone[:16]) and np.array_equal(got[32:], alone[32:])
    assert squares((got - wanted)[20, :256]) < 0.05**2 * squares(wanted[20, :256])
    told = regrid(found, str)[1]
    assert told[0] == pytest.approx(squares(got - wanted), rel=2e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_it_costs_is_told(dtype: str) -> None:
    for found in (like_weights(dtype, 40, 512), as_blocks(drawn(dtype, 40, 512), dtype)):
        wanted = blocks.widen(found)
        told = regrid(found, str)[1]
        assert told[0] == pytest.approx(squares(through(found) - wanted), rel=2e-4)
        assert told[1] == pytest.approx(squares(wanted), rel=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_no_number_is_far_off(dtype: str) -> None:
    """Whatever the scales: by half a scale, which is a share of the run's (q6) or the group's largest number,
    or what steps that the whole super-group shares and f16's smallest number leave."""
    for seed in range(4):
        found = as_blocks(drawn(dtype, 33, 768, seed), dtype)
        wanted = blocks.widen(found)
        off = np.abs(through(found) - wanted).reshape(33, 3, 16, 16)
        sizes = np.abs(wanted).reshape(33, 3, 16, 16).max(-1)
        largest = sizes.max(-1, keepdims=True)
        if ON_GRIDS[dtype] == "q6":
            bound = sizes / 31 * 0.55 + largest / 127 / 32 * 17 + 32 * 2.0**-24
        else:
            bound = sizes.reshape(33, 3, 8, 2).max(-1).repeat(2, -1) * 0.2 + largest * 0.05 + 8 * 2.0**-24
        assert (off.max(-1) <= bound).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_zeros_and_constants(dtype: str) -> None:
    for a, b in ((0.0, 0.0), (0.0, 0.37), (0.0, -5e4), (1e-7, 3.0), (-0.02, 0.1), (6e-8, 6e-8)):
        data = drawn(dtype, 20, 256)
        for at, scale in zip(PLACES.get(dtype, (0, 2)), (a, b), strict=True):
            data[..., at : at + 2] = np.array([scale], "<f2").view(np.uint8)
        found = as_blocks(data, dtype)
        wanted, got = blocks.widen(found), through(found)
        assert np.isfinite(got).all() and squares(got - wanted) <= 0.07**2 * squares(wanted) + 1e-9


@pytest.mark.parametrize("dtype", TYPES)
def test_a_constant_run_is_exact_but_for_its_step(dtype: str) -> None:
    """With no scale only minima are left."""
    data = drawn(dtype, 16, 256)
    for at, scale in zip(PLACES.get(dtype, (0, 2)), (0.0, -1.5), strict=True):
        sign = -1 if dtype == "Q2_K" else 1  # of what is subtracted: q4 has minima, q6 both signs
        data[..., at : at + 2] = np.array([sign * scale], "<f2").view(np.uint8)
    if dtype == "Q2_K":
        data[..., :16] = 0x50
    elif dtype == "Q5_K":
        data[..., 4:12], data[..., 12:16] = 5, 0x55
    found = as_blocks(data, dtype)
    assert np.allclose(through(found), blocks.widen(found), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_of_rows_join_to_the_whole(dtype: str) -> None:
    """So bytes depend on no thread and no step."""
    found = as_blocks(drawn(dtype, 50, 512), dtype)
    parts = (regrid(found._replace(data=found.data[at : at + 16]), str)[0] for at in range(0, 50, 16))
    assert b"".join(map(bytes, parts)) == bytes(regrid(found, str)[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_and_groups_that_do_not_exist_are_as_the_format_has_them(dtype: str) -> None:
    cols = widths(dtype)[1]  # 96: three groups of eight
    ours = np.frombuffer(regrid(as_blocks(drawn(dtype, 3, cols), dtype), str)[0], np.uint8)
    type = ON_GRIDS[dtype]
    zeros = np.frombuffer(pack(np.zeros((16, cols), np.float32), type), np.uint8)
    quants = {"q4": 256, "q6": 384}[type] * cols // 32
    rest = [part[:quants].reshape(-1, 16, 4)[:, 3:] for part in (ours, zeros)]
    assert np.array_equal(rest[0], rest[1])
    width = {"q4": 256, "q6": 288}[type]
    records = ours[quants : quants + -(-cols // 256) * width].reshape(-1, width)
    if type == "q4":
        fields = [records[:, :64].view("<u2"), records[:, 64:].view("<u4")]
    else:
        fields = [records[:, :32].view("<u2"), records[:, 32:]]
        assert not fields[1].reshape(-1, 16, 16)[-1, cols % 256 // 16 or 16 :].any()
    for field in (one.reshape(-1, 16) for one in fields):
        assert field[:, :3].any() and not field[:, 3:].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_are_refused_by_place(dtype: str, bits: int) -> None:
    for at in PLACES.get(dtype, (0, 2)):
        data = drawn(dtype, 40, 512)
        data[37, -1, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(ConversionError, match=rf"w\[1037\]: its row in {dtype} has a scale that is not"):
            regrid(as_blocks(data, dtype), lambda row: f"w[{1000 + row}]")


def settled(type: str) -> Blocks | Floats:
    """Weights that no version of numpy draws otherwise: blocks of a ggml type, or numbers for one of ours."""
    if type not in TYPES:
        data = np.frombuffer(hashlib.shake_128(b"weights").digest(2 * 40 * 576), "<i2")
        return data.reshape(40, 576).astype(np.float32) / np.float32(1 << 18)
    width = blocks.sizes()[type][1]
    data = np.frombuffer(hashlib.shake_128(b"blocks").digest(40 * 6 * width), np.uint8).reshape(40, 6, width)
    found = data.copy()
    for at, scale in zip(PLACES.get(type, (0, 2)), (2.0**-9, -(2.0**-5)), strict=True):
        value = abs(scale) if type in ("Q5_K", "Q2_K") else scale
        found[..., at : at + 2] = np.array([value], "<f2").view(np.uint8)
        found[..., at] ^= data[..., at]
    return as_blocks(found, type)


def test_other_bytes_are_another_version() -> None:
    """Kept conversions are found by the converter's version. Where what is rounded comes out otherwise on
    purpose, raise CONVERTER_VERSION and write down the new digests."""
    found = {}
    for type in (*TYPES, "bf16", "q8", "q6", "q4"):
        weights = settled(type)
        data = regrid(weights, str)[0] if isinstance(weights, Blocks) else pack(weights, type)
        found[type] = hashlib.sha256(data).hexdigest()[:16]
    assert (CONVERTER_VERSION, found) == (
        "2",
        {
            "Q2_K": "d8dba2d2a8655c95",
            "Q4_1": "c47cd4fbe55552bb",
            "Q5_1": "f063a03ebc9cfcc2",
            "Q5_K": "ba60ec0e0548353e",
            "bf16": "6c0ac96ee6c6362b",
            "q8": "ce40705ab93f35b3",
            "q6": "f7a43b03d87d88a8",
            "q4": "62d7b2c1dedbdd8a",
        },
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes_are_refused_or_become_finite_weights(dtype: str) -> None:
    """Whatever damage leaves of a block, without a warning of numpy's."""
    width = blocks.sizes()[dtype][1]
    rng = np.random.default_rng(3)
    kept = 0
    for _ in range(60):
        data = rng.integers(0, 256, (16, 8, width), dtype=np.uint8)
        data[rng.random((16, 8)) < 0.3] = 0
        data[:, 1:2, rng.integers(width) :] = 255
        for at in PLACES.get(dtype, (0, 2)):  # most scales are finite, of any size
            data[..., at + 1] &= rng.choice([255, 0xBB], p=[0.002, 0.998], size=(16, 8)).astype(np.uint8)
        found = as_blocks(data, dtype)
        try:
            with warnings.catch_warnings(action="error"):
                packed, told = regrid(found, str)
        except ConversionError as error:
            assert "a scale that is not finite" in str(error)
            continue
        kept += 1
        assert np.isfinite(told).all()
        assert np.isfinite(unpack(packed, 16, 8 * blocks.sizes()[dtype][0], ON_GRIDS[dtype])).all()
    assert kept > 10
