"""Bytes of the panels that the kernels read, from rows of floats and back (docs/FORMAT.md, section 4).

Owns: the order of bytes in every weight type, and the rounding of q8 and bf16. The search for the scales of
q4 and q6 is the library's. Refuses: nothing; `quantize` has looked at the values before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from colibri import _native

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

ROWS = 16  # of a panel
GROUP = 32  # elements along k that share a scale
SUPER = 8  # groups of q4 and q6 that share their f16 units
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_LARGEST = 252  # the largest scale: 6 x 2^(252 - 127) is below the largest f32; 255 stands for NaN
_COLS = GROUP * SUPER
_Q4_BYTES = 256  # of a group's quants, and of a super-group's scales
_Q6_BYTES, _Q6_RECORD = 384, 288  # the same of q6
_Q8_ZERO = 128  # the byte of q = 0
_NORMAL_F16 = np.float32(2.0**-14)
# Added to a small float it leaves no fraction bits: the sum rounds to nearest even, into its low byte.
_TO_BYTE = np.float32(1.5 * 2**23 + _Q8_ZERO)


def fill(panels: Bytes, block: Floats, type: str, columns: Floats | None) -> None:
    """Packs float32 `block` [rows, cols] into panels [ceil(rows / 16), bytes of a panel].

    columns [cols]: what a squared error in each costs, for q4 and q6.
    """
    rows, cols = block.shape
    unit = {"f32": 1, "bf16": 2, "q8": GROUP}.get(type, _COLS)
    padded = np.zeros((len(panels), ROWS, -(-cols // unit) * unit), np.float32)
    padded.reshape(len(panels) * ROWS, -1)[:rows, :cols] = block
    if type == "f32":
        panels.view("<f4").reshape(len(panels), cols, ROWS)[...] = padded.transpose(0, 2, 1)
    elif type == "bf16":
        bits = padded.view(np.uint32)
        pairs = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view("<u4")
        panels.view("<u4").reshape(len(panels), -1, ROWS)[...] = pairs.transpose(0, 2, 1)
    elif type == "q8":
        _fill_q8(panels, padded.reshape(len(panels), ROWS, -1, GROUP))
    else:
        _fill_searched(panels, padded, type, cols, np.ones(cols, np.float32) if columns is None else columns)


def _fill_q8(panels: Bytes, x: Floats) -> None:
    """x [panels, 16, groups, 32]"""
    n, groups = len(x), x.shape[2]
    scale = (np.abs(x).max(-1) * np.float32(1 / 127)).astype("<f2")
    divisor = scale.astype(np.float32)
    divisor[divisor == 0] = np.inf  # a scale that rounds to 0 gives quants 0
    q = x / divisor[..., None]
    if (divisor < _NORMAL_F16).any():  # subnormal scales are coarse: a quotient may pass 127
        np.clip(q, -127, 127, out=q)
    q += _TO_BYTE
    quads = q.view(np.uint32).astype(np.uint8).view("<u4").reshape(n, ROWS, -1)
    at = GROUP * ROWS * groups
    panels[:, :at].view("<u4").reshape(n, -1, ROWS)[...] = quads.transpose(0, 2, 1)
    panels[:, at : at + 2 * ROWS * groups].view("<f2").reshape(n, -1, ROWS)[...] = scale.transpose(0, 2, 1)
    panels[:, at + 2 * ROWS * groups :] = 0


def _fill_searched(panels: Bytes, padded: Floats, type: str, cols: int, columns: Floats) -> None:
    """padded [panels, 16, whole super-groups x 256]"""
    n, groups, supers = len(panels), -(-cols // GROUP), -(-cols // _COLS)
    padded[..., cols:] = padded[..., cols - 1 : cols]  # their errors cost nothing, and no range grows by them
    x = np.ascontiguousarray(
        padded.reshape(n * ROWS, supers, _COLS).transpose(2, 1, 0)
    )  # [256, supers, rows]
    costs = _costs(x, cols, columns)
    turned = np.ones((2 * SUPER, supers, n * ROWS), np.float32)
    if type == "q6":
        runs = x.reshape(2 * SUPER, -1, supers, n * ROWS)
        turned[runs.max(1) > -runs.min(1)] = -1
        runs *= turned[:, None]
    units, steps, quants = _native.quantize(5 if type == "q4" else 6, x, costs)
    quants[cols - (supers - 1) * _COLS :, -1] = 0 if type == "q4" else 32  # elements that do not exist
    units = units.astype("<f2").reshape(2, supers, n, ROWS).transpose(2, 1, 0, 3)  # [n, supers, 2, row]
    if type == "q4":
        nibbles = quants.reshape(SUPER, 2, 4, 4, supers, n, ROWS)  # group, half, quad, element
        lines = nibbles[:, 0] | nibbles[:, 1] << 4
        numbers = steps.reshape(16, supers, n, ROWS).astype("<u4")
        words = [
            sum(numbers[5 * w + i] << 6 * i for i in range(5)) | numbers[15] >> 2 * w << 30 for w in range(3)
        ]
        records = [units, np.stack(words).transpose(2, 1, 0, 3)]
    else:
        quads = quants.reshape(2 * SUPER, 4, 4, supers, n, ROWS)  # run, quad, element
        lines = np.stack([quads[:, i] | (quads[:, 3] >> 2 * i & 3) << 6 for i in range(3)], axis=1)
        signed = (steps * turned).astype(np.int8).reshape(16, supers, n, ROWS)
        records = [units[:, :, 0], signed.transpose(2, 1, 0, 3)]
    lines = lines.transpose(4, 3, 0, 1, 5, 2).reshape(n, -1)  # [n, supers x group, quad, row, element]
    at = groups * (_Q4_BYTES if type == "q4" else _Q6_BYTES)
    panels[:, :at] = lines[:, :at]
    record = np.concatenate(
        [np.ascontiguousarray(r).view(np.uint8).reshape(n, supers, -1) for r in records], axis=2
    )
    panels[:, at : at + record[0].size] = record.reshape(n, -1)
    panels[:, at + record[0].size :] = 0


def _costs(x: Floats, cols: int, columns: Floats) -> Floats:
    """What squared errors in x [256, supers, rows] cost: by the importance of columns, sizes of groups and,
    less, their own. The scale is arbitrary: sizes in a super-group add up to 1."""
    supers = x.shape[1]
    real = np.arange(supers * _COLS).reshape(supers, SUPER, GROUP) < cols
    costs = np.abs(x)
    costs[cols - (supers - 1) * _COLS :, -1] = 0
    total = costs.sum(0)
    counts = np.maximum(real.sum(2), 1).astype(np.float32).T[..., None]
    groups = costs.reshape(SUPER, GROUP, supers, -1)
    groups += (np.float32(2.5) * groups.sum(1) / counts)[:, None]
    costs *= np.float32(1) / np.where(total > 1e-30, total, np.float32(np.inf))
    importance = np.zeros(supers * _COLS, np.float32)
    importance[:cols] = columns
    costs *= importance.reshape(supers, _COLS).T[..., None]
    return costs


def read(panels: Bytes, cols: int, type: str) -> Floats:
    """float32 [16 x panels, cols or more] of panels [panels, bytes of a panel]."""
    n, groups = len(panels), -(-cols // GROUP)
    if type == "f32":
        return panels.view("<f4").reshape(n, cols, ROWS).transpose(0, 2, 1).reshape(-1, cols)
    if type == "bf16":
        pairs = panels.view("<u2").reshape(n, -1, ROWS, 2).transpose(0, 2, 1, 3)
        bits = pairs.reshape(n * ROWS, -1).astype(np.uint32) << 16
        return bits.view(np.float32)
    if type == "q8":
        return _read_q8(panels, groups)
    return {"q6": _read_q6, "q4": _read_q4, "mxfp4": _read_mxfp4}[type](panels, groups)


def _read_q8(panels: Bytes, groups: int) -> Floats:
    n, at = len(panels), GROUP * ROWS * groups
    quants = panels[:, :at].reshape(n, groups, GROUP // 4, ROWS, 4)
    q = quants.transpose(0, 3, 1, 2, 4).astype(np.float32) - _Q8_ZERO
    scales = np.ascontiguousarray(panels[:, at : at + 2 * ROWS * groups]).view("<f2")
    s = scales.reshape(n, groups, ROWS).transpose(0, 2, 1).astype(np.float32)
    values: Floats = (q * s[..., None, None]).reshape(n * ROWS, -1)
    return values


def _read_q4(panels: Bytes, groups: int) -> Floats:
    """q x (d x sc) - (dmin x m), float32 [rows, groups x 32]; products are exact."""
    n = panels.shape[0]
    q = _nibbles(panels, groups).astype(np.float32)
    records = panels[:, _Q4_BYTES * groups :].reshape(n, -1, _Q4_BYTES)
    units = np.ascontiguousarray(records[..., :64]).view("<f2").astype(np.float32)
    units = units.reshape(n, -1, 2, ROWS)  # d, dmin
    words = np.ascontiguousarray(records[..., 64:]).view("<u4").reshape(n, -1, 3, ROWS)
    steps = [words[:, :, i // 5] >> 6 * (i % 5) & 63 for i in range(15)]
    steps.append(words[:, :, 0] >> 30 | words[:, :, 1] >> 30 << 2 | words[:, :, 2] >> 30 << 4)
    scales = np.stack(steps, axis=-1).astype(np.float32).reshape(n, -1, ROWS, 2, SUPER)
    scales *= units.transpose(0, 1, 3, 2)[..., None]
    scale, least = scales.transpose(3, 0, 2, 1, 4).reshape(2, n, ROWS, -1)[..., :groups]
    values: Floats = (q * scale[..., None] - least[..., None]).reshape(n * ROWS, -1)
    return values


def _read_mxfp4(panels: Bytes, groups: int) -> Floats:
    """4-bit floats x 2^(scale - 127), float32 [rows, groups x 32], exact."""
    n = panels.shape[0]
    values = np.array(MXFP4_VALUES, np.float32)[_nibbles(panels, groups)]
    scales = panels[:, _Q4_BYTES * groups :].reshape(n, -1, ROWS, 4).transpose(0, 2, 1, 3)
    exponents = scales.reshape(n, ROWS, -1)[..., :groups, None].astype(np.int32) - 127
    return np.ldexp(values, exponents).reshape(n * ROWS, -1)


def _nibbles(panels: Bytes, groups: int) -> Bytes:
    """[panels, 16 rows, groups, 32 elements], each 0 to 15."""
    n = panels.shape[0]
    bytes_of = panels[:, : _Q4_BYTES * groups].reshape(n, groups, 4, ROWS, 4)
    q = np.stack([bytes_of & 15, bytes_of >> 4], axis=2)  # [n, group, half, quad, row, element of the quad]
    return q.transpose(0, 4, 1, 2, 3, 5).reshape(n, ROWS, groups, GROUP)


def _read_q6(panels: Bytes, groups: int) -> Floats:
    """q x (d x sc), float32 [rows, groups x 32]; products are exact."""
    n, supers = panels.shape[0], -(-groups // SUPER)
    lines = panels[:, : _Q6_BYTES * groups].reshape(n, groups * 2, 3, ROWS, 4)
    upper = lines[:, :, 0] >> 6 | lines[:, :, 1] >> 6 << 2 | lines[:, :, 2] >> 6 << 4
    q = np.concatenate([lines & 63, upper[:, :, None]], axis=2)  # [n, run of 16, quad, row, element]
    q = q.transpose(0, 3, 1, 2, 4).reshape(n, ROWS, groups * 2, GROUP // 2).astype(np.float32) - 32
    records = panels[:, _Q6_BYTES * groups :][:, : _Q6_RECORD * supers].reshape(n, supers, _Q6_RECORD)
    units = np.ascontiguousarray(records[..., :32]).view("<f2").astype(np.float32)  # [n, super-group, row]
    steps = np.ascontiguousarray(records[..., 32:]).view(np.int8).reshape(n, supers, 2 * SUPER, ROWS)
    scale = (units[:, :, None] * steps).transpose(0, 3, 1, 2).reshape(n, ROWS, -1)[..., : groups * 2]
    values: Floats = (q * scale[..., None]).reshape(n * ROWS, -1)
    return values
