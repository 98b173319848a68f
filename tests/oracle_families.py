"""What the numpy oracle reads from config.json beyond the mechanisms of the first families.

Role: fields of oracle_reading.Config that a family sets, by its model_type.
Owns: the class defaults of these families in Transformers 5.24. Refuses: importing colibri, computing.
"""

from __future__ import annotations

from typing import Any

FAMILIES = ("granitemoe", "ernie4_5_moe", "minimax_m2", "phimoe")
CHOSEN_WITH_BIAS = ("ernie4_5_moe", "minimax_m2")


def fields_of(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Nothing for other families."""
    readers = {
        "granitemoe": _granitemoe,
        "ernie4_5_moe": _ernie4_5_moe,
        "minimax_m2": _minimax_m2,
        "phimoe": _phimoe,
    }
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


def _ernie4_5_moe(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    last = raw["moe_layer_end_index"] % raw["num_hidden_layers"]  # -1 is the last one
    return {
        "norm_eps": raw["rms_norm_eps"],
        "neighbours": True,
        "moe_layers": tuple(
            raw["moe_layer_start_index"] <= n <= last and (n + 1) % raw["moe_layer_interval"] == 0
            for n in range(raw["num_hidden_layers"])
        ),
        "n_experts": raw["moe_num_experts"],
        "n_experts_used": raw["moe_k"],
        "softmax_bias": True,
        "renormalise": True,
        "norm_min": raw["moe_norm_min"],
        "shared": "shared_experts" if raw["moe_num_shared_experts"] else "",
    }


def _minimax_m2(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {"qk_norm": "full", "sigmoid": True, "renormalise": True}


def _phimoe(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "norm_eps": raw["rms_norm_eps"],
        "near": 2 * raw["router_jitter_noise"],
        "layer_norm": True,
        "head_bias": raw["lm_head_bias"],
    }
