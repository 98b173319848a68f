"""RoPE settings of GGUF keys and tensors as those of a config.json.

Owns: rope.scaling.* and the tensors with a factor for each frequency. Refuses: types and settings that are
not known, by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.convert.gguf.container import GgufFile
from colibri.convert.gguf.metadata import Metadata, tenfold
from colibri.errors import ConversionError

FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_MOST_FREQUENCIES = 1 << 16
_ENDLESS = 1e30  # a factor that leaves nothing of a frequency


def read_rotation(metadata: Metadata, head_dim: int | None, by_mscale: bool) -> dict[str, Any]:
    """rope_parameters. `head_dim`: of which rope.dimension_count is a share; None: it has a key of its own.
    `by_mscale`: an architecture whose yarn_log_multiplier scales attention."""
    settings: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 1e4), "rope_type": "default"}
    if head_dim is not None:
        settings["partial_rotary_factor"] = _share(metadata, head_dim)
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0)) or 1.0
    if kind == "longrope" or metadata.has(LONG) or metadata.has(SHORT):
        return settings | _longrope(metadata)
    if kind == "yarn" and factor != 1:
        return settings | _yarn(metadata, factor, by_mscale)
    metadata.get("rope.scaling.original_context_length")
    metadata.require("rope.scaling.attn_factor", (1,))
    for name in ("ext_factor", "log_multiplier", "attn_factor", "beta_fast", "beta_slow"):
        metadata.get(f"rope.scaling.yarn_{name}")  # of a scaling that is not there
    if kind not in ("none", "linear", "yarn"):
        raise metadata.error("rope.scaling.type", "none, linear, yarn or longrope")
    return settings | ({"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {})


def _share(metadata: Metadata, head_dim: int) -> float:
    """The part of a head that rope.dimension_count is."""
    count = metadata.get("rope.dimension_count")
    if count is None:
        return 1.0
    rotated = metadata.integer("rope.dimension_count", 2)
    if rotated > head_dim:
        raise metadata.error("rope.dimension_count", f"at most the width of a head, {head_dim}")
    return _quotient(rotated, head_dim)


def _quotient(part: int, whole: int) -> float:
    """Such that the product with `whole`, cut to an integer, is `part` again."""
    share = part / whole
    return share if int(share * whole) == part else math.nextafter(share, 1.0)


def still(metadata: Metadata, head_dim: int) -> float:
    """The share of a head that rotates where factors are 1 for its frequencies and endless for the others."""
    factors = read_vector(metadata.gguf, FREQS) if metadata.has(FREQS) else np.zeros(0, np.float32)
    count = int((factors == 1).sum())
    if len(factors) != head_dim // 2 or not count or not (factors[count:] >= _ENDLESS).all():
        found = f"{len(factors)} numbers, {factors[:64].tolist()!r:.80}" if len(factors) else "absent"
        raise ConversionError(
            f"{metadata.gguf.path}: {FREQS} is {found}; expected {head_dim // 2} factors, 1 for each "
            f"frequency that rotates and then {_ENDLESS:g}. Other factors are not supported here."
        )
    return _quotient(2 * count, head_dim)


def _longrope(metadata: Metadata) -> dict[str, Any]:
    """The factors are tensors; the scale is a key, where config.json has it or a formula."""
    factors = {}
    for name, tensor in (("long_factor", LONG), ("short_factor", SHORT)):
        if not metadata.has(tensor):
            raise metadata.error("rope.scaling.type", f"another type, since the file has no {tensor}")
        factors[name] = [float(one) for one in read_vector(metadata.gguf, tensor)]
    original = metadata.integer("rope.scaling.original_context_length", 2)
    metadata.get("rope.scaling.factor")  # follows from the lengths
    return factors | {
        "rope_type": "longrope",
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }


def _yarn(metadata: Metadata, factor: float, by_mscale: bool) -> dict[str, Any]:
    """yarn_log_multiplier is a tenth of mscale_all_dim. Files do not say mscale, the same number in every
    released model; so cos and sin have no scale."""
    metadata.require("rope.scaling.attn_factor", (1,))
    metadata.require("rope.scaling.yarn_ext_factor", (1,))
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),
    ):
        value = metadata.get(f"rope.scaling.{key}")
        if value is not None:
            settings[name] = value
    if not by_mscale:
        metadata.require("rope.scaling.yarn_log_multiplier", (0,))
    elif tenth := metadata.number("rope.scaling.yarn_log_multiplier", 0.0):
        settings["mscale"] = settings["mscale_all_dim"] = tenfold(tenth)
    return settings


def read_vector(gguf: GgufFile, name: str) -> npt.NDArray[np.float32]:
    """The numbers of a small tensor that conversion needs before it reads the others."""
    tensor = gguf.tensors[name]
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FREQUENCIES:
        raise ConversionError(
            f"{name} in {tensor.file} is {tensor.dtype} of shape {list(tensor.shape)}; expected a vector of "
            f"at most {_MOST_FREQUENCIES} numbers in F32."
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset or 0)
        data = stream.read(4 * tensor.shape[0])
    numbers = np.frombuffer(data, "<f4")
    if len(numbers) != tensor.shape[0] or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ConversionError(f"{name} in {tensor.file} must hold numbers above 0. Download the file again.")
    return numbers
