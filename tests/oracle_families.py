"""What the numpy oracle reads from config.json beyond the mechanisms of the first families.

Role: fields of oracle_reading.Config that a family sets, by its model_type.
Owns: the class defaults of these families in Transformers 5.24. Refuses: importing colibri, computing.
"""

from __future__ import annotations

from typing import Any

FAMILIES = ("granitemoe",)


def fields_of(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Nothing for other families."""
    readers = {"granitemoe": _granitemoe}
    family = raw["model_type"]
    return readers[family](raw, head_dim) if family in readers else {}


def _granitemoe(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "renormalise": True,
        "embed_scale": raw["embedding_multiplier"],
        "attn_scale": raw["attention_multiplier"],
        "residual_scale": raw["residual_multiplier"],
        "logit_scale": 1 / raw["logits_scaling"],
    }
