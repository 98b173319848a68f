"""How a token is chosen and when to stop: the parameters of one generation, checked once for API and command
line.

Owns: names, types, bounds, messages, and what an absent value means:
    a value given  >  the model's own default (generation.json in the file)  >  off. Temperature off (0) is
    greedy. A temperature of 0 given by the caller also switches the model's other sampling defaults off.
Refuses: sampling itself (the C library), values without an effect: at temperature 0 only repetition_penalty
and stop matter, so a seed, top_k, top_p or min_p given there is an error rather than a silent surprise."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from colibri.errors import ArgumentError

MAX_COUNT = 2**31 - 1  # int32 of the C interface; a larger max_tokens means the same as none
MAX_SEED = 2**64 - 1
# Sampling fields that a model may have defaults for.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Options(TypedDict, total=False):
    """Keywords of Model.generate, stream, chat and stream_chat."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one generation; None: not given. Creating one checks everything."""

    max_tokens: int | None = None  # 0 or more; None: to the end or to the context's end
    temperature: float | None = None  # 0 (greedy) to 100
    top_k: int | None = None  # 0: off
    top_p: float | None = None  # above 0, up to 1 (off)
    min_p: float | None = None  # 0 (off) to 1, relative to the most likely token
    repetition_penalty: float | None = None  # 0.01 to 100; 1: off
    seed: int | None = None  # None: a fresh one, reported in Generation.seed
    stop: str | Sequence[str] | None = None  # texts that end the answer and are not part of it

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, None, "leave it out to write to the end or the context")
        _real("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        _integer("top_k", self.top_k, 0, MAX_COUNT, "0 is off")
        _real("top_p", self.top_p, 0.0, 1.0, "1 is off", above=True)
        _real("min_p", self.min_p, 0.0, 1.0, "0 is off")
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 is off")
        _integer("seed", self.seed, 0, MAX_SEED, "leave it out for a fresh one")
        object.__setattr__(self, "stop", _stop(self.stop))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts; __post_init__ made them a tuple."""
        assert self.stop is None or isinstance(self.stop, tuple)
        return self.stop or ()


def from_options(options: Mapping[str, Any]) -> Sampling:
    """Checked parameters from keywords; an unknown one is an error that lists the known."""
    known = Sampling.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ArgumentError(f"{name}: no such option; expected one of {', '.join(known)}")
    return Sampling(**options)


def resolve(given: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """`given` with every absent value filled in: from the model's defaults, then off. Greedy leaves seed
    None."""
    values: dict[str, Any] = dict(_OFF)
    if given.temperature != 0:
        values |= _model_defaults(defaults)
    values |= {name: getattr(given, name) for name in MODEL_DEFAULTS if getattr(given, name) is not None}
    greedy = values["temperature"] == 0
    if greedy:
        for name in ("top_k", "top_p", "min_p", "seed"):
            value = getattr(given, name)
            if value is not None and value != _OFF.get(name):
                raise ArgumentError(
                    f"{name} {value} has no effect at temperature 0 (greedy): give a temperature above 0, "
                    f"or leave {name} out"
                )
        # A default without an effect is dropped, so that what is reported is what was done.
        values |= {name: _OFF[name] for name in ("top_k", "top_p", "min_p")}
    seed = None if greedy else secrets.randbits(63) if given.seed is None else given.seed
    return replace(given, **values, seed=seed)


def _model_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: defaults[name] for name in MODEL_DEFAULTS if defaults.get(name) is not None}
    try:
        Sampling(**found)
    except ArgumentError as error:
        raise ArgumentError(
            f"generation defaults inside the model file: {error}; give the value yourself"
        ) from None
    return found


def _integer(name: str, value: object, low: int, high: int | None, hint: str) -> None:
    if value is None:
        return
    bounds = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{name}: expected {bounds} ({hint}), found {value!r} ({type(value).__name__})")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ArgumentError(f"{name}: expected {bounds} ({hint}), found {value}")


def _real(name: str, value: object, low: float, high: float, hint: str, *, above: bool = False) -> None:
    if value is None:
        return
    bounds = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name}: expected {bounds} ({hint}), found {value!r} ({type(value).__name__})")
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (above and number == low):
        raise ArgumentError(f"{name}: expected {bounds} ({hint}), found {value}")


def _stop(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ArgumentError(f"stop: expected a text or a list of texts, none of them empty, found {value!r}")
    return tuple(texts)
