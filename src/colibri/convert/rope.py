"""RoPE settings of config.json to the vector of inverse frequencies that the engine multiplies positions
with.

Owns: where rope_theta and the scaling may stand, the types of SETTINGS, and up to which length of text one
vector serves where Transformers changes it with the length.
Refuses: every other type, partial rotation in families that have none, and every unknown setting, by name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.convert.keys import Keys
from colibri.errors import ArgumentError, ConversionError

Floats = npt.NDArray[np.float32]

SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": ("factor",),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
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
_DICTIONARIES = ("rope_scaling", "rope_parameters")
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
    context_length: int  # the longest text that these frequencies are for
    scale: float = 1.0  # multiplies cos and sin
    all_dim_scale: float = 1.0  # latent attention multiplies its softmax scale by the square


def read_rope(
    keys: Keys,
    head_dim: int,
    context_length: int,
    default_theta: float,
    share: float | None = None,
    head_name: str = "head_dim",
) -> Rope:
    """Settings inside the dictionary win over those at the top level. `share` of a head that is rotated is
    the family's default, None where its reference implementation ignores the setting. `context_length` is
    that of config.json; keys.context may ask for less. `head_name`: what config.json calls the head's width.
    """
    top_theta = keys.number("rope_theta", default_theta) if _top_theta_counts(keys) else default_theta
    settings = _settings(keys)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in SETTINGS or settings.get("type", kind) != kind:
        raise _error(keys, "rope_type", kind, f"one of {', '.join(SETTINGS)}")
    unknown = [
        name
        for name, value in settings.items()
        if name not in _ALWAYS + SETTINGS[kind] and value is not None and (name, value) != ("factor", 1.0)
    ]
    if unknown:
        known = ", ".join(_ALWAYS + SETTINGS[kind])
        raise _error(keys, f"setting {unknown[0]!r}", settings[unknown[0]], f"for type {kind!r} only {known}")
    theta = _positive(keys, settings, "rope_theta", top_theta)
    rotated = _rotated_share(keys, settings, share, kind)
    rope_dim = head_dim if kind == "proportional" else int(head_dim * rotated)
    if rope_dim % 2 or not 0 < rope_dim <= head_dim:
        part = "" if rotated == 1 else f"partial_rotary_factor {rotated:g} of "
        raise ConversionError(
            f"{keys.path}: {rope_dim} elements of a head rotate, {part}{head_name} = {head_dim}; RoPE "
            f"expects an even number from 2 to {head_dim}. {keys.next_step}"
        )
    powers = _powers(theta, rope_dim)
    inv_freq: Floats = np.float32(1) / powers
    usable = _usable_length(keys, context_length)
    if kind == "linear":
        inv_freq /= np.float32(_positive(keys, settings, "factor"))
    elif kind == "proportional":  # the other pairs stand still
        inv_freq /= np.float32(_positive(keys, settings, "factor", 1.0))
        inv_freq[int(rotated * head_dim // 2) :] = 0
    elif kind == "dynamic":
        _say_dynamic(keys, settings, context_length)
    elif kind == "longrope":
        return _longrope(keys, settings, powers, context_length, usable)
    elif kind == "llama3":
        inv_freq = _llama3(keys, settings, inv_freq, context_length)
    elif kind == "yarn":
        slowed = _yarn(keys, settings, theta, inv_freq, context_length)
        return Rope(rope_dim, slowed, usable, *_yarn_scales(keys, settings, context_length))
    return Rope(rope_dim, inv_freq, usable)


def _rotated_share(keys: Keys, settings: dict[str, Any], share: float | None, kind: str) -> float:
    top = keys.raw("partial_rotary_factor", None if "partial_rotary_factor" in settings else share)
    found = _positive(keys, settings, "partial_rotary_factor", 1.0 if top is None else top)
    if share is None and found != 1 and kind != "proportional":  # which one is meant?
        wanted = "1 or none: this family rotates the whole head"
        raise _error(keys, "partial_rotary_factor", found, wanted)
    return found


def _usable_length(keys: Keys, context_length: int) -> int:
    """What was asked for; a text longer than the model was made for is nobody's definition."""
    if keys.context is not None and not 0 < keys.context <= context_length:
        raise ArgumentError(
            f"context={keys.context} must be from 1 to max_position_embeddings = {context_length} of "
            f"{keys.path}"
        )
    return keys.context or context_length


