"""q4: the search for its scales against numpy, bytes against docs/FORMAT.md section 4, errors against simple
rounding, and the edges of its f16 units."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt
import pytest

import packing
from colibri.errors import ConversionError
from colibri.quantize import block_rows, matrix_bytes, pack, unpack

Floats = npt.NDArray[np.float32]


def random(rows: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def through(matrix: Floats, importance: Floats | None = None) -> Floats:
    """What is left of a matrix after q4."""
    rows, cols = matrix.shape
    return unpack(pack(matrix, "q4", importance=importance), rows, cols, "q4")


def squares(matrix: Floats, back: Floats, weight: Floats | float = 1.0) -> float:
    return float((weight * (matrix.astype(np.float64) - back) ** 2).sum())


def by_range(matrix: Floats) -> Floats:
    """Each group's own range in 15 steps, scales of full precision: no search, but better than 6 bits."""
    groups = matrix.reshape(matrix.shape[0], -1, 32)
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    step = np.maximum(groups.max(-1, keepdims=True) - low, 1e-30) / 15
    back = np.rint((groups - low) / step) * step + low
    return np.asarray(back.reshape(matrix.shape), np.float32)


def by_six_bits(matrix: Floats) -> Floats:
    """The same with steps and minima rounded to 6 bits of the largest in their row of 256."""
    groups = matrix.reshape(matrix.shape[0], -1, 8, 32)
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    step = np.maximum(groups.max(-1, keepdims=True) - low, 1e-30) / 15

    def rounded(values: Floats) -> Floats:
        unit = np.maximum(values.max(2, keepdims=True), 1e-30) / 63
        return np.asarray(np.rint(values / unit) * unit)

    step, least = rounded(step), rounded(-low)
    q = np.rint(np.clip((groups + least) / np.maximum(step, 1e-30), 0, 15))
    return np.asarray((q * step - least).reshape(matrix.shape), np.float32)


# ------------------------------------------------------------------ bytes


