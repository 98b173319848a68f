"""Grids of few codes as panels of q4: the codes of Q4_1 as they are, those of Q2_K among 16 numbers.

Owns: scales and minima of such groups, and what rounding costs. Refuses: what grids.py does.

A group of Q4_1 has what a group of q4 has, but for an f16 scale and minimum of its own. So its codes stay,
and of q4's common units those are taken whose multiples are nearest. A group of Q2_K is two runs of 4 values,
8 values with how often each occurs: a few scales, some of them a / n, are tried on these, with the minimum of
least squares.

Arrays over groups are [8 groups, panels, super-groups, 16 rows], so that what eight groups share is a sum
over the first axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from colibri.convert.gguf.grids import Bytes, Floats, Grid, Words
from colibri.convert.gguf.repack import put_q4
from colibri.quantize import PANEL_ROWS

Shorts = npt.NDArray[np.int16]
Whole = TypeVar("Whole", np.uint16, np.int16, np.uint32)

_SMALL = np.float32(2.0**-14)  # what f16 has below are multiples of 2^-24
_TINY = np.float32(1e-30)  # below every number of a block but 0
_MOST = np.float32(63)  # the largest step
_ZERO, _ONE = np.float32(0), np.float32(1)
_BYTES, _NIBBLES, _BITS, _HALF = (np.uint32(n) for n in (0x01010101, 0x0F0F0F0F, 0x11111111, 0xFFFF))

_UNITS = 16  # that are tried
_POOR = np.float32(0.04**2)  # an error that a search may make smaller, of a super-group

# Q2_K: the unit leaves room for scales so much larger; the finest may leave the largest quant at 15.46.
_ROOM, _TIGHT = np.float32(1.5), np.float32(0.97)
_NEXT = 4  # scales from the finest on that are tried
_WIDE = 1023  # levels are whole numbers from 0 to this while scales are tried


def _eights(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[8, panels, super-groups, 16 rows] of [panels, groups, 16 rows]; groups that do not exist are 0."""
    n, groups, rows = values.shape
    if groups % 8:
        values = np.concatenate([values, np.zeros((n, -groups % 8, rows), values.dtype)], axis=1)
    return np.ascontiguousarray(values.reshape(n, -1, 8, rows).transpose(2, 0, 1, 3))


def _put(out: Bytes, words: Words, units: list[Floats], steps: tuple[Floats, Floats]) -> None:
    """words [panels, 4, groups, 16 rows]; d and dmin; sc and m."""
    numbers = [x for part in steps for x in part.astype(np.uint32)]
    put_q4(out, words.transpose(0, 2, 1, 3), [as_f16(unit) for unit in units], numbers)


# ------------------------------------------------------------------ Q4_1: codes stay


def fill_q4_1(out: Bytes, found: Grid) -> tuple[Floats, Floats]:
    """Squared errors and squares by panel; errors of panels that want a search are infinite."""
    a, b, first, second = map(_eights, (found.a[:, 0], found.b[:, 0], *_moments(found.codes)))
    mean = first * np.float32(1 / 32)
    around = second - first * mean  # sum of squares around the mean
    centre = a * mean
    centre += b
    d = _unit(a, around)
    sc = _steps(a, d)
    dmin = _unit(sc * d * mean - centre)
    best, least = (sc.copy(), np.zeros_like(sc)), np.full_like(a, np.inf)
    for more in (0, -1, 1):
        tried = _bounded(sc + np.full_like(sc, more)) if more else sc
        scale = tried * d
        target = scale * mean
        target -= centre
        m = _steps(target, dmin)
        target -= m * dmin
        target *= target
        scale -= a
        target *= np.float32(32)
        scale *= scale
        scale *= around
        scale += target
        _choose(scale, least, (tried, best[0]), (m, best[1]))
    _put(out, found.codes, [d, dmin], best)
    a *= a
    a *= around
    centre *= centre
    centre *= np.float32(32)
    a += centre
    errors, squares = least.sum(0), a.sum(0)
    poor = (errors > squares * _POOR).any((1, 2))
    by_panel = [x.sum((1, 2), dtype=np.float64) for x in (errors, squares)]
    return np.where(poor, np.inf, by_panel[0]), by_panel[1]


def _moments(codes: Words) -> Iterator[Floats]:
    """Sums of codes and of their squares [panels, groups, 16 rows]."""
    halves = codes.view(np.uint16)
    total, squares = np.zeros_like(halves), np.zeros_like(halves)
    for shift in (0, 4, 8, 12):
        q = halves >> np.uint16(shift)
        q &= np.uint16(15)
        total += q
        q *= q
        squares += q
    for part in (total, squares):
        pairs = _sum(part, 1).view(np.uint32)
        yield ((pairs & _HALF) + (pairs >> np.uint32(16))).astype(np.float32)


