"""Tiny random checkpoints whose layers differ in what they see of the past: one maker per family, as in
checkpoints.py, which lists them.

Owns: the config keys of those families. Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_writer import base_config, write

GPT_OSS_ROPE = {
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def gpt_oss(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_ff: int = 96,
    n_experts: int = 4,
    n_experts_used: int = 2,
    window: int = 128,
    qkv_bias: bool = True,
    mxfp4: bool = False,
    **options: Any,
) -> Path:
    """Sinks, windows in even layers, biases everywhere, a clamped activation; `qkv_bias` is the family's
    attention_bias (q, k, v and o)."""
    config = base_config("gpt_oss", "GptOssForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {
        "intermediate_size": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "experts_per_token": n_experts_used,
        "sliding_window": window,
        "layer_types": [("sliding_attention", "full_attention")[n % 2] for n in range(n_layers)],
        "initial_context_length": 64,
        "attention_bias": qkv_bias,
        "swiglu_limit": 1.5,
        "router_aux_loss_coef": 0.9,
        "rms_norm_eps": 1e-5,
    }
    if mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    options = {"rope": GPT_OSS_ROPE, "experts": "mxfp4" if mxfp4 else "in_turns", **options}
    experts = [n_experts] * n_layers
    return write(path, config, experts, n_ff, n_ff, qkv_bias=qkv_bias, out_bias=qkv_bias, **options)


def llama4_text(
    path: str | Path,
    *,
    n_layers: int = 4,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_experts: int = 4,
    n_experts_used: int = 1,
    step: int = 2,
    qk_norm: bool = True,
    chunk: int = 24,
    **options: Any,
) -> Path:
    """Every third layer sees all and does not rotate; every step-th one has experts."""
    config = base_config("llama4_text", "Llama4ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {
        "intermediate_size": n_ff_expert,
        "intermediate_size_mlp": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "interleave_moe_layer_step": step,
        "no_rope_layers": [int((n + 1) % 3 != 0) for n in range(n_layers)],
        "attention_chunk_size": chunk,
        "use_qk_norm": qk_norm,
        "attn_temperature_tuning": True,
        "floor_scale": 8,
        "attn_scale": 0.3,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
    }
    experts = [0 if (n + 1) % step else n_experts for n in range(n_layers)]
    options = {"experts": "stacked_transposed", **options}
    return write(path, config, experts, n_ff, n_ff_expert, n_ff_shared=n_ff_expert, **options)


def gemma3_text(
    path: str | Path,
    *,
    n_layers: int = 4,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_ff: int = 96,
    window: int = 24,
    cap: float | None = None,
    rope: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Windows and a small theta, but in every third layer."""
    config = base_config("gemma3_text", "Gemma3ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    del config["hidden_act"]
    config |= {
        "intermediate_size": n_ff,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": window,
        "layer_types": [("sliding" if (n + 1) % 3 else "full") + "_attention" for n in range(n_layers)],
        "final_logit_softcapping": cap,
        "attn_logit_softcapping": None,
    }
    settings = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    rope = {"rope_parameters": settings} if rope is None else rope
    return write(path, config, [0] * n_layers, n_ff, 0, qk_norm="head", rope=rope, **options)


def gemma4_text(
    path: str | Path,
    *,
    n_layers: int = 3,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_experts: int = 6,
    n_experts_used: int = 2,
    window: int = 24,
    cap: float | None = 2.0,
    full_head_dim: int = 32,
    n_full_kv_heads: int = 1,
    same: bool = True,
    moe: bool = True,
    **options: Any,
) -> Path:
    """Every third layer sees all, has heads of its own, turns a quarter of them, and, if they are the same,
    makes values of the weights of its keys."""
    config = base_config("gemma4_text", "Gemma4ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    del config["hidden_act"]
    config |= {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "num_experts": n_experts if moe else None,
        "top_k_experts": n_experts_used if moe else None,
        "enable_moe_block": moe,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": [("sliding" if (n + 1) % 3 else "full") + "_attention" for n in range(n_layers)],
        "final_logit_softcapping": cap,
        "attention_k_eq_v": same,
        "global_head_dim": full_head_dim,
        "num_global_key_value_heads": n_full_kv_heads,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    rope = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
    }
    options = {"rope": rope, "experts": "stacked", **options}
    layers = [n_experts if moe else 0] * n_layers
    return write(path, config, layers, n_ff, n_ff_expert, qk_norm="head", **options)