def slow_unpack(packed: bytes, rows: int, cols: int) -> Floats:
    """One element at a time, as the document says it."""
    groups, supers = -(-cols // 32), -(-cols // 256)
    panel = 256 * (groups + supers)
    out = np.zeros((rows, cols), np.float32)
    for row in range(rows):
        lane = row % 16
        bytes_of = packed[row // 16 * panel : (row // 16 + 1) * panel]
        for col in range(cols):
            group, within = divmod(col, 32)
            low, i, j = within < 16, within % 16 // 4, within % 4
            both = bytes_of[256 * group + 64 * i + 4 * lane + j]
            record = bytes_of[256 * (groups + group // 8) :][:256]
            d, dmin = (np.frombuffer(record, "<f2", 1, at + 2 * lane)[0] for at in (0, 32))
            w = [int(np.frombuffer(record, "<u4", 1, 64 * (n + 1) + 4 * lane)[0]) for n in range(3)]
            bits = [w[n] >> 6 * k & 63 for n in range(3) for k in range(5)]
            bits.append(w[0] >> 30 | w[1] >> 30 << 2 | w[2] >> 30 << 4)
            scale = np.float32(d) * np.float32(bits[group % 8])
            least = np.float32(dmin) * np.float32(bits[8 + group % 8])
            out[row, col] = np.float32(both & 15 if low else both >> 4) * scale - least
    return out


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (3, 300), (16, 256)], ids=str)
def test_unpack_reads_what_the_document_says(shape: tuple[int, int]) -> None:
    packed = pack(random(*shape) - np.float32(0.3), "q4")
    assert np.array_equal(unpack(packed, *shape, "q4"), slow_unpack(bytes(packed), *shape))


@pytest.mark.parametrize(
    "shape", [(1, 1), (16, 32), (15, 31), (17, 255), (33, 256), (5, 257), (20, 620)], ids=str
)
@pytest.mark.parametrize("shift", [0, -4, 4])
def test_bytes_are_those_of_the_plain_search(shape: tuple[int, int], shift: float) -> None:
    """Also with only negative and only positive weights, and with importances."""
    matrix = random(*shape, seed=shape[1]) + np.float32(shift)
    assert bytes(pack(matrix, "q4")) == packing.pack(matrix, "q4")
    importance = np.random.default_rng(1).exponential(size=shape[1]).astype(np.float32)
    assert bytes(pack(matrix, "q4", importance=importance)) == packing.pack(matrix, "q4", importance)


def test_padding_is_zero() -> None:
    """Rows and columns beyond the matrix, and the scales of groups that do not exist."""
    packed = np.frombuffer(pack(random(3, 37) - np.float32(5), "q4"), np.uint8)
    quants, record = packed[:512].reshape(2, 4, 16, 4), packed[512:]
    assert not quants[:, :, 3:].any()
    assert quants[0, :, :3].any() and quants[1, :2, :3].any() and not quants[1, 2:, :3].any()
    assert not (quants[1, 1, :3, 1:] & 15).any() and not (quants[1, :, :3] >> 4).any()  # elements 37 to 63
    words = record[64:].view("<u4").reshape(3, 16)
    assert not words[:, 3:].any() and not record[:64].view("<u2").reshape(2, 16)[:, 3:].any()
    assert not (words[0] >> 12).any() and not (words[1] & 0xC003FFFF).any() and not words[2].any()


# ------------------------------------------------------------------ errors


def rows_of_many_kinds() -> dict[str, Floats]:
    rng = np.random.default_rng(11)
    normal = random(32, 512, seed=2)
    outliers = normal.copy()
    outliers[:, rng.choice(512, 6, replace=False)] *= 20
    return {
        "normal": normal,
        "outlier columns": outliers,
        "heavy tails": rng.standard_t(3, (32, 512)).astype(np.float32),
        "uniform": rng.uniform(-1, 1, (32, 512)).astype(np.float32),
        "shifted": normal + np.float32(0.7),
    }


@pytest.mark.parametrize("kind", rows_of_many_kinds())
def test_the_search_is_clearly_better_than_rounding(kind: str) -> None:
    matrix = rows_of_many_kinds()[kind]
    error = squares(matrix, through(matrix))
    assert error < 0.9 * squares(matrix, by_six_bits(matrix))
    assert error < 0.97 * squares(matrix, by_range(matrix))  # although that has scales of 32 bits


def test_importance_moves_the_error() -> None:
    matrix = random(48, 768, seed=4)
    importance = np.random.default_rng(8).exponential(size=768).astype(np.float32) ** 2
    plain, weighted = through(matrix), through(matrix, importance)
    assert squares(matrix, weighted, importance) < 0.9 * squares(matrix, plain, importance)
    assert squares(matrix, weighted) < 1.25 * squares(matrix, plain)
    even = pack(matrix, "q4", importance=np.full(768, 3, np.float32))
    assert squares(matrix, unpack(even, 48, 768, "q4")) == pytest.approx(squares(matrix, plain), rel=1e-3)


def test_importance_counts_relatively() -> None:
    """Doubling all of it changes nothing; nothing but zeros is as good as none; extremes do no harm."""
    matrix = random(16, 300, seed=6)
    importance = np.random.default_rng(9).exponential(size=300).astype(np.float32)
    assert bytes(pack(matrix, "q4", importance=importance)) == bytes(
        pack(matrix, "q4", importance=importance * np.float32(2))
    )
    assert bytes(pack(matrix, "q4", importance=np.zeros(300, np.float32))) == bytes(pack(matrix, "q4"))
    largest = np.zeros(300, np.float32)
    largest[::2] = np.finfo(np.float32).max
    assert squares(matrix, through(matrix, largest)) < 2 * squares(matrix, through(matrix))
    tiny = np.zeros(300, np.float32)
    tiny[7] = 1e-45
    assert squares(matrix, through(matrix, tiny)) < 2 * squares(matrix, through(matrix))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_importance_that_is_no_weight_is_refused(bad: float) -> None:
    importance = np.ones(40, np.float32)
    importance[33] = bad
    with pytest.raises(ConversionError, match=r"^attn: importance\[33\]: expected a finite number"):
        pack(random(4, 40), "q4", importance=importance, name="attn")


# ------------------------------------------------------------------ values that q4 holds


def representable(rows: int, cols: int, seed: int) -> Floats:
    """Values of q4 whose groups use all their quants, by numpy alone."""
    rng = np.random.default_rng(seed)
    shape = (rows, -(-cols // 256), 8)
    q = rng.integers(0, 16, (*shape, 32)).astype(np.float32)
    q[..., 5], q[..., 11] = 0, 15
    d, dmin = (rng.uniform(1e-3, 2e-3, (*shape[:2], 1)).astype(np.float16).astype(np.float32) for _ in "ab")
    sc, m = (rng.integers(20, 64, shape).astype(np.float32) for _ in "ab")
    values = q * (d * sc)[..., None] - (dmin * m)[..., None]
    return np.ascontiguousarray(values.reshape(rows, -1)[:, :cols])


@pytest.mark.parametrize("cols", [32, 256, 608, 1024])
def test_values_that_q4_holds_stay_exact(cols: int) -> None:
    matrix = representable(33, cols, seed=cols)
    assert np.array_equal(through(matrix), matrix)


def test_a_second_pass_changes_next_to_nothing() -> None:
    """Not every group that came out uses all its quants, so some are found anew, within a part of a step."""
    matrix = random(32, 1024, seed=3)
    once = through(matrix)
    twice = through(once)
    assert (twice != once).mean() < 0.1
    assert squares(once, twice) < 1e-3 * squares(matrix, once)


def test_zeros_and_constants() -> None:
    """Zero is exact; one value for all is right up to the rounding of an f16, of either sign."""
    matrix = np.zeros((20, 600), np.float32)
    assert not np.frombuffer(pack(matrix, "q4"), np.uint8).any()
    for value in (0.37, -0.37, 3e6, -3e6, 1.0, -1.0):
        back = through(np.full((20, 600), value, np.float32))
        assert np.allclose(back, value, rtol=2**-11, atol=0), value
    matrix[3, 290] = 1  # all other groups stay exactly zero
    back = through(matrix)
    assert back[3, 290] == pytest.approx(1, rel=2**-11)
    assert np.count_nonzero(back) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sign(sign: int) -> None:
    """All positive: the minimum is 0. All negative: the range need not reach 0."""
    matrix = sign * (np.abs(random(16, 512, seed=9)) + np.float32(1))
    back = through(matrix)
    assert (np.sign(back) == sign).all()
    step = np.abs(matrix).max() / 15 if sign > 0 else (matrix.max() - matrix.min()) / 15
    assert np.abs(back - matrix).max() < step


def test_a_huge_weight_spoils_its_own_group_only_in_part() -> None:
    """One weight of 1e6: its group has its range; the others keep what 6 bits of scale leave."""
    matrix = random(16, 512, seed=10)
    matrix[:, 40] = 1e6
    back = through(matrix)
    assert np.allclose(back[:, 40], 1e6, rtol=1e-3)
    assert np.array_equal(back[:, 256:], through(matrix[:, 256:]))
    assert squares(matrix[:, 64:256], back[:, 64:256]) <= squares(matrix[:, 64:256], np.zeros(1, np.float32))


@pytest.mark.parametrize("value", [4.13e6, -4.13e6, 3e38])
def test_what_f16_units_cannot_hold_is_refused(value: float) -> None:
    matrix = random(16, 64)
    matrix[9, 50] = value
    with pytest.raises(ConversionError, match=r"w\[9, 50\] is .*too large for the f16 scales of q4"):
        pack(matrix, "q4", name="w")


@pytest.mark.parametrize("scale", [3e-5, 1e-6, 1e-7, 1e-9, 1e-38, 1e-44])
def test_tiny_weights(scale: float) -> None:
    """f16 subnormal units are coarse; below half of the smallest everything is zero. Never NaN, never worse
    than zeros."""
    matrix = random(16, 256, seed=12) * np.float32(scale)
    back = through(matrix)
    assert np.isfinite(back).all()
    assert squares(matrix, back) <= squares(matrix, np.zeros(1, np.float32))
    if scale >= 1e-6:
        assert squares(matrix, back) < 0.02 * squares(matrix, np.zeros(1, np.float32))
    if scale <= 1e-9:
        assert not back.any()


# ------------------------------------------------------------------ blocks and threads


@pytest.mark.parametrize("cols", [40, 513])
def test_blocks_of_rows_join_to_the_whole(cols: int) -> None:
    matrix = random(75, cols)
    importance = np.random.default_rng(2).exponential(size=cols).astype(np.float32)
    blocks = b"".join(
        bytes(pack(matrix[at : at + 16], "q4", importance=importance)) for at in range(0, 75, 16)
    )
    assert blocks == bytes(pack(matrix, "q4", importance=importance))


def test_threads_do_not_change_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cols = 16384  # a block is 16 rows
    assert block_rows(cols) == 16
    matrix = random(5 * 16 + 3, cols, seed=1)
    many = bytes(pack(matrix, "q4"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert bytes(pack(matrix, "q4")) == many
    assert len(many) == matrix_bytes(len(matrix), cols, "q4")


def test_many_callers_at_once() -> None:
    matrices = [random(33, 256, seed=seed) for seed in range(4)]
    expected = [bytes(pack(matrix, "q4")) for matrix in matrices]
    found: list[bytes] = [b""] * 4

    def work(at: int) -> None:
        found[at] = bytes(pack(matrices[at], "q4"))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
