"""RoPE settings of config.json to the vector of inverse frequencies that the engine multiplies positions
with.

Owns: where rope_theta and the scaling may stand, the types default, linear, llama3 and yarn.
Refuses: every other type, partial rotation in families that have none, and every unknown setting, by name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.convert.keys import Keys
from colibri.errors import ConversionError

Floats = npt.NDArray[np.float32]

_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
# Read from any type, or without effect on any of them.
_ALWAYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)


class Rope(NamedTuple):
    dim: int  # elements of a head that are rotated
    inv_freq: Floats  # [dim / 2]
    scale: float = 1.0  # multiplies cos and sin
    all_dim_scale: float = 1.0  # latent attention multiplies its softmax scale by the square


def read_rope(
    keys: Keys, head_dim: int, context_length: int, default_theta: float, share: float | None = None
) -> Rope:
    """Settings inside the dictionary win over those at the top level. `share` of a head that is rotated is
    the family's default, None where its reference implementation ignores the setting."""
    top_theta = keys.number("rope_theta", default_theta) if _top_theta_counts(keys) else default_theta
    settings = _settings(keys)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _SETTINGS or settings.get("type", kind) != kind:
        raise _error(keys, "rope_type", kind, f"one of {', '.join(_SETTINGS)}")
    unknown = [
        name
        for name, value in settings.items()
        if name not in _ALWAYS + _SETTINGS[kind] and value is not None and (name, value) != ("factor", 1.0)
    ]
    if unknown:
        known = ", ".join(_ALWAYS + _SETTINGS[kind])
        raise _error(keys, f"setting {unknown[0]!r}", settings[unknown[0]], f"for type {kind!r} only {known}")
    theta = _positive(keys, settings, "rope_theta", top_theta)
    top_share = keys.raw("partial_rotary_factor", share)
    found_share = _positive(keys, settings, "partial_rotary_factor", 1.0 if top_share is None else top_share)
    if share is None and found_share != 1:  # which one is meant?
        wanted = "1 or none: this family rotates the whole head"
        raise _error(keys, "partial_rotary_factor", found_share, wanted)
    rope_dim = int(head_dim * found_share)
    if rope_dim % 2 or not 0 < rope_dim <= head_dim:
        raise ConversionError(
            f"{keys.path}: {rope_dim} elements of head_dim {head_dim} rotate; RoPE expects an even number."
        )
    inv_freq = _base_frequencies(theta, rope_dim)
    if kind == "linear":
        inv_freq /= np.float32(_positive(keys, settings, "factor"))
    elif kind == "llama3":
        inv_freq = _llama3(keys, settings, inv_freq, context_length)
    elif kind == "yarn":
        slowed = _yarn(keys, settings, theta, inv_freq, context_length)
        return Rope(rope_dim, slowed, *_yarn_scales(keys, settings))
    return Rope(rope_dim, inv_freq)


def _top_theta_counts(keys: Keys) -> bool:
    """An absent or null rope_theta at the top is no default that was used if the dictionary has one."""
    value = keys.raw("rope_theta")
    return value is not None or not any(
        isinstance(found := keys.values.get(name), dict) and found.get("rope_theta") is not None
        for name in ("rope_parameters", "rope_scaling")
    )


def _settings(keys: Keys) -> dict[str, Any]:
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        value = keys.raw(name)
        if value is not None and not isinstance(value, dict):
            raise keys.error(name, "an object or null")
        if value:
            found.append(value)
    if len(found) == 2 and found[0] != found[1]:
        raise keys.error("rope_scaling", "the same as rope_parameters where both are given")
    return dict(found[0]) if found else {}


def _base_frequencies(theta: float, rope_dim: int) -> Floats:
    """theta^(-i/rope_dim) for even i; float32 steps as in Transformers, the power rounded once from float64
    so that every machine gets the same bits."""
    exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    powers: Floats = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    inverse: Floats = np.float32(1) / powers
    return inverse


def _llama3(keys: Keys, settings: dict[str, Any], inv_freq: Floats, context_length: int) -> Floats:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between blended."""
    factor = _positive(keys, settings, "factor")
    low, high = _positive(keys, settings, "low_freq_factor"), _positive(keys, settings, "high_freq_factor")
    if low > high:
        raise _error(keys, "low_freq_factor", low, f"at most high_freq_factor {high:g}")
    old = _original_length(keys, settings, context_length)
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > np.float32(old / low), inv_freq / np.float32(factor), inv_freq)
    if low == high:  # nothing lies between
        return slowed
    smooth = (np.float32(old) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * slowed / np.float32(factor) + smooth * slowed
    between = (wavelength >= np.float32(old / high)) & (wavelength <= np.float32(old / low))
    result: Floats = np.where(between, blended, slowed).astype(np.float32)
    return result


def _yarn(
    keys: Keys, settings: dict[str, Any], theta: float, inv_freq: Floats, context_length: int
) -> Floats:
    """Waves that turn beta_fast times or more within the original length keep their frequency, those that
    turn beta_slow times or less are slowed down by `factor`, between them lies a ramp. arXiv:2309.00071"""
    factor, old = _positive(keys, settings, "factor"), _original_length(keys, settings, context_length)
    dim, truncate = 2 * len(inv_freq), settings.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _error(keys, "truncate", truncate, "true or false")
    ends = [
        dim * math.log(old / (_positive(keys, settings, name, turns) * 2 * math.pi)) / (2 * math.log(theta))
        for name, turns in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    high += 0.001 if low == high else 0
    steps = np.arange(dim // 2, dtype=np.float32)
    keep = 1 - np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = np.power(theta, (2 * steps / np.float32(dim)).astype(np.float64)).astype(np.float32)
    slowed = np.float32(1) / (np.float32(factor) * powers)
    result: Floats = (slowed * (1 - keep) + inv_freq * keep).astype(np.float32)
    return result


def _yarn_scales(keys: Keys, settings: dict[str, Any]) -> tuple[float, float]:
    """What multiplies cos and sin, and what latent attention makes of mscale_all_dim."""
    factor = _positive(keys, settings, "factor")

    def scale(name: str) -> float | None:
        if settings.get(name) in (None, 0):
            return None
        return _temperature(factor, _positive(keys, settings, name))

    of_rotation, of_all = scale("mscale"), scale("mscale_all_dim")
    both = of_rotation is not None and of_all is not None
    default = of_rotation / of_all if both else _temperature(factor)  # type: ignore[operator]
    return _positive(keys, settings, "attention_factor", default), of_all or 1.0


def _temperature(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _original_length(keys: Keys, settings: dict[str, Any], context_length: int) -> float:
    """The length before scaling; at the top level it wins over the dictionary."""
    name = "original_max_position_embeddings"
    top = keys.values.get(name)
    return _positive(keys, settings | ({name: top} if top is not None else {}), name, context_length)


def _positive(keys: Keys, settings: dict[str, Any], name: str, default: float | None = None) -> float:
    value = settings.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise _error(keys, name, value, "a number above 0")
    return float(value)


def _error(keys: Keys, name: str, found: Any, wanted: str) -> ConversionError:
    return ConversionError(f"{keys.path}: RoPE {name} is {found!r:.80}; expected {wanted}.")
