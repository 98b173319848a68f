"""Tiny random checkpoints whose layers have routed experts behind grouped-query attention: one maker per
family, as in checkpoints.py, which lists them.

Owns: the config keys of those families. Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint_writer import base_config, write


def mixtral(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    n_experts: int = 4,
    n_experts_used: int = 2,
    **options: Any,
) -> Path:
    """Softmax, top-k, always renormalised; experts named w1 (gate), w3 (up), w2 (down)."""
    config = base_config("mixtral", "MixtralForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {
        "intermediate_size": n_ff,
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.02,
    }
    return write(path, config, [n_experts] * n_layers, n_ff, n_ff, **options)


def qwen3_moe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = 16,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_experts: int = 8,
    n_experts_used: int = 2,
    norm_topk_prob: bool = True,
    mlp_only_layers: Sequence[int] = (),
    decoder_sparse_step: int = 1,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """Per-head q/k norm; `qkv_bias` is the family's attention_bias (q, k, v and o)."""
    config = base_config("qwen3_moe", "Qwen3MoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "norm_topk_prob": norm_topk_prob,
        "mlp_only_layers": list(mlp_only_layers),
        "decoder_sparse_step": decoder_sparse_step,
        "attention_bias": qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    experts = _placed(n_layers, n_experts, mlp_only_layers, decoder_sparse_step)
    return write(
        path,
        config,
        experts,
        n_ff,
        n_ff_expert,
        qk_norm="head",
        qkv_bias=qkv_bias,
        out_bias=qkv_bias,
        **options,
    )


def olmoe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 4,
    n_ff: int = 48,
    n_experts: int = 8,
    n_experts_used: int = 2,
    norm_topk_prob: bool = False,
    clip_qkv: float | None = None,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """Norm over the full q/k projection, optional clip of q, k, v, no renormalisation by default."""
    config = base_config("olmoe", "OlmoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None)
    del config["head_dim"]
    config |= {
        "intermediate_size": n_ff,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "norm_topk_prob": norm_topk_prob,
        "clip_qkv": clip_qkv,
        "attention_bias": qkv_bias,
        "rms_norm_eps": 1e-5,
    }
    return write(
        path,
        config,
        [n_experts] * n_layers,
        n_ff,
        n_ff,
        qk_norm="full",
        qkv_bias=qkv_bias,
        out_bias=qkv_bias,
        **options,
    )


def qwen2_moe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 4,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_ff_shared: int = 80,
    n_experts: int = 8,
    n_experts_used: int = 2,
    norm_topk_prob: bool = False,
    mlp_only_layers: Sequence[int] = (),
    decoder_sparse_step: int = 1,
    qkv_bias: bool = True,
    **options: Any,
) -> Path:
    """Routed experts plus one shared expert scaled by a sigmoid gate."""
    config = base_config("qwen2_moe", "Qwen2MoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None)
    del config["head_dim"]
    config |= {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "shared_expert_intermediate_size": n_ff_shared,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "norm_topk_prob": norm_topk_prob,
        "mlp_only_layers": list(mlp_only_layers),
        "decoder_sparse_step": decoder_sparse_step,
        "qkv_bias": qkv_bias,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 28,
    }
    experts = _placed(n_layers, n_experts, mlp_only_layers, decoder_sparse_step)
    return write(
        path, config, experts, n_ff, n_ff_expert, n_ff_shared=n_ff_shared, qkv_bias=qkv_bias, **options
    )


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


def _placed(n_layers: int, n_experts: int, mlp_only_layers: Sequence[int], step: int) -> list[int]:
    """Experts per layer; 0 where the layer is dense."""
    return [0 if layer in mlp_only_layers or (layer + 1) % step else n_experts for layer in range(n_layers)]