def _sum(parts: npt.NDArray[Whole], axis: int) -> npt.NDArray[Whole]:
    """Of 4 or 8 whole numbers, by halves; `parts` is used up. numpy's own sum takes longer."""
    parts = np.moveaxis(parts, axis, 0)
    while len(parts) > 1:
        half = len(parts) // 2
        parts[:half] += parts[half:]
        parts = parts[:half]
    return np.ascontiguousarray(parts[0])


def _unit(targets: Floats, weights: Floats | None = None) -> Floats:
    """[panels, super-groups, 16 rows]: units whose multiples come nearest to the targets of eight groups."""
    top = np.maximum(targets.max(0), _ZERO)
    shares = targets * (_ONE / np.maximum(top, _TINY))
    best, least = np.full_like(top, 63), np.full_like(top, np.inf)
    for steps in range(63, 63 - _UNITS, -1):
        off = shares * np.float32(steps)
        off -= np.rint(off)
        off *= off
        if weights is not None:
            off *= weights
        error = off.sum(0)
        error *= np.float32(1 / steps**2)
        _choose(error, least, (np.full_like(best, steps), best))
    return above(top / best)


def _steps(targets: Floats, unit: Floats) -> Floats:
    """Targets as multiples of a unit."""
    steps: Floats = np.multiply(targets, _ONE / np.maximum(unit, _TINY), dtype=np.float32)
    np.rint(steps, out=steps)
    return _bounded(steps)


def _bounded(steps: Floats) -> Floats:
    """`steps` from 0 to 63, in place. numpy takes four times as long with a number for a bound."""
    np.maximum(steps, np.zeros_like(steps), out=steps)
    return np.minimum(steps, np.full_like(steps, _MOST), out=steps)


def _choose(error: Floats, least: Floats, *choices: tuple[Floats, Floats]) -> None:
    """Where the error is less than the least: puts it there, and the first of each choice into the second.
    np.where and masks take two to ten times as long."""
    less = np.subtract(error, least).view(np.int32)
    less >>= np.int32(31)  # all bits of numbers below 0
    for one, other in choices:
        into = other.view(np.int32)
        changed = into ^ one.view(np.int32)
        changed &= less
        into ^= changed
    np.minimum(least, error, out=least)


# ------------------------------------------------------------------ Q2_K: 8 values, each so many times


def fill_q2_k(out: Bytes, found: Grid) -> tuple[Floats, Floats]:
    """Squared errors and squares by panel."""
    n, _, groups, _ = found.codes.shape
    ones: Words = found.codes & _BITS
    twos: Words = found.codes >> np.uint32(1) & _BITS
    both: Words = ones & twos
    counts = _counts(ones, twos, both)
    a, b = (np.stack([_eights(x[:, run]) for run in (0, 1)]) for x in (found.a, found.b))
    levels = np.stack([b, b + a, b + 2 * a, b + 3 * a])
    units, (sc, m) = _scales(a, levels, counts)
    scale, shift = sc * units[0], m * units[1]
    scale += scale == 0
    exact = levels + shift
    quants = np.rint(exact * (_ONE / scale)).astype(np.int8)
    for bound, of in ((0, np.maximum), (15, np.minimum)):
        of(quants, np.full_like(quants, bound), out=quants)  # numpy is slow with a number
    exact -= quants * scale
    both_runs = (quants[:, 0] | quants[:, 1] << 4).view(np.uint8)
    numbers = both_runs.astype(np.uint32) * _BYTES
    numbers = numbers.transpose(0, 2, 3, 1, 4).reshape(4, n, 1, -1, PANEL_ROWS)[:, :, :, :groups]
    zero, one, two, three = numbers
    words = zero ^ (ones * 15 & (zero ^ one))
    words ^= twos * 15 & (zero ^ two)
    words ^= both * 15 & (zero ^ one ^ two ^ three)
    _put(out, words, units, (sc, m))
    weights = counts.astype(np.float32)
    errors, squares = (np.array([np.vdot(x, x * weights)], np.float32) for x in (exact, levels))
    return errors, squares


def _counts(*parts: Words) -> Shorts:
    """How often each run has each level [4, 2 runs, 8, panels, super-groups, 16 rows], from words with a bit
    in every nibble: of odd codes, of codes from 2 on, of 3."""
    sums = []
    for part in parts:
        four = _sum(part.copy(), 1)
        runs = [(four >> shift & _NIBBLES) * _BYTES >> 24 for shift in (0, 4)]
        sums.append(np.stack([_eights(run.astype(np.int16)) for run in runs]))
    odds, uppers, threes = sums
    return np.stack([16 - odds - uppers + threes, odds - threes, uppers - threes, threes])


