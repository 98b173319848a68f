"""Weight types expert by expert: the JSON that `colibri bits` proposes and `colibri convert` follows.

    {"format": "colibri-expert-bits", "version": 1, "experts": {"0": ["q8", "q4", ...], "1": [...]}, ...}

Owns: reading it against a model, what may become what. Refuses: choosing (analysis/bits.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri.errors import ArgumentError, ModelIOError
from colibri.quantize import TYPE_IDS

FORMAT, VERSION = "colibri-expert-bits", 1


def read_plan(path: Path) -> dict[str, list[str]]:
    """Types of all experts, by layer."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"expert_bits: {path} is not JSON ({error}); make it with colibri bits") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ArgumentError(f"expert_bits: {path} is no plan of {FORMAT!r}, version {VERSION}")
    experts = found.get("experts")
    if not isinstance(experts, dict) or not all(isinstance(one, list) for one in experts.values()):
        raise ArgumentError(f'expert_bits: {path}: expected "experts": {{layer: [types]}}')
    for layer, types in experts.items():
        for expert, type in enumerate(types):
            if type not in TYPE_IDS:
                raise ArgumentError(
                    f"expert_bits: {path}: layer {layer}, expert {expert}: expected one of "
                    f"{', '.join(TYPE_IDS)}, found {type!r}"
                )
    return experts


def types_by_entry(
    plan: Mapping[str, list[str]], config: Mapping[str, Any]
) -> dict[str, tuple[str, str, str]]:
    """The types of every expert's record, by its name; the plan must be of a model of this shape."""
    expected = {str(layer): n for layer, n in enumerate(config["n_experts"]) if n}
    if {layer: len(types) for layer, types in plan.items()} != expected:
        found = {layer: len(types) for layer, types in plan.items()}
        raise ArgumentError(
            f"expert_bits: expected types for these experts by layer: {expected}, found {found}; the plan is "
            "of another model"
        )
    return {
        f"layers.{layer}.experts.{expert}": (type, type, type)
        for layer, types in plan.items()
        for expert, type in enumerate(types)
    }
