"""How a token is chosen and when to stop: the parameters of one generation, checked once for API, command
line and server.

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
MAX_LOGPROBS = 20
NEVER = -100.0  # a bias of this much is a ban
CONSTRAINTS = ("json_schema", "regex", "grammar")
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
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    json_schema: Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one generation; None: not given. Creating one checks everything."""

    max_tokens: int | None = None  # 0 or more; None: to the end or to the context's end
    temperature: float | None = None  # 0 (greedy) to 100
    top_k: int | None = None  # 0: off
    top_p: float | None = None  # above 0, up to 1 (off)
    min_p: float | None = None  # 0 (off) to 1, relative to the most likely token
    repetition_penalty: float | None = None  # 0.01 to 100; 1: off
    # Subtracted from the logit of an id that has been written: once, and for each time. -2 to 2; 0: off.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = (
        None  # id -> what its logit is raised by, -100 (never drawn) to 100
    )
    seed: int | None = None  # None: a fresh one, reported in Generation.seed
    stop: str | Sequence[str] | None = None  # texts that end the answer and are not part of it
    # What the whole answer must match; at most one of them. True: any JSON object.
    json_schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None  # in llguidance's variant of Lark
    # With every id, of the text and of the prompt: its log-probability, and those of so many most likely ids.
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, None, "leave it out to write to the end or the context")
        _real("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        _integer("top_k", self.top_k, 0, MAX_COUNT, "0 is off")
        _real("top_p", self.top_p, 0.0, 1.0, "1 is off", above=True)
        _real("min_p", self.min_p, 0.0, 1.0, "0 is off")
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 is off")
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 is off")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 is off")
        _integer("seed", self.seed, 0, MAX_SEED, "leave it out for a fresh one")
        for name in ("logprobs", "prompt_logprobs"):
            _integer(name, getattr(self, name), 0, MAX_LOGPROBS, "0 gives those of the ids that are there")
        object.__setattr__(self, "stop", _stop(self.stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        _check_constraint(self)

    @property
    def constrained(self) -> bool:
        """Whether the answer must match something."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

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


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ArgumentError(f"logit_bias: expected a mapping from ids to numbers, found {value!r:.80}")
    for id, bias in value.items():
        _integer("logit_bias: an id", id, 0, MAX_COUNT, "of the model's vocabulary")
        _real(f"logit_bias of id {id}", bias, NEVER, 100.0, "-100 is never drawn")
    return {int(id): float(bias) for id, bias in value.items()}


def _check_constraint(given: Sampling) -> None:
    """That at most one is there, and of what kind; what it says is checked where it is compiled."""
    found = [name for name in CONSTRAINTS if getattr(given, name) is not None]
    if len(found) > 1:
        raise ArgumentError(
            f"{found[0]} and {found[1]}: an answer can be made to match one of them: leave one out"
        )
    schema = given.json_schema
    if not (schema is None or schema is True or isinstance(schema, Mapping)):
        raise ArgumentError(
            f"json_schema: expected a JSON schema (a mapping), or True for any object, found {schema!r:.80}"
        )
    for name in ("regex", "grammar"):
        value = getattr(given, name)
        if value is not None and not (isinstance(value, str) and value):
            raise ArgumentError(f"{name}: expected a text that is not empty, found {value!r:.80}")
