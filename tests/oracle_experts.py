"""Experts of a checkpoint that share tensors, taken apart for the oracle.

Role: the spelling of gpt_oss, plain or MXFP4, to one matrix and one bias per expert, as oracle.py names
      them.
Owns: what an MXFP4 number is worth, written down from the specification (OCP MX 1.0).
Refuses: importing colibri.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_SHARED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(_bias|_blocks)?")


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def mxfp4(blocks: Float32, scales: Float32) -> Float32:
    """blocks [..., groups, 16] of two numbers each, the first in the low half; scales [..., groups]."""
    pairs = blocks.astype(np.int64)
    codes = np.stack([pairs % 16, pairs // 16], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.vectorize(e2m1)(codes) * np.exp2(scales.astype(np.float64) - 127)[..., None]
    widened: Float32 = values.reshape(*blocks.shape[:-2], -1).astype(np.float32)
    return widened


def separate(found: dict[str, Float32]) -> dict[str, Float32]:
    """Tensors by name, as they are but for the shared ones: experts.E.gate_proj.weight and so on."""
    apart: dict[str, Float32] = {}
    for name, value in found.items():
        match = _SHARED.fullmatch(name)
        if match is None:
            if not name.endswith("_scales"):
                apart[name] = value
            continue
        if match[3] == "_blocks":  # [experts, rows, groups, 16]
            value = mxfp4(value, found[name.replace("_blocks", "_scales")])
        elif match[3] is None:  # [experts, cols, rows]
            value = value.swapaxes(1, 2)
        kind = "bias" if match[3] == "_bias" else "weight"
        for expert, rows in enumerate(value):
            at = f"{match[1]}{expert}."
            parts = {"gate": rows[0::2], "up": rows[1::2]} if match[2] == "gate_up" else {"down": rows}
            apart |= {f"{at}{part}_proj.{kind}": np.ascontiguousarray(one) for part, one in parts.items()}
    return apart


def scaled(tensors: dict[str, Float32], block: tuple[int, int]) -> dict[str, Float32]:
    """FP8 matrices times the scale of each number's block. Scales stay no tensors of their own."""
    found = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name, value in found.items():
        if (scales := tensors.get(name + "_scale_inv")) is not None:
            rows, cols = (np.arange(size) // part for size, part in zip(value.shape[-2:], block, strict=True))
            found[name] = value * scales[..., rows[:, None], cols]
    return found
