"""Sampling parameters: bounds, types, defaults, and options without an effect (edge parameters, case 21)."""

import math
from typing import Any

import numpy as np
import pytest

from colibri.errors import ArgumentError, ColibriError
from colibri.sampling import MAX_SEED, Sampling, from_options, resolve

BAD = [
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "0.7"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_k", "5"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", -math.inf),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("seed", 1.0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", "5"),
    ("max_tokens", False),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
]
GOOD = [
    {"temperature": 0},
    {"temperature": 1e-9},
    {"temperature": 100},
    {"top_k": 0},
    {"top_k": 10**9},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"max_tokens": 0},
    {"max_tokens": 10**9},
    {"max_tokens": 10**12},
    {"stop": "x"},
    {"stop": ["a", "bc"]},
    {"stop": []},
    {"temperature": np.float32(0.5), "top_k": np.int64(4)},
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused_values_name_field_bound_and_value(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        Sampling(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}: expected ") and f"found {value!r}".rstrip("'\"") in text


@pytest.mark.parametrize("options", GOOD)
def test_values_at_the_edges_are_accepted(options: dict[str, Any]) -> None:
    Sampling(**options)


def test_argument_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError):
        Sampling(top_k=-1)
    assert issubclass(ArgumentError, ColibriError)


def test_an_unknown_option_lists_the_known() -> None:
    with pytest.raises(ArgumentError, match=r"top_q: no such option; expected one of max_tokens, .*stop"):
        from_options({"top_q": 1})


def test_nothing_given_is_greedy() -> None:
    chosen = resolve(Sampling(), {})
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0, 0, 1, 0)
    assert chosen.repetition_penalty == 1 and chosen.seed is None


def test_the_models_defaults_fill_what_is_absent() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "unknown": 3}
    chosen = resolve(Sampling(top_k=5), defaults)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.6, 5, 0.9)
    assert chosen.seed is not None


def test_temperature_zero_switches_the_models_defaults_off() -> None:
    chosen = resolve(Sampling(temperature=0), {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    assert (chosen.temperature, chosen.top_k, chosen.repetition_penalty, chosen.seed) == (0, 0, 1, None)
    assert resolve(Sampling(), {"repetition_penalty": 1.1}).repetition_penalty == 1.1


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 1}])
def test_an_option_without_an_effect_is_an_error(option: dict[str, Any]) -> None:
    for temperature in (0, None):
        with pytest.raises(ArgumentError, match=f"{next(iter(option))} .* has no effect at temperature 0"):
            resolve(Sampling(temperature=temperature, **option), {})
    assert resolve(Sampling(temperature=0.5, **option), {}).temperature == 0.5


def test_off_values_and_the_penalty_are_fine_when_greedy() -> None:
    chosen = resolve(Sampling(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1.3), {})
    assert chosen.repetition_penalty == 1.3


def test_fresh_seeds_differ_and_a_given_one_stays() -> None:
    seeds = {resolve(Sampling(temperature=1), {}).seed for _ in range(20)}
    assert len(seeds) == 20
    assert resolve(Sampling(temperature=1, seed=7), {}).seed == 7


def test_broken_defaults_of_a_model_are_told() -> None:
    with pytest.raises(ArgumentError, match="generation defaults inside the model file: top_p: expected"):
        resolve(Sampling(), {"temperature": 1, "top_p": 7})


def test_stop_becomes_a_tuple() -> None:
    assert Sampling(stop="ab").stops == ("ab",)
    assert Sampling(stop=["a", "b"]).stops == ("a", "b")
    assert Sampling().stops == ()
