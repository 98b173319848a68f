"""q6: bytes against docs/FORMAT.md section 4 and against numpy, blocks of GGUF's Q6_K without loss, errors
against a simple choice of scales, and its edges. What it shares with all types is in test_quantize.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import packing
from colibri.quantize import matrix_bytes, pack, unpack

Floats = npt.NDArray[np.float32]


def random(rows: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def through(matrix: Floats, importance: Floats | None = None) -> Floats:
    rows, cols = matrix.shape
    return unpack(pack(matrix, "q6", importance=importance), rows, cols, "q6")


def squares(a: Floats, b: Floats) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum())


def slow_unpack(packed: bytes, rows: int, cols: int) -> Floats:
    """One element at a time, as the document says it."""
    groups, supers = -(-cols // 32), -(-cols // 256)
    panel = -(-(384 * groups + 288 * supers) // 64) * 64
    out = np.zeros((rows, cols), np.float32)
    for row in range(rows):
        lane = row % 16
        bytes_of = packed[row // 16 * panel : (row // 16 + 1) * panel]
        for col in range(cols):
            run, within = divmod(col, 16)
            lines = [bytes_of[192 * run + 64 * i + 4 * lane + within % 4] for i in range(3)]
            top = sum(byte >> 6 << 2 * i for i, byte in enumerate(lines))
            q = (lines[within // 4] & 63 if within < 12 else top) - 32
            record = bytes_of[384 * groups + 288 * (run // 16) :][:288]
            d = np.frombuffer(record, "<f2", 1, 2 * lane)[0]
            sc = np.frombuffer(record, np.int8, 1, 32 + 16 * (run % 16) + lane)[0]
            out[row, col] = np.float32(q) * (np.float32(d) * np.float32(sc))
    return out


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (5, 256), (20, 300), (16, 513)], ids=str)
def test_bytes_mean_what_the_document_says(shape: tuple[int, int]) -> None:
    packed = pack(random(*shape) - np.float32(0.3), "q6")
    assert len(packed) == matrix_bytes(*shape, "q6")
    assert np.array_equal(unpack(packed, *shape, "q6"), slow_unpack(bytes(packed), *shape))


@pytest.mark.parametrize("cols", [7, 64, 255, 512, 600])
def test_bytes_are_those_of_numpy(cols: int) -> None:
    """Heavy tails, columns of other sizes, and importances of which some are 0."""
    rng = np.random.default_rng(cols)
    matrix = (rng.standard_t(3, (35, cols)) * rng.exponential(size=cols)).astype(np.float32)
    assert bytes(pack(matrix, "q6")) == packing.pack(matrix, "q6")
    importance = (rng.exponential(size=cols) * (rng.random(cols) > 0.2)).astype(np.float32)
    assert bytes(pack(matrix, "q6", importance=importance)) == packing.pack(matrix, "q6", importance)


def test_padding_is_zero_of_the_type() -> None:
    """Elements beyond the matrix are stored 32, runs and rows beyond it have scales of 0."""
    packed = np.frombuffer(pack(random(3, 37), "q6"), np.uint8)
    lines = packed[:768].reshape(4, 3, 16, 4)
    for padding in (lines[:, :, 3:], lines[3], lines[2, 2]):
        assert (padding & 63 == 32).all()
    record = packed[768 : 768 + 288]
    assert not record[6:32].any() and not record[32:].reshape(16, 16)[:, 3:].any()
    assert not record[32:].reshape(16, 16)[4:].any() and not packed[768 + 288 :].any()


def test_blocks_of_q6_k_are_held_without_loss() -> None:
    """All parameters of 256 elements drawn freely, d and scales of both signs, -128 too."""
    rng = np.random.default_rng(1)
    q = rng.integers(0, 64, (2, 16, 16, 16)).astype(np.uint8)  # super-group, run, element, row
    sc = rng.integers(-128, 128, (2, 16, 16)).astype(np.int8)
    d = (rng.standard_normal((2, 16)) * 1e-3).astype(np.float16)
    records = b"".join(d[s].tobytes() + sc[s].tobytes() for s in range(2))
    packed = packing.q6_quant_bytes(q.reshape(32, 16, 16)) + records
    values = d[:, None, None].astype(np.float32) * sc[:, :, None] * (q.astype(np.float32) - 32)
    expected = values.transpose(3, 0, 1, 2).reshape(16, 512)
    assert np.array_equal(unpack(packed, 16, 512, "q6"), expected)


def test_values_that_q6_holds_stay_exact() -> None:
    """Of d >= 0 whose largest scale is above 63 and whose runs reach -32: what the search must find again."""
    rng = np.random.default_rng(2)
    q = rng.integers(-31, 32, (33, 4, 16, 16)).astype(np.float32)
    q[..., 3] = -32
    sc = rng.integers(20, 128, (33, 4, 16)) * rng.choice([-1, 1], (33, 4, 16))
    d = rng.uniform(1e-3, 2e-3, (33, 4, 1)).astype(np.float16).astype(np.float32)
    matrix = (q * (d * sc.astype(np.float32))[..., None]).reshape(33, 1024)
    assert np.array_equal(through(matrix), matrix)


def plain(matrix: Floats) -> Floats:
    """Each run's peak at -32, scales rounded to multiples of the largest / 127, no search."""
    x = matrix.reshape(len(matrix), -1, 16, 16)
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    unit = np.abs(peak).max(-2, keepdims=True) / 32 / 127
    scale = np.rint(peak / -32 / unit) * unit
    return np.asarray((np.clip(np.rint(x / scale), -32, 31) * scale).reshape(matrix.shape), np.float32)