def _scales(a: Floats, levels: Floats, counts: Shorts) -> tuple[list[Floats], tuple[Floats, Floats]]:
    """d and dmin [panels, super-groups, 16 rows], sc and m [8, panels, super-groups, 16 rows]."""
    absent = (counts == 0) * np.float32(1e30)
    depth = np.maximum(-(levels + absent).min((0, 1)), _ZERO)
    span = (levels - absent).max((0, 1)) + depth
    units = [above(x.max(0) * by) for x, by in ((span, _ROOM / (15 * _MOST)), (depth, _ONE / 61))]
    d, dmin = (np.maximum(unit, _TINY) for unit in units)
    finest = np.maximum(np.ceil(span * _TIGHT / (15 * d)), 1)
    fine = _WIDE / np.maximum(span, _TINY)
    whole = _whole((levels + depth) * fine)
    times = counts.reshape(whole.shape)
    fine = 65536 / fine
    per_unit = _ONE / dmin
    best, least = finest.copy(), np.full_like(span, np.inf)
    for sc in _tried(np.abs(a), finest, d):
        scale = sc * d
        mean, square = _off(whole, times, fine / scale)
        off = mean * mean
        off *= np.float32(32)
        square -= off
        square *= scale
        mean *= scale
        np.subtract(depth, mean, out=off)
        off *= per_unit
        off -= np.rint(off)
        off *= dmin
        off *= off
        off *= np.float32(32)
        square *= scale
        square += off
        _choose(square, least, (sc, best))
    scale = best * d
    m = _steps(depth - _off(whole, times, fine / scale)[0] * scale, units[1])
    best *= units[0] > 0  # none for rows that do not exist
    return units, (best, m)


def _whole(levels: Floats) -> Shorts:
    """Levels in whole numbers up to _WIDE [8 of two runs, 8, panels, super-groups, 16 rows]."""
    np.maximum(levels, np.zeros_like(levels), out=levels)  # those that are absent may be anything
    np.minimum(levels, np.full_like(levels, _WIDE), out=levels)
    return np.rint(levels, out=levels).astype(np.int16).reshape(8, *levels.shape[2:])


def _off(whole: Shorts, times: Shorts, ratio: Floats) -> tuple[Floats, Floats]:
    """Mean, and sum of squares, of what is left of numbers when they are rounded. They are `ratio` 65536ths
    for each of `whole`; 16 bits have room for what is left and no more."""
    off = whole * np.rint(ratio).astype(np.int16)
    off >>= np.int16(10)  # 64ths
    weighted = off * times
    off *= weighted
    mean = _sum(weighted, 0).astype(np.float32)
    mean *= np.float32(1 / (64 * 32))
    square = _sum(off, 0).view(np.uint16).astype(np.float32)
    square *= np.float32(1 / 64**2)
    return mean, square


def above(values: Floats) -> Floats:
    """The next larger numbers of f16, of values from 0 on. numpy's own conversion takes a hundred times as
    long where f16 has few bits."""
    normal = (values.view(np.uint32) + np.uint32(0x1FFF) & ~np.uint32(0x1FFF)).view(np.float32)
    small = np.minimum(values, _SMALL)
    return np.maximum(normal, np.ceil(small * np.float32(2.0**24)) * np.float32(2.0**-24))


def as_f16(values: Floats) -> npt.NDArray[np.float16]:
    """Numbers that f16 has, from 0 on, as f16."""
    normal = (values.view(np.uint32) >> 13) - np.uint32(112 << 10)
    small = (np.minimum(values, _SMALL) * np.float32(2.0**24)).astype(np.uint32)
    is_small = (values < _SMALL).astype(np.uint32)
    return (normal + (small - normal) * is_small).astype(np.uint16).view(np.float16)


def _tried(a: Floats, finest: Floats, d: Floats) -> Iterator[Floats]:
    """Steps: near a / n of both runs, and from the finest on."""
    one, most = np.ones_like(finest), np.full_like(finest, _MOST)
    per_unit = finest * d
    for run in (a.max(0), a.min(0)):
        whole = np.floor(run / per_unit)
        for _ in range(2):
            sc = np.maximum(whole, one)
            sc *= d
            np.divide(run, sc, out=sc)
            np.rint(sc, out=sc)
            np.maximum(sc, finest, out=sc)
            yield np.minimum(sc, most, out=sc)
            whole -= one
    for more in range(_NEXT):
        yield np.minimum(finest + np.float32(more), most)
