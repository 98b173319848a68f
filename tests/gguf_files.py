"""Writes tiny checkpoints of checkpoints.py as GGUF files, the way that llama.cpp's converter does.

Role:    the other direction of colibri.convert.gguf, from names, keys and permutations written down a second
         time; tools/compare_gguf_with_llama_cpp.py holds both to that converter itself.
Owns:    the spellings that files differ in: experts apart, fused or one by one, attention absorbed or not.
Refuses: importing colibri, quantising, other tokenizers than that of checkpoint_writer.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from family_names import canonical
from gguf_names import ARCHITECTURES, CONVOLVED, DELTA, KEYS, LAYER, PARTS, POST_NORMS, ROPE_KEYS

Array = npt.NDArray[Any]
Config = dict[str, Any]


def write(
    source: Path,
    out: Path,
    *,
    experts: str = "apart",
    fused_qkv: bool = False,
    absorbed: bool = True,
    keys: Mapping[str, Any] | None = None,
    remove: Sequence[str] = (),
    tensors: Mapping[str, Array] | None = None,
    without: str | None = None,
) -> Path:
    """The checkpoint `source` as the file `out`. experts: "apart" (three tensors a layer), "fused" (gate and
    up in one) or "single" (files of before April 2024). absorbed: False writes attn_kv_b as old files do.
    fused_qkv: one matrix for queries, keys and values. keys: added or in place of others, below the
    architecture's name unless they begin with "general." and so on. remove: of such keys. tensors: added.
    without: a pattern of tensors that are left away."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    architecture = ARCHITECTURES[config["model_type"]]
    found = _tensors(
        architecture, config, canonical(config["model_type"], load_file(source / "model.safetensors"))
    )
    found = _spelled(found, experts) | dict(tensors or {})
    if fused_qkv:
        found = _fused(found)
    values = _keys(architecture, config) | _rope(config, found)
    if architecture == "deepseek2":
        values |= _latent(config, found, absorbed)
    values |= _vocabulary(source) | dict(keys or {})
    writer = gguf.GGUFWriter(out, architecture)
    for key, value in values.items():
        name = (
            key
            if key.startswith(("general.", "tokenizer.", "quantize.", "other."))
            else f"{architecture}.{key}"
        )
        if key not in remove and value is not None:
            _add(writer, name, value)
    for name, array in found.items():
        if without is None or not re.search(without, name):
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        kinds[type(value)](key, value)


