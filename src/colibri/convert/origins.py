"""Which keys of config.json decide about a field of the file: found by reading config.json again with other
values.

Owns: that search, and errors about fields told as errors about keys. Refuses: how it looks on a screen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.config import config_schema
from colibri.convert.checkpoint import SourceTensor
from colibri.convert.keys import Keys
from colibri.convert.registry import Family
from colibri.errors import ColibriError, ConversionError

_MOST = 6  # keys that an error names


@dataclass(frozen=True, slots=True)
class Reading:
    """A config.json that a family has read."""

    family: Family
    config: dict[str, Any]  # as the file has it
    keys: Keys  # after the reading

    @property
    def values(self) -> dict[str, Any]:
        """Every key with its value: those of the file, then the class defaults that stood in."""
        given = {name: value for name, value in self.config.items() if name not in self.keys.defaults}
        return given | {name: self.config.get(name, value) for name, value in self.keys.defaults.items()}

    def facts(self, changes: dict[str, Any], without: str = "") -> dict[str, Any]:
        """Everything that the family makes of config.json, comparable; empty if it refuses these values."""
        values = {name: value for name, value in self.config.items() if name not in self.keys.defaults}
        values = {name: value for name, value in (values | changes).items() if name != without}
        try:
            decoder = self.family.read_config(Keys(values, self.keys.path, self.keys.context))
        except (ColibriError, ArithmeticError, LookupError, TypeError, ValueError):
            return {}
        tensor = SourceTensor("", Path(), "F32", ())
        sources = {f"source of {name}": names for name, names in decoder.sources.items()}
        cuts = {f"order of rows in {name}": cut.view(tensor, 0) for name, cut in decoder.cuts.items()}
        return (
            decoder.config
            | sources
            | {"rope_inv_freq": decoder.inv_freq.tolist(), "layers left out": decoder.extra_layers}
            | {name: (tuple(v.order), v.start, v.col, v.transposed) for name, v in cuts.items()}
        )

    def changed(self, base: dict[str, Any], name: str, value: Any, beside: dict[str, Any]) -> set[str]:
        """Fields that differ from `base`, the facts without changes, where this key has another value,
        `beside` others of other keys."""
        start = (self.facts(beside) or base) if beside else base
        allowed = self.keys.required.get(name, ())
        made = [self.facts(beside | {name: other}) for other in others(value, allowed)]
        if name in self.config:
            made.append(self.facts(beside, without=name))
        return {
            field
            for facts in made
            if facts
            for field in facts.keys() | start.keys()
            if not _same(start.get(field), facts.get(field))
        }

    def error(self, error: ColibriError) -> ConversionError:
        """The error of a check that knows fields only, as one that names the keys which decide about those
        in its text."""
        text = str(error).removesuffix("; convert the model again").rstrip(".")
        named = {field["name"] for field in config_schema()} & set(re.findall(r"\w+", text))
        base = self.facts({})
        keys = [
            f"{self.keys.names.get(name, name)} = {value!r:.60}"
            for name, value in self.values.items()
            if self.changed(base, name, value, {}) & named
        ]
        return ConversionError(
            f"{self.keys.path}: {_listed(keys) or 'the keys'} would make a model that the engine does not "
            f"have: {text}. {self.keys.next_step} If all is as it should be, this version cannot run it."
        )


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:_MOST]) + (f" and {len(keys) - _MOST} more keys" if len(keys) > _MOST else "")


def _same(one: Any, other: Any) -> bool:
    """Lists by layer agree as far as both have layers."""
    if isinstance(one, list) and isinstance(other, list):
        return all(a == b for a, b in zip(one, other, strict=False)) and bool(one) == bool(other)
    return bool(one == other)


def others(value: Any, allowed: Iterable[Any]) -> list[Any]:
    """Other values that a key might have had; `allowed`: all of them, where the engine has few forms."""
    found: list[Any] = [one for one in allowed if one != value]
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int | float):
        found += [2 * value, value + 1, value - 1, value // 2 if isinstance(value, int) else value / 2]
    elif value is None:
        found += [1, 64, True]
    elif isinstance(value, list):
        found += [value[::-1], value + value] if value else [[0]]
    elif isinstance(value, dict):
        for name, inner in value.items():
            found += [value | {name: other} for other in others(inner, ())]
    return found
