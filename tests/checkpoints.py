"""Tiny random Hugging Face checkpoints, written with numpy and safetensors alone (no torch).

Owns: one maker per family, each writing a directory with
config.json, weights, tokenizer.json, tokenizer_config.json and generation_config.json. A tensor's values
depend on the seed and on its canonical name only, so the same model can be written in several spellings
(shards, stacked experts, prefixes, types) and must convert to the same bytes.
Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

import checkpoint_makers
from checkpoint_tensors import Array, Config
from checkpoint_writer import EXPERT_LAYOUTS, SPECIAL_TOKENS, TEMPLATE, base_config, tokenizer_json, write

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


def llama(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """All-dense; `qkv_bias` is the family's attention_bias (q, k, v and o)."""
    config = base_config("llama", "LlamaForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {"intermediate_size": n_ff, "attention_bias": qkv_bias, "mlp_bias": False, "pretraining_tp": 1}
    return write(path, config, [0] * n_layers, n_ff, 0, qkv_bias=qkv_bias, out_bias=qkv_bias, **options)


def qwen3(
    path: str | Path,
    *,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = 16,
    n_ff: int = 96,
    qkv_bias: bool = False,
    **options: Any,
) -> Path:
    """All-dense with per-head q/k norm."""
    config = base_config("qwen3", "Qwen3ForCausalLM", n_layers, hidden, n_heads, n_kv_heads, head_dim)
    config |= {
        "intermediate_size": n_ff,
        "attention_bias": qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
    }
    return write(
        path, config, [0] * n_layers, n_ff, 0, qk_norm="head", qkv_bias=qkv_bias, out_bias=qkv_bias, **options
    )


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


def _placed(n_layers: int, n_experts: int, mlp_only_layers: Sequence[int], step: int) -> list[int]:
    """Experts per layer; 0 where the layer is dense."""
    return [0 if layer in mlp_only_layers or (layer + 1) % step else n_experts for layer in range(n_layers)]


FAMILIES = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "llama": llama,
    "qwen3": qwen3,
    "glm4_moe": glm4_moe,
    "dots1": dots1,
    "gpt_oss": gpt_oss,
    **checkpoint_makers.FAMILIES,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}
__all__ = ["EXPERT_LAYOUTS", "SPECIAL_TOKENS", "TEMPLATE", "tokenizer_json", *FAMILIES]


def read_tensors(path: str | Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a checkpoint directory, as float32, under the names in its files."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for shard in sorted(Path(path).glob("*.safetensors")):
        tensors |= {name: np.asarray(value).astype(np.float32) for name, value in load_file(shard).items()}
    return tensors


def read_config(path: str | Path) -> Config:
    return dict(json.loads((Path(path) / "config.json").read_text("utf-8")))


def edit_json(path: str | Path, changes: Mapping[str, Any], remove: Sequence[str] = ()) -> None:
    """Sets and removes top-level keys of a JSON file, which is created if absent."""
    path = Path(path)
    data = json.loads(path.read_text("utf-8")) if path.exists() else {}
    data.update(changes)
    for key in remove:
        data.pop(key, None)
    path.write_text(json.dumps(data, indent=2), "utf-8")


def edit_tensors(path: str | Path, changes: Mapping[str, Array], remove: Sequence[str] = ()) -> None:
    """Replaces, adds and removes tensors of a single-file checkpoint directory."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors.update(changes)
    for name in remove:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