def _vocabulary(source: Path) -> dict[str, Any]:
    """Of the byte-level BPE that checkpoint_writer.py makes."""
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _keys(architecture: str, config: Config) -> dict[str, Any]:
    found = {key: config.get(name) for name, key in KEYS.items() if config.get(name) is not None}
    found["block_count"] = config["num_hidden_layers"]
    width = config.get("head_dim")
    found |= {"attention.key_length": width, "attention.value_length": width}
    if config["model_type"] in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"):
        found["expert_weights_norm"] = config["norm_topk_prob"]
        found["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
    if architecture == "minimax-m2":
        found |= {"expert_gating_func": 2, "expert_feed_forward_length": config["intermediate_size"]}
    if architecture in ("gpt-oss", "gemma3"):
        found["attention.sliding_window"] = config["sliding_window"]
        found["expert_feed_forward_length"] = (
            config["intermediate_size"] if architecture == "gpt-oss" else None
        )
    if architecture == "gemma4":
        found |= _gemma4(config)
    if architecture == "llama4":
        found["feed_forward_length"] = config["intermediate_size_mlp"]
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "qwen35moe":
        found["rope.dimension_sections"] = [1, 1, 0, 0]
    if architecture in CONVOLVED:
        of_layers = [kind == "full_attention" for kind in config["layer_types"]]
        found["attention.head_count_kv"] = [config["num_key_value_heads"] * one for one in of_layers]
        found["expert_gating_func"] = 2 if architecture == "lfm2moe" else None
    if architecture in DELTA:
        found["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    return found


def _gemma4(config: Config) -> dict[str, Any]:
    """Heads of layers that see all, and under other keys those of layers with a window."""
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    all_heads = config["num_global_key_value_heads"] if config["attention_k_eq_v"] else None
    local = config["num_key_value_heads"]
    found = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "attention.head_count_kv": [local if one else all_heads or local for one in sliding],
    }
    for suffix, name in (("", "global_head_dim"), ("_swa", "head_dim")):
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        found |= {key + suffix: config[name] for key in names}
    return found


def _rope(config: Config, tensors: dict[str, Array]) -> dict[str, Any]:
    """Keys, and tensors where factors belong to frequencies."""
    settings: Config = config.get("rope_scaling") or config.get("rope_parameters") or {}
    local = settings.get("sliding_attention", {})
    settings = settings.get("full_attention", settings)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    default = 0.25 if config["model_type"].startswith(("qwen3_next", "qwen3_5")) else 1.0
    dim = config.get("rotary_dim") or int(head_dim * (default if share is None else share))
    theta = float(settings["rope_theta"] if "rope_theta" in settings else config["rope_theta"])
    kind = settings.get("rope_type", settings.get("type", "default"))
    found: dict[str, Any] = {"rope.dimension_count": dim, "rope.freq_base": theta}
    found["rope.freq_base_swa"] = local.get("rope_theta")
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found |= {f"rope.scaling.{key}": settings.get(name) for name, key in ROPE_KEYS.items()}
        found["rope.scaling.factor"] = float(settings["factor"])
    if settings.get("mscale_all_dim") is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * settings["mscale_all_dim"]
    if kind == "longrope":
        length = settings["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = length
        found["rope.scaling.attn_factor"] = float(settings["short_mscale"])
        for name in ("long", "short"):
            tensors[f"rope_factors_{name}.weight"] = np.array(settings[f"{name}_factor"], np.float32)
    if kind == "proportional":
        pairs, turning = config["global_head_dim"] // 2, int(config["global_head_dim"] * share / 2)
        factors = np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)
        tensors.setdefault("rope_freqs.weight", factors)
        del found["rope.dimension_count"]
    if kind == "llama3":
        tensors["rope_freqs.weight"] = _llama3(settings, theta, dim)
    return found


def _llama3(settings: Config, theta: float, dim: int) -> Array:
    """What divides each frequency."""
    waves = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    ratio = (settings["original_max_position_embeddings"] / waves - low) / (high - low)
    smooth = np.clip(ratio, 0.0, 1.0)
    factors: Array = 1 / ((1 - smooth) / settings["factor"] + smooth)
    return factors.astype(np.float32)


def _latent(config: Config, tensors: dict[str, Array], absorbed: bool) -> dict[str, Any]:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, rope, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    found = {"rope.dimension_count": rope}
    if not absorbed:
        return found | {"attention.key_length": plain + rope, "attention.value_length": value}
    for layer in range(config["num_hidden_layers"]):
        both = tensors.pop(f"blk.{layer}.attn_kv_b.weight").reshape(heads, plain + value, rank)
        tensors[f"blk.{layer}.attn_k_b.weight"] = both[:, :plain].swapaxes(1, 2)
        tensors[f"blk.{layer}.attn_v_b.weight"] = both[:, plain:]
    return found | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + rope,
        "attention.value_length_mla": value,
    }


def _tensors(architecture: str, config: Config, source: Mapping[str, Array]) -> dict[str, Array]:
    """Experts as "blk.N.ffn_gate.E.weight"; _spelled brings them together."""
    found: dict[str, Array] = {}
    for name, array in source.items():
        found |= _renamed(architecture, config, name.removeprefix("model."), array)
    return found


def _renamed(architecture: str, config: Config, name: str, array: Array) -> dict[str, Array]:
    last = "token_embd_norm" if architecture in CONVOLVED else "output_norm"
    tops = {"embed_tokens": "token_embd", "norm": last, "lm_head": "output"}
    if not name.startswith("layers."):
        base, kind = name.rsplit(".", 1)
        shifted = array + 1 if base == "norm" and architecture in ("gemma3", *DELTA) else array
        return {f"{tops[base]}.{kind}": shifted}
    _, layer, rest = name.split(".", 2)
    at = f"blk.{layer}."
    rest = re.sub(r"^block_sparse_moe", "mlp", rest)
    for short, part in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        rest = rest.replace(f".{short}.", f".{part}.")
    if rest == "self_attn.sinks":
        return {f"{at}attn_sinks.weight": array}
    if rest == "layer_scalar":
        return {f"{at}layer_output_scale.weight": array}
    if rest in ("mlp.gate.scale", "mlp.gate.per_expert_scale"):
        return {f"{at}{'ffn_gate_inp' if rest == 'mlp.gate.scale' else 'ffn_down_exps'}.scale": array}
    if rest.endswith("e_score_correction_bias"):
        return {f"{at}exp_probs_b.bias": array.reshape(-1)}
    if architecture == "qwen35moe":
        array = _in_tiles(config, rest, array)
    if architecture in DELTA and (special := _delta(config, at, rest, array)):
        return special
    if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", rest):
        return {f"{at}ffn_{match[2]}.{match[1]}.weight": array}
    if match := re.fullmatch(r"mlp\.shared_experts?\.(\w+)_proj\.weight", rest):
        return {f"{at}ffn_{match[1]}_shexp.weight": array}
    if rest.startswith("mlp.experts."):
        return _gpt_oss(at, rest.removeprefix("mlp.experts."), array)
    base, kind = rest.rsplit(".", 1)
    to = LAYER[base]
    if base == "post_attention_layernorm" and architecture in POST_NORMS:
        to = "post_attention_norm"
    if base.endswith("norm") and architecture in ("gemma3", *DELTA) and to != "ssm_norm":
        array = array + 1
    if to in ("attn_q", "attn_k") and architecture in ("llama", "granitemoe"):
        count = "num_attention_heads" if to == "attn_q" else "num_key_value_heads"
        heads = config[count] or config["num_attention_heads"]
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if to == "ffn_gate_inp_shexp":
        array = array.reshape(-1)
    if to.endswith((".conv", "_conv1d")):
        array = array.squeeze()
    return {f"{at}{to}.{kind}": array}


