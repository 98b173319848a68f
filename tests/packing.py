"""Packed bytes of q4 and q6 by numpy, their search written plainly: one array operation for each step of
docs/FORMAT.md and quantize.c.

All arithmetic is float32 and sums run in the same order, so bytes must be equal. Values are taken as good:
what is refused is not told here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Three = tuple[Floats, Floats, Floats]

ROWS, GROUP, SUPER = 16, 32, 8
F = np.float32


def pack(matrix: Floats, type: str, importance: Floats | None = None) -> bytes:
    rows, cols = matrix.shape
    padded = np.zeros((-(-rows // ROWS) * ROWS, -(-cols // GROUP) * GROUP), F)
    padded[:rows, :cols] = matrix
    with np.errstate(all="ignore"):
        columns = np.ones(cols, F) if importance is None else _softened(importance)
        searched = _q6_panel if type == "q6" else _q4_panel
        return b"".join(searched(panel, cols, columns) for panel in padded.reshape(-1, ROWS, padded.shape[1]))


# ------------------------------------------------------------------ q4


def _softened(importance: Floats) -> Floats:
    mean = math.fsum(importance) / len(importance)
    if mean == 0:
        return np.ones(len(importance), F)
    return (importance.astype(np.float64) / mean).astype(F) + F(0.125)


def _q4_panel(block: Floats, cols: int, columns: Floats) -> bytes:
    """`block` [16, whole groups]; `columns` [cols]: what an error in each counts."""
    quants, records = b"", b""
    for first in range(0, cols, GROUP * SUPER):
        n = min(cols - first, GROUP * SUPER)
        x = block[:, first : first + n]
        found = q4_super_group(x, columns[first : first + n])
        quants += q4_quant_bytes(found[-1])
        records += q4_record(*found[:-1])
    return quants + records


def q4_quant_bytes(q: Floats) -> bytes:
    """q [groups, 32, 16]"""
    nibbles = q.astype(np.uint8).reshape(-1, 2, 4, 4, ROWS)  # group, half, quad, element, row
    return (nibbles[:, 0] | nibbles[:, 1] << 4).transpose(0, 1, 3, 2).tobytes()


def q4_record(d: Floats, dmin: Floats, sc: Floats, m: Floats) -> bytes:
    """d, dmin [16]; sc, m [groups, 16]"""
    numbers = np.zeros((2, SUPER, ROWS), np.uint32)
    numbers[0, : len(sc)], numbers[1, : len(m)] = sc, m
    n = numbers.reshape(2 * SUPER, ROWS)
    words = np.stack(
        [sum(n[5 * w + i] << 6 * i for i in range(5)) | (n[15] >> 2 * w) << 30 for w in range(3)]
    )
    return d.astype("<f2").tobytes() + dmin.astype("<f2").tobytes() + words.astype("<u4").tobytes()


def q4_super_group(x: Floats, columns: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """d, dmin [16], sc, m [groups, 16] and q [groups, 32, 16] for x [16, n]."""
    x, weight, real = _weighted(x, columns)
    scale, sums = _search(x, weight)
    one, sx, q, qq, _ = sums
    d, sc = _common_unit(scale, np.maximum(qq - _over(q * q, one), F(0)) + F(1e-3) * qq)
    dmin, m = _common_unit(np.maximum(_over(d * sc * q - sx, one), F(0)), one)
    sc, m, error = _improve(x, weight, d, dmin, sc, m)
    d2, dmin2 = _refit(x, weight, one, sx, d, dmin, sc, m)
    sc2, m2, error2 = _improve(x, weight, d2, dmin2, sc, m)
    better = error2 < error
    d, dmin = np.where(better, d2, d), np.where(better, dmin2, dmin)
    sc, m = np.where(better, sc2, sc), np.where(better, m2, m)
    quants = _quants(x, _over(F(1), d * sc), dmin * m).transpose(1, 0, 2)
    return d, dmin, sc, m, quants * real


def _weighted(x: Floats, columns: Floats) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """x [16, n] as [32, groups, 16], what errors in it count, and [groups, 32, 1]: which are no filling."""
    n = x.shape[1]
    groups = -(-n // GROUP)
    real = (np.arange(groups * GROUP) < n).reshape(groups, GROUP, 1)
    x = x[:, np.minimum(np.arange(groups * GROUP), n - 1)].T.reshape(groups, GROUP, ROWS)
    columns = np.pad(columns, (0, groups * GROUP - n)).reshape(groups, GROUP, 1)
    size = np.where(real, np.abs(x), F(0))
    total = _sum(size.reshape(groups * GROUP, ROWS))
    count = real.sum(1).astype(F)
    average = F(2.5) * _sum(size.transpose(1, 0, 2)) / count
    weight = columns * ((np.abs(x) + average[:, None]) * _over(F(1), total)) * real
    return x.transpose(1, 0, 2), weight.transpose(1, 0, 2), real


def _sum(terms: Floats) -> Floats:
    """Over the first axis, in order."""
    total = np.zeros(terms.shape[1:], F)
    for term in terms:
        total = total + term
    return total


def _over(a: Floats | F, b: Floats) -> Floats:
    sound = b > F(1e-30)
    return np.where(sound, a / np.where(sound, b, F(1)), F(0))


def _as_f16(v: Floats) -> Floats:
    return np.clip(v, F(0), F(65504)).astype(np.float16).astype(F)


def _quants(x: Floats, inverse: Floats, least: Floats) -> Floats:
    q: Floats = np.rint(np.clip((x + least) * inverse, F(0), F(15)))
    return q


def _sums(x: Floats, weight: Floats, inverse: Floats, least: Floats) -> Three:
    q = _quants(x, inverse, least)
    return _sum(weight * q), _sum(weight * q * q), _sum(weight * q * x)


def _search(x: Floats, weight: Floats) -> tuple[Floats, tuple[Floats, ...]]:
    """The scales [groups, 16] of the best lines, and the sums 1, x, q, q^2, q x of their quants."""
    one, sx, sxx = _sum(weight), _sum(weight * x), _sum(weight * x * x)
    low, high = np.minimum(x.min(0), F(0)), x.max(0)
    unit = _over(F(1), high - low)
    zero = np.zeros_like(one)
    best: Three = (zero, -low, zero + F(np.finfo(F).max))
    kept: Three = (zero, zero, zero)
    for i in range(26):
        if i < 24:
            found = _sums(x, weight, unit * (F(12) + F(0.17) * F(i)), -low)
        else:
            found = _sums(x, weight, _over(F(1), best[0]), best[1])
        line = _line(one, sx, sxx, *found)
        better = line[2] < best[2]
        best, kept = _chosen(better, line, best), _chosen(better, found, kept)
    return best[0], (one, sx, *kept)


def _chosen(better: npt.NDArray[np.bool_], new: Three, old: Three) -> Three:
    a, b, c = (np.where(better, n, o) for n, o in zip(new, old, strict=True))
    return a, b, c


def _line(one: Floats, sx: Floats, sxx: Floats, q: Floats, qq: Floats, qx: Floats) -> Three:
    """Scale, minimum, error."""
    det = one * qq - q * q
    sound = det > F(1e-5) * one * qq
    a, b = _over(one * qx - sx * q, det), _over(q * qx - qq * sx, det)
    free, level = sound & (a > 0) & (b > 0), ~sound & (sx < 0)
    scale = np.where(free, a, np.where(level, F(0), np.maximum(_over(qx, qq), F(0))))
    least = np.where(free, b, np.where(level, _over(-sx, one), F(0)))
    error = (sxx + scale * scale * qq + least * least * one) + F(2) * (
        (least * sx - scale * qx) - scale * least * q
    )
    return scale, least, error.astype(F)


def _common_unit(target: Floats, curvature: Floats, most: int = 63) -> tuple[Floats, Floats]:
    top = np.maximum(target.max(0), F(0))
    smallest = np.where(top > F(2.0**-25), F(2.0**-24), F(0))
    best, fewest = np.zeros_like(top), np.full_like(top, np.finfo(F).max)
    for steps in range(most, most // 2, -1):
        unit = np.maximum(_as_f16(top / F(steps)), smallest)
        off = target - unit * np.rint(np.minimum(target * _over(F(1), unit), F(most)))
        error = _sum(curvature * off * off)
        better = error < fewest
        best, fewest = np.where(better, unit, best), np.where(better, error, fewest)
    return best, np.rint(np.minimum(target * _over(F(1), best), F(most)))


def _improve(
    x: Floats, weight: Floats, d: Floats, dmin: Floats, sc: Floats, m: Floats
) -> tuple[Floats, Floats, Floats]:
    fewest = np.full_like(sc, np.finfo(F).max)
    sc_best, m_best = sc, m
    for i in range(-2, 3):
        for j in range(max(i - 1, -2), min(i + 1, 2) + 1):
            a, b = np.clip(sc + F(i), F(0), F(63)), np.clip(m + F(j), F(0), F(63))
            scale, least = d * a, dmin * b
            off = (x + least) - _quants(x, _over(F(1), scale), least) * scale
            error = _sum(weight * off * off)
            better = error < fewest
            fewest = np.where(better, error, fewest)
            sc_best, m_best = np.where(better, a, sc_best), np.where(better, b, m_best)
    return sc_best, m_best, _sum(fewest)


def _refit(
    x: Floats, weight: Floats, one: Floats, sx: Floats, d: Floats, dmin: Floats, sc: Floats, m: Floats
) -> tuple[Floats, Floats]:
    q, qq, qx = _sums(x, weight, _over(F(1), d * sc), dmin * m)
    aa, ab, bb = _sum(sc * sc * qq), _sum(sc * m * q), _sum(m * m * one)
    ax, bx = _sum(sc * qx), _sum(m * sx)
    det = aa * bb - ab * ab
    d2, dmin2 = _over(bb * ax - ab * bx, det), _over(ab * ax - aa * bx, det)
    both = (det > F(1e-5) * aa * bb) & (d2 > 0) & (dmin2 > 0)
    alone = (bb <= 0) & (ax > 0)
    new = np.where(both, _as_f16(d2), np.where(alone, _as_f16(_over(ax, aa)), d))
    return new, np.where(both, _as_f16(dmin2), dmin)


# ------------------------------------------------------------------ q6

RUN = 16


def _q6_panel(block: Floats, cols: int, columns: Floats) -> bytes:
    quants, records = b"", b""
    for first in range(0, cols, GROUP * SUPER):
        n = min(cols - first, GROUP * SUPER)
        d, sc, q = q6_super_group(block[:, first : first + n], columns[first : first + n])
        quants += q6_quant_bytes(q)
        records += d.astype("<f2").tobytes() + np.pad(sc, ((0, 2 * SUPER - len(sc)), (0, 0))).tobytes()
    return quants + records + bytes(-len(quants + records) % 64)


def q6_quant_bytes(q: npt.NDArray[np.uint8]) -> bytes:
    """q [runs, 16, 16 rows], each + 32"""
    quads = q.reshape(-1, 4, 4, ROWS)  # run, quad, element, row
    lines = [quads[:, i] | (quads[:, 3] >> 2 * i & 3) << 6 for i in range(3)]
    return np.stack(lines, axis=1).transpose(0, 1, 3, 2).tobytes()


def q6_super_group(x: Floats, columns: Floats) -> tuple[Floats, npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
    """d [16], sc [runs, 16] and q + 32 [runs, 16, 16 rows] for x [16, n]."""
    x, weight, real = _weighted(x, columns)
    runs = 2 * x.shape[1]
    x, weight = (v.transpose(1, 0, 2).reshape(runs, RUN, ROWS).transpose(1, 0, 2) for v in (x, weight))
    low, high = x.min(0), x.max(0)
    turned = high > -low
    x, peak = np.where(turned, -x, x), np.maximum(high, -low)
    best, scale, curvature = (np.zeros_like(peak) for _ in "abc")
    for i in range(-9, 10):
        q = _six(x, _over(F(32) + F(0.1) * F(i), peak))
        qq, qx = _sum(weight * q * q), _sum(weight * q * x)
        found = _over(qx, qq)
        better = found * qx > best
        best, scale = np.where(better, found * qx, best), np.where(better, found, scale)
        curvature = np.where(better, qq, curvature)
    d, sc = _common_unit(scale, curvature, 127)
    quants = _six(x, _over(F(1), d * sc)).transpose(1, 0, 2) * real.reshape(runs, RUN, 1)
    return d, np.where(turned, -sc, sc).astype(np.int8), (quants + F(32)).astype(np.uint8)


def _six(x: Floats, inverse: Floats) -> Floats:
    q: Floats = np.rint(np.clip(x * inverse, F(-32), F(31)))
    return q
