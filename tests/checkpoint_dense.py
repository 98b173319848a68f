"""Tiny random checkpoints without experts: one maker per family, as in checkpoints.py, which lists them.

Owns: the config keys of those families. Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_writer import base_config, write


def _dense(
    path: str | Path,
    model_type: str,
    architecture: str,
    keys: dict[str, Any],
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    **options: Any,
) -> Path:
    config = base_config(model_type, architecture, n_layers, hidden, n_heads, n_kv_heads, head_dim)
    return write(path, config | {"intermediate_size": n_ff} | keys, [0] * n_layers, n_ff, 0, **options)


def llama(path: str | Path, *, qkv_bias: bool = False, **options: Any) -> Path:
    """`qkv_bias` is the family's attention_bias (q, k, v and o)."""
    keys = {"attention_bias": qkv_bias, "mlp_bias": False, "pretraining_tp": 1}
    biases = {"qkv_bias": qkv_bias, "out_bias": qkv_bias}
    return _dense(path, "llama", "LlamaForCausalLM", keys, **biases, **options)


def qwen2(path: str | Path, **options: Any) -> Path:
    """q, k and v have biases, whatever config.json says."""
    keys = {
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "use_mrope": False,
    }
    options.setdefault("config_remove", ["head_dim"])  # which the class does not have
    return _dense(path, "qwen2", "Qwen2ForCausalLM", keys, qkv_bias=True, **options)


def qwen3(path: str | Path, *, qkv_bias: bool = False, head_dim: int | None = 16, **options: Any) -> Path:
    """Per-head q/k norm; `qkv_bias` is the family's attention_bias (q, k, v and o)."""
    keys = {
        "attention_bias": qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
    }
    biases = {"qkv_bias": qkv_bias, "out_bias": qkv_bias}
    options |= {"head_dim": head_dim, "qk_norm": "head"}
    return _dense(path, "qwen3", "Qwen3ForCausalLM", keys, **biases, **options)


def mistral(path: str | Path, *, window: int | None = None, **options: Any) -> Path:
    """A window in every layer, or in none."""
    return _dense(path, "mistral", "MistralForCausalLM", {"sliding_window": window}, **options)


def ministral(path: str | Path, *, window: int | None = 128, n_layers: int = 2, **options: Any) -> Path:
    """Windows in all layers but every fourth, as layer_types says."""
    kinds = [("full_attention" if n % 4 == 0 else "sliding_attention") for n in range(n_layers)]
    keys = {"sliding_window": window, "layer_types": kinds}
    options |= {"n_layers": n_layers, "head_dim": options.get("head_dim", 16)}
    return _dense(path, "ministral", "MinistralForCausalLM", keys, **options)