def _top_theta_counts(keys: Keys) -> bool:
    """An absent or null rope_theta at the top is no default that was used if the dictionary has one."""
    value = keys.raw("rope_theta")
    return value is not None or not any(
        isinstance(found := keys.values.get(name), dict) and found.get("rope_theta") is not None
        for name in _DICTIONARIES
    )


def _settings(keys: Keys) -> dict[str, Any]:
    found = []
    for name in _DICTIONARIES:
        value = keys.raw(name)
        if value is not None and not isinstance(value, dict):
            raise keys.error(name, "an object or null")
        if value:
            found.append(value)
    if len(found) == 2 and found[0] != found[1]:
        raise keys.error("rope_scaling", "the same as rope_parameters where both are given")
    return dict(found[0]) if found else {}


def _powers(theta: float, rope_dim: int) -> Floats:
    """theta^(i/rope_dim) for even i; float32 steps as in Transformers, the power rounded once from float64
    so that every machine gets the same bits."""
    exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    powers: Floats = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return powers


def _say_dynamic(keys: Keys, settings: dict[str, Any], context_length: int) -> None:
    """The base grows with a text beyond context_length and is theta before."""
    if _positive(keys, settings, "factor") > 1:
        keys.notes.append(
            f"RoPE of type 'dynamic' is that of type 'default' up to max_position_embeddings = "
            f"{context_length}. Beyond, its frequencies would change with every token, so the file is for "
            "texts up to there"
        )


def _longrope(keys: Keys, settings: dict[str, Any], powers: Floats, context_length: int, usable: int) -> Rope:
    """Frequencies have divisors of their own, one list for texts up to the original length and one for
    longer texts. The lengths that a file is for lie on one side: on the shorter one unless more is asked
    for. arXiv:2402.13753"""
    original = _original_length(keys, settings, context_length)
    if original < 2:
        raise _error(keys, "original_max_position_embeddings", original, "at least 2")
    wanted = f"a list of {len(powers)} numbers above 0"
    divisors = {}
    for name in ("short_factor", "long_factor"):
        found = settings.get(name)
        if not isinstance(found, list) or len(found) != len(powers):
            raise _error(keys, name, found, wanted)
        numbers = [_positive(keys, {name: one}, name) for one in found]
        divisors[name] = np.array(numbers, dtype=np.float32)
    factor = _positive(keys, settings, "factor", context_length / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = _positive(keys, settings, "attention_factor", scale)
    is_long = keys.context is not None and keys.context > original
    if not is_long and usable > original:
        usable = int(original)
        keys.notes.append(
            f"RoPE of type 'longrope' has other frequencies for texts of more than {usable} tokens. The file "
            f"is for texts up to there; context={context_length} makes one for longer texts"
        )
    elif is_long:
        keys.notes.append(
            f"RoPE of type 'longrope': the file has the frequencies for texts of more than {original:g} "
            "tokens. The model has others for shorter texts, whose logits differ therefore"
        )
    inv_freq: Floats = np.float32(1) / (divisors["long_factor" if is_long else "short_factor"] * powers)
    return Rope(2 * len(powers), inv_freq, usable, scale)


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
    factor, old = (
        _yarn_factor(keys, settings, context_length),
        _original_length(keys, settings, context_length),
    )
    dim, truncate = 2 * len(inv_freq), settings.get("truncate", True)
    if theta <= 1:
        raise _error(keys, "rope_theta", theta, "a number above 1")
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
    slowed = np.float32(1) / (np.float32(factor) * _powers(theta, dim))
    result: Floats = (slowed * (1 - keep) + inv_freq * keep).astype(np.float32)
    return result


def _yarn_factor(keys: Keys, settings: dict[str, Any], context_length: int) -> float:
    """A null stands for the ratio of the lengths."""
    ratio = context_length / _original_length(keys, settings, context_length)
    return _positive(keys, settings, "factor", ratio if "factor" in settings else None)


def _yarn_scales(keys: Keys, settings: dict[str, Any], context_length: int) -> tuple[float, float]:
    """What multiplies cos and sin, and what latent attention makes of mscale_all_dim."""
    factor = _yarn_factor(keys, settings, context_length)

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
    at = [key for key in _DICTIONARIES if isinstance(keys.values.get(key), dict) and keys.values[key]]
    where = f" in {at[0]}" if at else ""
    return ConversionError(
        f"{keys.path}: RoPE {name}{where} is {found!r:.80}; expected {wanted}. {keys.next_step}"
    )
