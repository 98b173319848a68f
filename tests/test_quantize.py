"""Packed bytes against a slow packer written from docs/FORMAT.md section 4 and against numpy (packing.py),
and the edges of every weight type. What q4 and q6 have alone is in test_quantize_q4.py and _q6.py."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import packing
from colibri import _native
from colibri.errors import ArgumentError, ConversionError, ModelFileError
from colibri.quantize import TYPE_IDS, block_rows, matrix_bytes, pack, panel_bytes, unpack

Floats = npt.NDArray[np.float32]
SHAPES = [(1, 1), (15, 2), (16, 3), (17, 31), (33, 32), (5, 33), (48, 64), (20, 70)]


def random(rows: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def slow_pack(matrix: Floats, type: str) -> bytes:
    """One element at a time, as the document says it."""
    if type in ("q4", "q6"):
        return packing.pack(matrix, type)
    rows, cols = matrix.shape
    out = bytearray()

    def at(row: int, col: int) -> float:
        return float(matrix[row, col]) if row < rows and col < cols else 0.0

    for panel in range(0, rows, 16):
        lanes = range(panel, panel + 16)
        if type == "f32":
            for k in range(cols):
                out += b"".join(struct.pack("<f", at(row, k)) for row in lanes)
        elif type == "bf16":
            for k in range(0, cols, 2):
                for row in lanes:
                    pair = np.array([at(row, k), at(row, k + 1)], np.float32).astype(ml_dtypes.bfloat16)
                    out += pair.tobytes()
        else:
            out += slow_q8_panel([[at(row, k) for k in range(-(-cols // 32) * 32)] for row in lanes])
    return bytes(out)


def slow_q8_panel(lanes: list[list[float]]) -> bytes:
    quants, scales = bytearray(), bytearray()
    for start in range(0, len(lanes[0]), 32):
        groups = [lane[start : start + 32] for lane in lanes]
        scale = [np.float16(np.float32(max(map(abs, group))) * np.float32(1 / 127)) for group in groups]
        for quad in range(0, 32, 4):
            for group, one in zip(groups, scale, strict=True):
                for value in group[quad : quad + 4]:
                    divided = np.float32(value) / np.float32(one) if one else np.float32(0)
                    quants.append(int(np.clip(np.rint(divided), -127, 127)) + 128)
        scales += b"".join(one.tobytes() for one in scale)
    panel = bytes(quants + scales)
    return panel + bytes(-len(panel) % 64)


@pytest.mark.parametrize("type", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_document(type: str, shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    packed = bytes(pack(matrix, type))
    assert len(packed) == matrix_bytes(*shape, type)
    assert packed == slow_pack(matrix, type)


@pytest.mark.parametrize("type", TYPE_IDS)
@pytest.mark.parametrize("scale", [1, 3e6 / 5, 1e-5, 3e-8, 1e-20, 1e-40, 0], ids=str)
def test_bytes_are_those_of_the_slow_packer(type: str, scale: float) -> None:
    """Odd shapes at every magnitude: subnormal scales, scales that round to 0, subnormal floats."""
    for seed, shape in enumerate([(1, 1), (17, 33), (20, 70), (35, 257)]):
        drawn = np.random.default_rng(seed).standard_normal(shape).clip(-5, 5)
        matrix = (drawn * scale).astype(np.float32)
        assert bytes(pack(matrix, type)) == slow_pack(matrix, type), shape


@pytest.mark.parametrize("type", ["f32", "bf16", "q8"])
def test_bytes_of_any_bit_pattern_are_those_of_the_slow_packer(type: str) -> None:
    """Floats of every exponent side by side, as far as the type holds them."""
    bits = np.random.default_rng(7).integers(0, 2**32, (33, 75), dtype=np.uint32)
    matrix = bits.view(np.float32)
    largest = {"f32": 3.4e38, "bf16": 3.38e38, "q8": 8.3e6}[type]
    matrix = np.where(np.abs(matrix) <= largest, matrix, np.float32(-0.0))
    assert bytes(pack(matrix, type)) == slow_pack(matrix, type)


def test_every_float_scale_rounds_to_f16_as_numpy_rounds() -> None:
    """One weight a group, so that each scale is its own: around every power of two, and ties."""
    exponents = np.arange(103 + 6, 150, dtype=np.uint32)[:, None] << 23
    mantissas = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FFFFF], np.uint32)
    values = (exponents | mantissas).view(np.float32).reshape(-1)
    values = values[values <= 8.3e6]
    matrix = np.zeros((values.size, 32), np.float32)
    matrix[:, 5] = values
    assert bytes(pack(matrix, "q8")) == slow_pack(matrix, "q8")


def test_sizes_are_those_of_the_document() -> None:
    assert [panel_bytes(33, type) for type in TYPE_IDS] == [64 * 33, 64 * 17, 1088, 64 * 17, 256 * 3]
    assert [panel_bytes(cols, "q4") for cols in (1, 256, 257)] == [512, 256 * 9, 256 * 11]
    assert [panel_bytes(cols, "q6") for cols in (1, 256, 257)] == [704, 3392, 4032]
    assert panel_bytes(32, "q8") == 576  # 544 rounded up to a multiple of 64
    assert matrix_bytes(17, 32, "q8") == 2 * 576


@pytest.mark.parametrize("type", TYPE_IDS)
def test_blocks_of_rows_join_to_the_whole(type: str) -> None:
    matrix = random(75, 40)
    blocks = b"".join(bytes(pack(matrix[at : at + 16], type)) for at in range(0, 75, 16))
    assert blocks == bytes(pack(matrix, type))
    assert block_rows(40) % 16 == 0


def test_many_blocks_inside_pack() -> None:
    """More rows than one internal block holds."""
    rows = 2 * block_rows(4096) + 5
    matrix = random(rows, 4096)
    assert np.array_equal(unpack(pack(matrix, "f32"), rows, 4096, "f32"), matrix)


def test_f32_is_exact_and_bf16_rounds_to_nearest_even() -> None:
    matrix = random(19, 21) * np.float32(1e5)
    assert np.array_equal(unpack(pack(matrix, "f32"), 19, 21, "f32"), matrix)
    expected = matrix.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(unpack(pack(matrix, "bf16"), 19, 21, "bf16"), expected)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000], np.uint32).view(np.float32)[None]
    rounded = unpack(pack(ties, "bf16"), 1, 4, "bf16").view(np.uint32) >> 16
    assert rounded.tolist() == [[0x3F80, 0x3F82, 0x3F81, 0xBF82]]


def test_q8_error_is_at_most_half_a_step() -> None:
    matrix = random(32, 256, seed=3)
    back = unpack(pack(matrix, "q8"), 32, 256, "q8")
    step = np.abs(matrix).reshape(32, 8, 32).max(-1) / 127
    error = np.abs(matrix - back).reshape(32, 8, 32)
    # The scale's own rounding adds at most 127 steps x 2^-11.
    assert (error <= step[..., None] * (0.5 + 127 / 2048)).all()
    assert error.max() > 0


def test_q8_holds_its_own_values_without_loss() -> None:
    """What came out of q8 goes in again unchanged: quotients are taken with the rounded scale."""
    once = unpack(pack(random(16, 128, seed=5), "q8"), 16, 128, "q8")
    assert np.array_equal(unpack(pack(once, "q8"), 16, 128, "q8"), once)


def test_q8_never_writes_byte_zero() -> None:
    """-128 is invalid; extremes, subnormal scales and all-zero groups stay within +-127."""
    matrix = np.zeros((16, 96), np.float32)
    matrix[:, 0] = -1.1e-5  # scale 8.7e-8 rounds down to the smallest f16, 6e-8: quotient -184
    matrix[:, 1] = 1.1e-5
    matrix[:, 32] = -1e-12  # scale rounds to 0
    matrix[:, 64] = -1000
    packed = np.frombuffer(pack(matrix, "q8"), np.uint8)
    assert packed[: 512 * 3].min() >= 1
    quants = packed[: 512 * 3].reshape(3, 8, 16, 4)
    assert quants[0, 0, 0].tolist() == [1, 255, 128, 128]
    assert (quants[1] == 128).all()
    scales = packed[512 * 3 : 544 * 3].view(np.float16)
    assert scales[16] == 0
    assert np.isfinite(unpack(packed, 16, 96, "q8")).all()


def test_padding_rows_are_zero_quants() -> None:
    packed = np.frombuffer(pack(random(3, 5), "q8"), np.uint8)
    quants = packed[:512].reshape(8, 16, 4)
    assert (quants[:, 3:] == 128).all()
    assert (quants[2:] == 128).all()


@pytest.mark.parametrize("type", TYPE_IDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused_with_their_place(type: str, bad: float) -> None:
    matrix = random(20, 40)
    matrix[18, 37] = bad
    with pytest.raises(ConversionError, match=r"attn\.q\[118, 37\] is -?(nan|inf)"):
        pack(matrix, type, name="attn.q", first_row=100)


def test_the_place_counts_from_the_first_block() -> None:
    """More columns than a block has room for in one go: the row is counted over blocks."""
    matrix = np.zeros((block_rows(8192) + 20, 8192), np.float32)
    matrix[-1, 8191] = np.inf
    with pytest.raises(ConversionError, match=rf"w\[{len(matrix) + 4}, 8191\] is inf"):
        pack(matrix, "q8", name="w", first_row=5)


def test_the_first_of_many_wrong_rows_is_told() -> None:
    """Blocks are packed by several threads; the text is that of the first row all the same."""
    matrix = np.zeros((4 * block_rows(8192), 8192), np.float32)
    matrix[[block_rows(8192) + 3, -1], 7] = np.nan
    for _ in range(5):
        with pytest.raises(ConversionError, match=rf"w\[{block_rows(8192) + 3}, 7\] is nan"):
            pack(matrix, "q8", name="w")


@pytest.mark.parametrize(("type", "value"), [("q8", 1e7), ("bf16", 3.4e38), ("q4", -4.2e6), ("q6", 2.58e8)])
def test_values_beyond_a_type_name_the_tensor(type: str, value: float) -> None:
    matrix = random(16, 40)
    matrix[3, 35] = value
    with pytest.raises(ConversionError, match=r"w2.*(row 3|\[3, 35\]).*too large"):
        pack(matrix, type, name="w2")


def test_largest_values_that_fit() -> None:
    matrix = np.full((1, 32), 65504.0 * 127, np.float32)
    assert np.array_equal(unpack(pack(matrix, "q8"), 1, 32, "q8"), matrix)
    largest = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]  # the largest bf16
    limit = np.array([[65504.0 * 63, -65504.0 * 63]], np.float32)
    assert np.allclose(unpack(pack(limit, "q4"), 1, 2, "q4"), limit, rtol=0.01)
    assert unpack(pack(np.full((1, 2), largest, np.float32), "bf16"), 1, 2, "bf16").tolist() == [
        [largest] * 2
    ]


def test_wrong_sizes_and_types_are_refused() -> None:
    with pytest.raises(ModelFileError, match="576 bytes, but 575 were given"):
        unpack(bytes(575), 16, 32, "q8")
    with pytest.raises(ArgumentError, match="'q5' is not known.*f32, bf16, q8, q6, q4"):
        pack(random(2, 2), "q5")
    with pytest.raises(
        ConversionError, match=r"w: expected an importance for each of 2 columns, found \[3\]"
    ):
        pack(random(2, 2), "q4", importance=np.ones(3, np.float32), name="w")


@pytest.mark.parametrize("type", TYPE_IDS)
def test_a_matrix_without_elements_has_no_bytes(type: str) -> None:
    assert bytes(pack(np.zeros((0, 5), np.float32), type)) == b""
    assert bytes(pack(np.zeros((3, 0), np.float32), type)) == b""


def test_the_caller_s_matrix_may_have_any_order() -> None:
    matrix = random(40, 50)
    assert bytes(pack(np.asfortranarray(matrix), "q8")) == bytes(pack(matrix, "q8"))
    assert bytes(pack(matrix[::-1][::-1], "bf16")) == bytes(pack(matrix, "bf16"))


def test_the_library_refuses_what_it_cannot_search() -> None:
    x = np.zeros((256, 4), np.float32)
    for type, values in ((4, x), (7, x), (-1, x), (5, np.zeros((256, 3), np.float32))):
        with pytest.raises(ArgumentError):
            _native.quantize(type, values, values)
    with pytest.raises(ArgumentError, match=r"expected contiguous float32 \[256, 4\]"):
        _native.quantize(5, x, x[:, :3])
    assert [part.shape for part in _native.quantize(6, x[:, :0], x[:, :0])] == [(2, 0), (16, 0), (256, 0)]
