"""Makers of tiny checkpoints for the families of the second wave; checkpoints.py has the others.

Owns: their config.json. Refuses: values and files (checkpoint_writer.py), names (family_names.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_writer import base_config, write


def granitemoe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 48,
    n_experts: int = 6,
    n_experts_used: int = 2,
    embedding: float = 6.0,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """Multipliers everywhere; softmax over the chosen logits; `qkv_bias` is the family's attention_bias."""
    config = base_config("granitemoe", "GraniteMoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None)
    del config["head_dim"]
    config |= {
        "intermediate_size": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "attention_bias": qkv_bias,
        "embedding_multiplier": embedding,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.8,
    }
    experts = [n_experts] * n_layers
    options = {"experts": "stacked", **options}
    return write(path, config, experts, n_ff, n_ff, qkv_bias=qkv_bias, out_bias=qkv_bias, **options)


def ernie4_5_moe(
    path: str | Path,
    *,
    n_layers: int = 3,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_shared: int = 2,
    n_experts: int = 8,
    n_experts_used: int = 3,
    placed: tuple[int, int, int] = (1, -1, 1),
    **options: Any,
) -> Path:
    """Softmax scores chosen with a bias; placed: first and last routed layer, and the step."""
    config = base_config(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None
    )
    del config["head_dim"]
    start, end, step = placed
    config |= {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "moe_num_experts": n_experts,
        "moe_num_shared_experts": n_shared,
        "moe_k": n_experts_used,
        "moe_layer_start_index": start,
        "moe_layer_end_index": end,
        "moe_layer_interval": step,
        "moe_norm_min": 1e-12,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
    }
    last = n_layers - 1 if end == -1 else end
    experts = [n_experts if start <= n <= last and (n + 1) % step == 0 else 0 for n in range(n_layers)]
    return write(path, config, experts, n_ff, n_ff_expert, n_ff_shared=n_shared * n_ff_expert, **options)


def minimax_m2(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    rotary_dim: int = 8,
    n_ff: int = 48,
    n_experts: int = 8,
    n_experts_used: int = 2,
    **options: Any,
) -> Path:
    """Norm over the full q/k projection, part of a head rotates; sigmoid scores chosen with a bias."""
    config = base_config(
        "minimax_m2", "MiniMaxM2ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim
    )
    config |= {
        "intermediate_size": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "rotary_dim": rotary_dim,
    }
    return write(path, config, [n_experts] * n_layers, n_ff, n_ff, qk_norm="full", **options)


def phimoe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 48,
    n_experts: int = 6,
    noise: float = 0.3,
    head_bias: bool = True,
    qkv_bias: bool = True,
    **options: Any,
) -> Path:
    """LayerNorms, SparseMixer; `qkv_bias` is the family's attention_bias (q, k, v and o)."""
    config = base_config("phimoe", "PhimoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None)
    del config["head_dim"]
    config |= {
        "intermediate_size": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": 2,
        "attention_bias": qkv_bias,
        "lm_head_bias": head_bias,
        "router_jitter_noise": noise,
        "input_jitter_noise": 0.01,
        "rms_norm_eps": 1e-5,
    }
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


def lfm2_moe(
    path: str | Path,
    *,
    n_layers: int = 4,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_experts: int = 8,
    n_experts_used: int = 2,
    n_dense: int = 1,
    bias: bool = True,
    norm_topk_prob: bool = True,
    scale: float = 1.0,
    **options: Any,
) -> Path:
    """Dense layers first; sigmoid scores, chosen with a bias or without."""
    extra = {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "num_dense_layers": n_dense,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "use_expert_bias": bias,
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": scale,
    }
    experts = [0 if layer < n_dense else n_experts for layer in range(n_layers)]
    return _lfm2(path, ("lfm2_moe", "Lfm2MoeForCausalLM"), extra, experts, n_ff, n_ff_expert, **options)


def lfm2(path: str | Path, *, n_layers: int = 3, n_ff: int = 96, **options: Any) -> Path:
    """All dense, of a width that config.json says as it is."""
    extra = {"intermediate_size": n_ff, "block_auto_adjust_ff_dim": False}
    return _lfm2(path, ("lfm2", "Lfm2ForCausalLM"), extra, [0] * n_layers, n_ff, 0, **options)


def _lfm2(
    path: str | Path,
    names: tuple[str, str],
    extra: dict[str, Any],
    experts: list[int],
    n_ff: int,
    n_ff_expert: int,
    *,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    taps: int = 3,
    full: tuple[int, ...] = (2,),
    **options: Any,
) -> Path:
    """full: layers of attention; the others are convolutions."""
    config = base_config(*names, len(experts), hidden, n_heads, n_kv_heads, None) | extra
    del config["head_dim"], config["rms_norm_eps"], config["hidden_act"]
    config |= {
        "norm_eps": 1e-5,
        "conv_L_cache": taps,
        "conv_bias": False,
        "layer_types": ["full_attention" if n in full else "conv" for n in range(len(experts))],
    }
    return write(path, config, experts, n_ff, n_ff_expert, qk_norm="head", **{"tied": True, **options})


FAMILIES: dict[str, Callable[..., Path]] = {
    "granitemoe": granitemoe,
    "ernie4_5_moe": ernie4_5_moe,
    "minimax_m2": minimax_m2,
    "phimoe": phimoe,
    "llama4_text": llama4_text,
    "gemma3_text": gemma3_text,
    "gemma4_text": gemma4_text,
    "lfm2_moe": lfm2_moe,
    "lfm2": lfm2,
}
