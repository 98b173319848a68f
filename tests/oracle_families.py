"""What the numpy oracle reads from config.json beyond the mechanisms of the first families.

Role: fields of oracle_reading.Config that a family sets, by its model_type.
Owns: the class defaults of these families in Transformers 5.24. Refuses: importing colibri, computing.
"""

from __future__ import annotations

from typing import Any

FAMILIES = (
    "granitemoe",
    "ernie4_5_moe",
    "minimax_m2",
    "phimoe",
    "llama4_text",
    "gemma3_text",
    "lfm2_moe",
    "gemma4_text",
    "lfm2",
)
CHOSEN_WITH_BIAS = ("ernie4_5_moe", "minimax_m2", "lfm2_moe")


def fields_of(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Nothing for other families."""
    readers = {
        "granitemoe": _granitemoe,
        "ernie4_5_moe": _ernie4_5_moe,
        "minimax_m2": _minimax_m2,
        "phimoe": _phimoe,
        "llama4_text": _llama4_text,
        "gemma3_text": _gemma3_text,
        "gemma4_text": _gemma4_text,
        "lfm2_moe": _lfm2_moe,
        "lfm2": _lfm2,
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
        "biased": True,
        "renormalise": True,
        "norm_min": raw["moe_norm_min"],
        "shared": "shared_experts" if raw["moe_num_shared_experts"] else "",
    }


def _minimax_m2(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {"qk_norm": "full", "sigmoid": True, "biased": True, "renormalise": True}


def _phimoe(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "norm_eps": raw["rms_norm_eps"],
        "near": 2 * raw["router_jitter_noise"],
        "layer_norm": True,
        "head_bias": raw["lm_head_bias"],
    }


def _llama4_text(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    n = raw["num_hidden_layers"]
    rotates = tuple(flag == 1 for flag in raw["no_rope_layers"])
    chunks = raw["attention_chunk_size"]
    step = raw["interleave_moe_layer_step"]
    return {
        "norm_eps": raw["rms_norm_eps"],
        "neighbours": True,
        "rotates": rotates,
        "windows": tuple(chunks if one else 0 for one in rotates),
        "aligned": True,
        "temperature": (raw["floor_scale"], raw["attn_scale"]) if raw["attn_temperature_tuning"] else (),
        "qk_norm": "after" if raw["use_qk_norm"] else "none",
        "moe_layers": tuple((layer + 1) % step == 0 for layer in range(n)),
        "on_input": True,
        "sigmoid": True,
        "biased": False,
        "renormalise": False,
        "shared": "shared_expert",
        "shared_gate": False,
    }


def _sandwich(raw: dict[str, Any]) -> dict[str, Any]:
    """Blocks normalised before and after; layers that see a window have RoPE settings of their own."""
    local = tuple(kind == "sliding_attention" for kind in raw["layer_types"])
    return {
        "moe_layers": (False,) * raw["num_hidden_layers"],
        "n_experts": 0,
        "n_experts_used": 0,
        "norm_eps": raw["rms_norm_eps"],
        "windows": tuple(raw["sliding_window"] if one else 0 for one in local),
        "local": local,
        "post_norm": True,
        "gelu": True,
        "qk_norm": "head",
        "embed_scale": raw["hidden_size"] ** 0.5,
        "cap": raw["final_logit_softcapping"] or 0.0,
    }


def _gemma3_text(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return _sandwich(raw) | {"unit_offset": True, "attn_scale": raw["query_pre_attn_scalar"] ** -0.5}


def full_heads(raw: dict[str, Any]) -> tuple[int, int]:
    """Of gemma4's layers that see all: width of a head, key and value heads; in either spelling."""
    if "per_layer_config" in raw:
        one = raw["per_layer_config"].get(str(raw["num_hidden_layers"] - 1), {})
        return one.get("head_dim", raw["head_dim"]), one.get(
            "num_key_value_heads", raw["num_key_value_heads"]
        )
    count = raw["num_global_key_value_heads"] if raw["attention_k_eq_v"] else None
    return raw["global_head_dim"], count or raw["num_key_value_heads"]


def _gemma4_text(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    n = raw["num_hidden_layers"]
    same = tuple(raw["attention_k_eq_v"] and kind == "full_attention" for kind in raw["layer_types"])
    full, routed = full_heads(raw), raw["enable_moe_block"]
    kinds = raw["layer_types"]
    return _sandwich(raw) | {
        "attn_scale": 1.0,
        "moe_layers": (routed,) * n,
        "n_experts": raw["num_experts"] or 0,
        "n_experts_used": raw["top_k_experts"] or 0,
        "renormalise": True,
        "beside": routed,
        "value_norm": True,
        "layer_scale": True,
        "keys_are_values": same,
        "own_kv_heads": tuple(
            full[1] if kind == "full_attention" else raw["num_key_value_heads"] for kind in kinds
        ),
    }


def _lfm2(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "norm_eps": raw["norm_eps"],
        "qk_norm": "head",
        "tied": raw.get("tie_embedding", raw["tie_word_embeddings"]),
        "linear": tuple(kind == "conv" for kind in raw["layer_types"]),
        "short": True,
        "moe_layers": (False,) * raw["num_hidden_layers"],
    }


def _lfm2_moe(raw: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return _lfm2(raw, head_dim) | {
        "moe_layers": tuple(layer >= raw["num_dense_layers"] for layer in range(raw["num_hidden_layers"])),
        "sigmoid": True,
        "biased": raw["use_expert_bias"],
        "renormalise": raw["norm_topk_prob"],
        "norm_add": 1e-6,
        "router_scale": raw["routed_scaling_factor"],
    }
