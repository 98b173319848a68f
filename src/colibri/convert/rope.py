"""RoPE settings of config.json to the vector of inverse frequencies that the engine multiplies positions
with.

Owns: where rope_theta and the scaling may stand, the types default, linear and llama3.
Refuses: every other type, partial rotation and every unknown setting, by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.convert.keys import Keys
from colibri.errors import ConversionError

Floats = npt.NDArray[np.float32]

_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Read from any type, or without effect on any of the three.
_ALWAYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)


def read_rope(keys: Keys, head_dim: int, context_length: int, default_theta: float) -> tuple[int, Floats]:
    """(rope_dim, inv_freq [rope_dim / 2]). Settings inside the dictionary win over those at the top level."""
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
    top_share = keys.raw("partial_rotary_factor")
    share = _positive(keys, settings, "partial_rotary_factor", 1.0 if top_share is None else top_share)
    if share != 1:  # the reference implementations of these families ignore it: which one is meant?
        raise _error(keys, "partial_rotary_factor", share, "1 or none: these families rotate the whole head")
    if head_dim % 2:
        raise ConversionError(f"{keys.path}: head_dim is {head_dim}; expected an even number for RoPE.")
    rope_dim = head_dim
    inv_freq = _base_frequencies(theta, rope_dim)
    if kind == "linear":
        inv_freq /= np.float32(_positive(keys, settings, "factor"))
    elif kind == "llama3":
        inv_freq = _llama3(keys, settings, inv_freq, context_length)
    return rope_dim, inv_freq


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
    if low >= high:
        raise _error(keys, "low_freq_factor", low, f"less than high_freq_factor {high:g}")
    old = keys.values.get("original_max_position_embeddings")
    old = _positive(
        keys,
        settings | ({"original_max_position_embeddings": old} if old is not None else {}),
        "original_max_position_embeddings",
        context_length,
    )
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > np.float32(old / low), inv_freq / np.float32(factor), inv_freq)
    smooth = (np.float32(old) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * slowed / np.float32(factor) + smooth * slowed
    between = (wavelength >= np.float32(old / high)) & (wavelength <= np.float32(old / low))
    result: Floats = np.where(between, blended, slowed).astype(np.float32)
    return result


def _positive(keys: Keys, settings: dict[str, Any], name: str, default: float | None = None) -> float:
    value = settings.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise _error(keys, name, value, "a number above 0")
    return float(value)


def _error(keys: Keys, name: str, found: Any, wanted: str) -> ConversionError:
    return ConversionError(f"{keys.path}: RoPE {name} is {found!r:.80}; expected {wanted}.")
