"""Tiny checkpoints of gated delta networks and of short convolutions: makers of their families.

Owns: qwen3_next (projections by key head), qwen3_5_moe_text (projections apart), lfm2_moe and lfm2. Refuses:
files, which checkpoint_writer.py writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint_tensors import Config
from checkpoint_writer import base_config, write


def qwen3_next(
    path: str | Path,
    *,
    n_ff: int = 96,
    mlp_only_layers: Sequence[int] = (),
    norm_topk_prob: bool = True,
    **options: Any,
) -> Path:
    """Layers may be dense among routed ones."""
    config: Config = {
        "intermediate_size": n_ff,
        "mlp_only_layers": list(mlp_only_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": norm_topk_prob,
        "full_attention_interval": 4,
    }
    names = ("qwen3_next", "Qwen3NextForCausalLM")
    return _delta(path, names, config, n_ff=n_ff, dense=mlp_only_layers, **options)


def qwen3_5_moe(path: str | Path, **options: Any) -> Path:
    """All layers routed; `rope` defaults to what the family writes."""
    rope = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        }
    }
    names = ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    return _delta(path, names, {}, **{"rope": rope, **options})


def _delta(
    path: str | Path,
    names: tuple[str, str],
    extra: Config,
    *,
    n_layers: int = 4,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    delta: tuple[int, int, int, int] = (2, 4, 16, 24),
    conv_width: int = 4,
    n_ff: int = 0,
    n_ff_expert: int = 48,
    n_ff_shared: int = 40,
    n_experts: int = 8,
    n_experts_used: int = 2,
    dense: Sequence[int] = (),
    full: Sequence[int] | None = None,
    **options: Any,
) -> Path:
    """delta: heads of keys, of values, width of a key, of a value. full: layers of attention, None: each
    fourth."""
    full = range(3, n_layers, 4) if full is None else full
    config = base_config(*names, n_layers, hidden, n_heads, n_kv_heads, head_dim) | extra
    config |= {
        "moe_intermediate_size": n_ff_expert,
        "shared_expert_intermediate_size": n_ff_shared,
        "num_experts": n_experts,
        "num_experts_per_tok": n_experts_used,
        "attention_bias": False,
        "linear_num_key_heads": delta[0],
        "linear_num_value_heads": delta[1],
        "linear_key_head_dim": delta[2],
        "linear_value_head_dim": delta[3],
        "linear_conv_kernel_dim": conv_width,
        "layer_types": [
            "full_attention" if layer in full else "linear_attention" for layer in range(n_layers)
        ],
    }
    experts = [0 if layer in dense else n_experts for layer in range(n_layers)]
    options = {"n_ff_shared": n_ff_shared, "qk_norm": "head", **options}
    return write(path, config, experts, n_ff, n_ff_expert, **options)


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
