"""Tiny random checkpoints whose routers choose among groups of experts, two families of them with latent
attention: one maker per family, as in checkpoints.py, which lists them.

Owns: the config keys of those families. Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_tensors import Config
from checkpoint_writer import base_config, write


def glm4_moe(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    qk_norm: bool = True,
    qkv_bias: bool = True,
    **options: Any,
) -> Path:
    """Half of each head rotates; `qkv_bias` is the family's attention_bias (q, k and v)."""
    config = base_config("glm4_moe", "Glm4MoeForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {"partial_rotary_factor": 0.5, "attention_bias": qkv_bias, "use_qk_norm": qk_norm}
    return _grouped(path, config, qk_norm="head" if qk_norm else "", qkv_bias=qkv_bias, **options)


def dots1(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 4,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """Per-head q/k norm; `qkv_bias` is the family's attention_bias (q, k, v and o)."""
    config = base_config("dots1", "Dots1ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, None)
    del config["head_dim"]
    config |= {"attention_bias": qkv_bias, "sliding_window": None, "max_window_layers": 62}
    return _grouped(path, config, qk_norm="head", qkv_bias=qkv_bias, out_bias=qkv_bias, **options)


def deepseek_v2(path: str | Path, *, topk_method: str = "greedy", **options: Any) -> Path:
    """Latent attention; softmax scores without renormalisation."""
    config = base_config("deepseek_v2", "DeepseekV2ForCausalLM", 2, 64, 4, 4, None)
    return _latent(path, config | {"topk_method": topk_method}, norm_topk_prob=False, **options)


def deepseek_v3(path: str | Path, **options: Any) -> Path:
    """Latent attention; sigmoid scores with a bias."""
    config = base_config("deepseek_v3", "DeepseekV3ForCausalLM", 2, 64, 4, 4, None)
    return _latent(path, config, **options)


def _latent(
    path: str | Path,
    config: Config,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    q_rank: int | None = 40,
    kv_rank: int = 32,
    head: tuple[int, int, int] = (24, 8, 16),
    **options: Any,
) -> Path:
    """head: widths of the part of a query that does not rotate, of the one that does, and of a value."""
    del config["head_dim"]
    config |= {
        "num_hidden_layers": n_layers,
        "hidden_size": hidden,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": head[0],
        "qk_rope_head_dim": head[1],
        "v_head_dim": head[2],
    }
    return _grouped(path, config, **options)


def _grouped(
    path: str | Path,
    config: Config,
    *,
    n_ff: int = 96,
    n_ff_expert: int = 48,
    n_shared: int = 1,
    n_experts: int = 8,
    n_experts_used: int = 2,
    groups: tuple[int, int] = (1, 1),
    first_dense: int = 0,
    norm_topk_prob: bool = True,
    scale: float = 1.0,
    **options: Any,
) -> Path:
    """groups: how many there are, and how many stay in the choice."""
    config |= {
        "intermediate_size": n_ff,
        "moe_intermediate_size": n_ff_expert,
        "n_routed_experts": n_experts,
        "n_shared_experts": n_shared,
        "num_experts_per_tok": n_experts_used,
        "n_group": groups[0],
        "topk_group": groups[1],
        "first_k_dense_replace": first_dense,
        "norm_topk_prob": norm_topk_prob,
        "routed_scaling_factor": scale,
    }
    experts = [0 if layer < first_dense else n_experts for layer in range(config["num_hidden_layers"])]
    return write(path, config, experts, n_ff, n_ff_expert, n_ff_shared=n_shared * n_ff_expert, **options)