def _gpt_oss(at: str, name: str, array: Array) -> dict[str, Array]:
    """Stacks of experts, gate and up in turns."""
    part, kind = name.split("_proj")[0], "bias" if name.endswith("_bias") else "weight"
    array = array if kind == "bias" else array.swapaxes(1, 2)
    if part == "down":
        return {f"{at}ffn_down_exps.{kind}": array}
    return {f"{at}ffn_{one}_exps.{kind}": array[:, start::2] for start, one in enumerate(PARTS[:2])}


def _delta(config: Config, at: str, name: str, array: Array) -> dict[str, Array]:
    """A rate as its negative; queries, keys, values and gates of all key heads apart."""
    if name == "linear_attn.A_log":
        return {f"{at}ssm_a": -np.exp(array)}
    if name == "linear_attn.dt_bias":
        return {f"{at}ssm_dt.bias": array}
    if name != "linear_attn.in_proj_qkvz.weight":
        return {}
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"] * heads // key_heads
    by_head = array.reshape(key_heads, -1, array.shape[1])
    ends = (0, key, 2 * key, 2 * key + value, 2 * key + 2 * value)
    q, k, v, z = (
        by_head[:, start:end].reshape(-1, array.shape[1])
        for start, end in zip(ends[:-1], ends[1:], strict=True)
    )
    return {f"{at}attn_qkv.weight": np.concatenate([q, k, v]), f"{at}attn_gate.weight": z}


def _in_tiles(config: Config, name: str, array: Array) -> Array:
    """Heads of values: those that read the first key head lie apart, by as many as there are key heads."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]
    part = name.removeprefix("linear_attn.").split(".")[0]
    if not name.startswith("linear_attn.") or part == "norm":
        return array
    if part == "out_proj":
        return _tiles(array.T, key_heads, heads).T
    start = keys if part in ("in_proj_qkv", "conv1d") else 0
    return np.concatenate([array[:start], _tiles(array[start:], key_heads, heads)])


def _tiles(rows: Array, key_heads: int, heads: int) -> Array:
    by_head = rows.reshape(key_heads, heads // key_heads, -1, *rows.shape[1:])
    return by_head.swapaxes(0, 1).reshape(rows.shape)


def _fused(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """In layers that have all three."""
    parts = [name for name in tensors if re.fullmatch(r"blk\.\d+\.attn_q\.\w+", name)]
    threes = [[name.replace("attn_q", f"attn_{part}") for part in "qkv"] for name in parts]
    threes = [three for three in threes if all(name in tensors for name in three)]
    gone = {name for three in threes for name in three}
    found = {name: array for name, array in tensors.items() if name not in gone}
    for three in threes:
        found[three[0].replace("attn_q", "attn_qkv")] = np.concatenate([tensors[name] for name in three])
    return found


def _spelled(tensors: Mapping[str, Array], experts: str) -> dict[str, Array]:
    if experts == "single":
        return dict(tensors)
    found: dict[str, Array] = {}
    stacks: dict[str, list[Array]] = {}
    for name, array in tensors.items():
        if match := re.fullmatch(r"(blk\.\d+\.ffn_\w+)\.\d+\.weight", name):
            stacks.setdefault(f"{match[1]}_exps.weight", []).append(array)
        else:
            found[name] = array
    found |= {name: np.stack(arrays) for name, arrays in stacks.items()}
    if experts == "fused":
        for name in [name for name in found if name.endswith("ffn_gate_exps.weight")]:
            up = found.pop(name.replace("gate", "up"))
            found[name.replace("gate", "gate_up")] = np.concatenate([found.pop(name), up], axis=1)
    return found
