"""Tiny checkpoints in FP8: a copy of another one whose matrices are stored in 8 bits beside scales.

Owns: the names and shapes of scales in public use, and what such a matrix is worth, by the plain formula.
Refuses: choosing good scales; any will do.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

import checkpoints

Array = npt.NDArray[Any]
Form = str | tuple[int, int]
CODES: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SCALES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# How the scale of NAME.weight, or of a stack NAME, is called.
NAMES: dict[str, Callable[[str], str]] = {
    "weight_scale_inv": lambda name: name + "_scale_inv",
    "weight_scale": lambda name: name + "_scale",
    "stack.weight_scale": lambda name: name + ("_scale" if name.endswith(".weight") else ".weight_scale"),
    "scale_inv": lambda name: name.removesuffix(".weight") + ".scale_inv",
    "scale": lambda name: name.removesuffix(".weight") + ".scale",
    "qscale_weight": lambda name: name.removesuffix(".weight") + ".qscale_weight",
}


def to_fp8(
    source: Path,
    out: Path,
    form: Form = (128, 128),
    *,
    settings: Mapping[str, Any] | None = None,
    naming: str = "weight_scale_inv",
    code: str = "e4m3",
    scale: str = "f32",
    short: bool = False,
    seed: int = 3,
) -> Path:
    """Writes `out`, the checkpoint in FP8, and beside it `out`-plain, the same numbers in f32.

    form: "tensor", "channel" (outputs) or rows and columns of a block. settings: quantization_config.
    short: scales of one number less axes, as some writers have them.
    """
    plain = out.with_name(out.name + "-plain")
    for directory in (out, plain):
        shutil.copytree(source, directory)
        for file in directory.glob("*.safetensors*"):
            file.unlink()
    stored: dict[str, Array] = {}
    worth: dict[str, Array] = {}
    for name, value in checkpoints.read_tensors(source).items():
        stored[name] = worth[name] = value
        if not is_quantised(name, value):
            continue
        random = np.random.default_rng([seed, len(name)])
        grid = grid_of(value.shape, form, transposed=False)
        scales = np.exp2(random.uniform(-9, -6, grid)).astype(np.float32)
        scales = kept(scales, scale)
        full = spread(scales, value.shape, form)
        codes = np.clip(value / full, -400, 400).astype(CODES[code])
        stored[name], worth[name] = codes, codes.astype(np.float32) * full
        stored[NAMES[naming](name)] = written(scales, scale, short)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    save_file(worth, plain / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_json(out / "config.json", {"quantization_config": settings})
    return out


def is_quantised(name: str, value: Array) -> bool:
    """Matrices of the layers but for routers, as released checkpoints have it."""
    router = name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight"))
    return ".layers." in name and value.ndim > 1 and not router


def grid_of(shape: tuple[int, ...], form: Form, transposed: bool) -> tuple[int, ...]:
    """Scales of a tensor [(experts,) rows, cols]; one number for all experts if form is "all"."""
    *lead, rows, cols = shape
    if form == "all":
        return (1, 1)
    if form == "tensor":
        return (*lead, 1, 1)
    if form == "channel":
        return (*lead, 1, cols) if transposed else (*lead, rows, 1)
    assert isinstance(form, tuple)
    return (*lead, -(-rows // form[0]), -(-cols // form[1]))


def spread(scales: npt.NDArray[np.float32], shape: tuple[int, ...], form: Form) -> npt.NDArray[np.float32]:
    """A scale for each number: element [i, j] has that of block [i // rows, j // cols]."""
    if not isinstance(form, tuple):
        return np.broadcast_to(scales, shape)
    rows, cols = np.arange(shape[-2]) // form[0], np.arange(shape[-1]) // form[1]
    return np.asarray(scales[..., rows[:, None], cols[None, :]])


def kept(scales: npt.NDArray[np.float32], scale: str) -> npt.NDArray[np.float32]:
    """As the dtype of the scales has them; e8m0 has powers of two alone."""
    if scale in ("e8m0", "u8"):
        return np.asarray(np.exp2(np.round(np.log2(scales))), np.float32)
    return np.asarray(scales.astype(SCALES[scale]).astype(np.float32))


def written(scales: npt.NDArray[np.float32], scale: str, short: bool) -> Array:
    if short:
        scales = scales.reshape(()) if scales.size == 1 else scales.reshape(scales.shape[:-1])
    if scale == "e8m0":
        return scales.astype(ml_dtypes.float8_e8m0fnu)
    if scale == "u8":
        return np.asarray(np.log2(scales) + 127, np.uint8)
    return np.asarray(scales.astype(SCALES[scale]))
