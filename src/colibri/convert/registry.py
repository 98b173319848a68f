"""Finds the family module for a model_type.

Owns: discovery; a new file in families/ is enough. Refuses: unknown model types, listing the known ones.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Protocol, cast

from colibri.convert import families
from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.keys import Keys
from colibri.errors import ConversionError


class Family(Protocol):
    """What a module in families/ offers."""

    MODEL_TYPES: tuple[str, ...]
    ARCHITECTURES: tuple[str, ...]
    BOS_DEFAULT: int | None
    EOS_DEFAULT: tuple[int, ...]
    TENSORS: Names
    EXPERTS: ExpertNames | None

    @staticmethod
    def read_config(keys: Keys) -> Decoder: ...


@cache
def known() -> dict[str, Family]:
    """model_type to family."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        family = cast(Family, importlib.import_module(f"{families.__name__}.{module.name}"))
        for model_type in family.MODEL_TYPES:
            found[model_type] = family
    return found


def family_of(keys: Keys) -> Family:
    """By model_type; the architecture must be one of the family's."""
    model_type = keys.values.get("model_type")
    family = known().get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConversionError(
            f"{keys.path}: model_type {model_type!r} is not supported. Supported: "
            f"{', '.join(sorted(known()))}."
        )
    architectures = keys.values.get("architectures") or []
    if not isinstance(architectures, list) or any(name not in family.ARCHITECTURES for name in architectures):
        raise keys.error("architectures", " or ".join(family.ARCHITECTURES), "Other heads are not supported.")
    return family