@pytest.mark.parametrize("kind", ["normal", "student", "columns"])
def test_the_search_is_better_than_none(kind: str) -> None:
    rng = np.random.default_rng(4)
    drawn = rng.standard_t(4, (48, 1024)) if kind == "student" else rng.standard_normal((48, 1024))
    if kind == "columns":
        drawn[:, rng.integers(0, 1024, 20)] *= 12
    matrix = drawn.astype(np.float32)
    error = squares(matrix, through(matrix))
    assert error < 0.97 * squares(matrix, plain(matrix))
    assert error < 0.1 * squares(matrix, unpack(pack(matrix, "q4"), 48, 1024, "q4"))


def test_importance_moves_the_error() -> None:
    matrix, importance = random(48, 512, seed=5), np.ones(512, np.float32)
    importance[::4] = 50
    even, told = through(matrix), through(matrix, importance)
    assert squares(matrix[:, ::4], told[:, ::4]) < 0.95 * squares(matrix[:, ::4], even[:, ::4])
    assert bytes(pack(matrix, "q6", importance=np.zeros(512, np.float32))) == bytes(pack(matrix, "q6"))


def test_zeros_and_constants() -> None:
    assert not through(np.zeros((20, 600), np.float32)).any()
    for value in (0.37, -0.37, 3e6, -2.57e8, 1.0):
        back = through(np.full((20, 600), value, np.float32))
        assert np.allclose(back, value, rtol=2**-9, atol=0), value


@pytest.mark.parametrize("scale", [3e-4, 1e-5, 1e-6, 1e-9, 1e-38, 1e-44])
def test_tiny_weights(scale: float) -> None:
    """f16 subnormal units are coarse; below half of the smallest everything is zero."""
    matrix = random(16, 256, seed=12) * np.float32(scale)
    back, none = through(matrix), np.zeros(1, np.float32)
    assert np.isfinite(back).all() and squares(matrix, back) <= squares(matrix, none)
    if scale >= 1e-5:
        assert squares(matrix, back) < 0.01 * squares(matrix, none)
    if scale <= 1e-9:
        assert not back.any()
