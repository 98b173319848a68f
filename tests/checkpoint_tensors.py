"""Names, shapes and values of the tensors of tiny checkpoints (checkpoints.py writes them).

Owns: the canonical names of each family, seeded values, the stacked spellings of experts. Refuses: files.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Config = dict[str, Any]


BESIDE = tuple(f"{name}_feedforward_layernorm_{n}" for name, n in (("pre", 2), ("post", 1), ("post", 2)))


def shapes_of(
    config: Config,
    experts_of: Sequence[int],
    n_ff: int,
    n_ff_expert: int,
    n_ff_shared: int,
    qk_norm: str,
    qkv_bias: bool,
    out_bias: bool,
) -> dict[str, tuple[int, ...]]:
    """Canonical names (one tensor per expert) and shapes."""
    gpt_oss = config["model_type"] == "gpt_oss"
    hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
    mixtral_names = config["model_type"] == "mixtral"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer, n_experts in enumerate(experts_of):
        at = f"model.layers.{layer}"
        n_q, n_k, head_dim = _heads(config, layer)
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        latent = "kv_lora_rank" in config
        if latent:
            shapes |= _latent(f"{at}.self_attn", config)
        if "linear_key_head_dim" in config:
            n_q = 2 * n_heads * head_dim  # with a gate beside each head
        kind = kinds[layer] if layer < len(kinds := config.get("layer_types", ())) else ""
        linear = kind in ("linear_attention", "conv")
        if linear:
            shapes |= _short(f"{at}.conv", config) if kind == "conv" else _delta(f"{at}.linear_attn", config)
        for part, rows in () if latent or linear else (("q", n_q), ("k", n_k), ("v", n_k)):
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if qkv_bias:
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (rows,)
        if not linear:
            width = config["v_head_dim"] if latent else head_dim
            shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, n_heads * width)
        if out_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if qk_norm and not linear:
            shapes[f"{at}.self_attn.q_norm.weight"] = (head_dim if qk_norm == "head" else n_q,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (head_dim if qk_norm == "head" else n_k,)
        if gpt_oss:
            shapes[f"{at}.self_attn.sinks"] = (n_heads,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if config["model_type"].startswith("gemma"):
            shapes |= {f"{at}.{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
        gemma4 = config["model_type"] == "gemma4_text"
        if gemma4:
            shapes[f"{at}.layer_scalar"] = (1,)
            if config["attention_k_eq_v"] and config["layer_types"][layer] == "full_attention":
                del shapes[f"{at}.self_attn.v_proj.weight"]
        if not n_experts or gemma4:
            shapes |= _gated(f"{at}.mlp", n_ff, hidden)
        if not n_experts:
            continue
        if gemma4:
            shapes |= {f"{at}.{name}.weight": (hidden,) for name in BESIDE}
            shapes |= {f"{at}.mlp.gate.scale": (hidden,), f"{at}.mlp.gate.per_expert_scale": (n_experts,)}
        block = f"{at}.block_sparse_moe" if mixtral_names else f"{at}.mlp"
        shapes[f"{block}.{'router' if gpt_oss else 'gate'}.weight"] = (n_experts, hidden)
        if gpt_oss:
            shapes[f"{block}.router.bias"] = (n_experts,)
        names = ("w1", "w3", "w2") if mixtral_names else ("gate_proj", "up_proj", "down_proj")
        for expert in range(n_experts):
            one = _gated(f"{block}.experts.{expert}", n_ff_expert, hidden, names)
            shapes |= one
            if gpt_oss:
                shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in one.items()}
        if config["model_type"] in ("ernie4_5_moe", "minimax_m2") or config.get("use_expert_bias"):
            first = (1,) if config["model_type"] == "ernie4_5_moe" else ()
            shapes[f"{block}.gate.e_score_correction_bias"] = (*first, n_experts)
        grouped = "n_routed_experts" in config or config["model_type"] == "ernie4_5_moe"
        if grouped and config["model_type"] not in ("deepseek_v2", "ernie4_5_moe"):
            shapes[f"{block}.gate.e_score_correction_bias"] = (n_experts,)
        if n_ff_shared and grouped:
            shapes |= _gated(f"{at}.mlp.shared_experts", n_ff_shared, hidden)
        elif n_ff_shared:
            shapes |= _gated(f"{at}.mlp.shared_expert", n_ff_shared, hidden)
            if config["model_type"] != "llama4_text":
                shapes[f"{at}.mlp.shared_expert_gate.weight"] = (1, hidden)
    if config["model_type"] == "phimoe":
        norms = [name for name in shapes if name.endswith("layernorm.weight")] + ["model.norm.weight"]
        shapes |= {name.replace("weight", "bias"): (hidden,) for name in norms}
        shapes |= {"lm_head.bias": (config["vocab_size"],)} if config["lm_head_bias"] else {}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def _heads(config: Config, layer: int) -> tuple[int, int, int]:
    """Rows of q, rows of k, width of a head."""
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    if config["model_type"] == "gemma4_text" and config["layer_types"][layer] == "full_attention":
        head_dim = config["global_head_dim"]
        n_kv = config["num_global_key_value_heads"] if config["attention_k_eq_v"] else n_kv
    return n_heads * head_dim, n_kv * head_dim, head_dim


def _delta(at: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, key_heads, heads, key_dim, value_dim, width = (
        config[key if key == "hidden_size" else f"linear_{key}"]
        for key in (
            "hidden_size", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim",
            "conv_kernel_dim",
        )
    )  # fmt: skip
    keys, values = key_heads * key_dim, heads * value_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.conv1d.weight": (2 * keys + values, 1, width),
        f"{at}.A_log": (heads,),
        f"{at}.dt_bias": (heads,),
        f"{at}.norm.weight": (value_dim,),
        f"{at}.out_proj.weight": (hidden, values),
    }
    if config["model_type"] == "qwen3_next":
        rows = {"qkvz": 2 * (keys + values), "ba": 2 * heads}
    else:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return shapes | {f"{at}.in_proj_{part}.weight": (count, hidden) for part, count in rows.items()}


def _short(at: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    return {
        f"{at}.in_proj.weight": (3 * hidden, hidden),
        f"{at}.conv.weight": (hidden, 1, config["conv_L_cache"]),
        f"{at}.out_proj.weight": (hidden, hidden),
    }


def _latent(at: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, n_heads, rank, q_rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rope, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    n_q, n_kv = n_heads * (plain + rope), n_heads * (plain + value)
    shapes: dict[str, tuple[int, ...]] = {f"{at}.q_proj.weight": (n_q, hidden)}
    if q_rank:
        shapes = {
            f"{at}.q_a_proj.weight": (q_rank, hidden),
            f"{at}.q_a_layernorm.weight": (q_rank,),
            f"{at}.q_b_proj.weight": (n_q, q_rank),
        }
    return shapes | {
        f"{at}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        f"{at}.kv_a_layernorm.weight": (rank,),
        f"{at}.kv_b_proj.weight": (n_kv, rank),
    }


def _gated(
    at: str, n_ff: int, hidden: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {
        f"{at}.{gate}.weight": (n_ff, hidden),
        f"{at}.{up}.weight": (n_ff, hidden),
        f"{at}.{down}.weight": (hidden, n_ff),
    }


def values_of(
    seed: int, name: str, shape: tuple[int, ...], centered: bool = False
) -> npt.NDArray[np.float32]:
    """Matrices keep the size of their input; norms lie near 1, or near 0 where the model adds 1; biases are
    small; some states forget fast, some hardly."""
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)
    if name.endswith("sinks"):
        return noise
    if name.endswith("conv1d.weight"):  # of large sums silu makes vectors that are less at right angles
        return 2 * noise
    if name.endswith("A_log"):
        return noise - 3
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "scalar")):
        return (centered and "linear_attn" not in name) * np.float32(-1) + 1 + np.float32(0.1) * noise
    if name.endswith("bias"):
        return np.float32(0.1) * noise
    if name.endswith(".conv.in_proj.weight"):  # a product of three outputs has long tails
        noise *= np.float32(0.7)
    return noise / np.float32(np.sqrt(shape[-1]))


def stack_experts(
    tensors: Mapping[str, Array], experts_of: Sequence[int], mixtral_names: bool, layout: str
) -> dict[str, Array]:
    """The same values with one tensor for all experts of a layer."""
    gate, up, down = ("w1", "w3", "w2") if mixtral_names else ("gate_proj", "up_proj", "down_proj")
    old, new = (".block_sparse_moe", ".mlp") if mixtral_names and layout != "switch_mlp" else ("", "")
    stacked = {
        name.replace(old, new) if old else name: value
        for name, value in tensors.items()
        if ".experts." not in name
    }
    for layer, n_experts in enumerate(experts_of):
        at = f"model.layers.{layer}." + ("block_sparse_moe" if mixtral_names else "mlp")
        if not n_experts:
            continue
        gates, ups, downs = (
            [tensors[f"{at}.experts.{e}.{part}.weight"] for e in range(n_experts)]
            for part in (gate, up, down)
        )
        if layout == "switch_mlp":
            stacked |= {
                f"{at}.switch_mlp.gate_proj.weight": np.stack(gates),
                f"{at}.switch_mlp.up_proj.weight": np.stack(ups),
                f"{at}.switch_mlp.down_proj.weight": np.stack(downs),
            }
            continue
        at = at.replace(old, new) if old else at
        gate_up = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])
        down_all = np.stack(downs)
        if layout == "stacked_transposed":
            gate_up, down_all = gate_up.swapaxes(1, 2), down_all.swapaxes(1, 2)
        stacked |= {
            f"{at}.experts.gate_up_proj": np.ascontiguousarray(gate_up),
            f"{at}.experts.down_proj": np.ascontiguousarray(down_all),
        }
    return stacked


def in_turns(tensors: Mapping[str, Array], experts_of: Sequence[int], mxfp4: bool) -> dict[str, Array]:
    """The spelling of gpt_oss: one tensor for all experts of a layer with gate and up in turns, transposed;
    or random MXFP4 blocks and scales, whose values are not those of `tensors`."""
    fused = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer, n_experts in enumerate(experts_of):
        at = f"model.layers.{layer}.mlp.experts."
        for kind in ("weight", "bias"):
            gate, up, down = (
                np.stack([tensors[f"{at}{e}.{part}_proj.{kind}"] for e in range(n_experts)])
                for part in ("gate", "up", "down")
            )
            both = np.stack([gate, up], axis=2).reshape(n_experts, 2 * gate.shape[1], *gate.shape[2:])
            for name, value in ((f"{at}gate_up_proj", both), (f"{at}down_proj", down)):
                if kind == "bias":
                    fused[f"{name}_bias"] = value
                elif mxfp4:
                    fused |= _random_mxfp4(name, value.shape)
                else:
                    fused[name] = np.ascontiguousarray(value.swapaxes(1, 2))
    return fused


def _random_mxfp4(name: str, shape: Sequence[int]) -> dict[str, Array]:
    """[experts, rows, cols / 32, 16] pairs of 4-bit floats, and their scales, of outputs of ordinary size."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    experts, rows, cols = shape
    least = 127 - int(np.ceil(np.log2(3.5 * np.sqrt(cols))))
    return {
        f"{name}_blocks": random.integers(0, 256, (experts, rows, cols // 32, 16), np.uint8),
        f"{name}_scales": random.integers(least, least + 2, (experts, rows, cols // 32), np.uint8),
    }
