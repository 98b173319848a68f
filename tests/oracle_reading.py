"""What the numpy oracle (oracle.py) reads: config.json to mechanisms, safetensors to arrays, tensor names.

Owns:    the mechanisms of each family, resolved from config.json a second time, without colibri.
Refuses: computing; configs that the oracle does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oracle_families import FAMILIES as MORE
from oracle_families import fields_of, full_heads

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
# (tensor name, matrix [rows, cols]) -> matrix as some weight type would store it
Rounding = Callable[[str, Float32], Float32]
# rows [n, cols] that a matrix is about to multiply -> the same rows as an engine would round them
Activations = Callable[[Array], Array]

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
GROUPED = ("glm4_moe", "dots1", *LATENT)
DELTA = ("qwen3_next", "qwen3_5_moe_text")
DENSE = ("llama", "qwen2", "qwen3", "mistral", "ministral", "gemma3_text", "lfm2")
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss", *DENSE, *GROUPED, *DELTA, *MORE)
THETA = {
    "mixtral": 1e6,
    "gpt_oss": 150000.0,
    "ernie4_5_moe": 500000.0,
    "minimax_m2": 5e6,
    "phimoe": 1e6,
    "lfm2_moe": 1e6,
    "lfm2": 1e6,
    "llama4_text": 500000.0,
}  # where config.json has none
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Config:
    """The mechanisms of one checkpoint, family by family resolved from config.json."""

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    inv_freq: Float32  # [rotated elements of a head / 2]
    rope_scale: float  # multiplies cos and sin
    qk_norm: str  # "none", "head" (over head_dim), "full" (over the whole projection)
    qkv_clip: float | None
    qkv_bias: bool
    out_bias: bool
    tied: bool
    moe_layers: tuple[bool, ...]
    n_experts: int
    n_experts_used: int
    renormalise: bool
    shared: str  # name of the shared expert's block, "" for none
    sigmoid: bool  # scores of single experts, chosen with a bias
    groups: tuple[int, int]  # of experts, and how many of them stay in the choice
    router_scale: float
    latent: (
        tuple[int, int, int, int] | None
    )  # width of a head's part without RoPE, of a value, of the latents
    interleaved: bool  # the rotated elements of latent attention turn in pairs of neighbours
    attn_scale: float
    gpt_oss: bool  # sinks, biases of gate logits and experts, a clamped activation
    clamp: float  # of that activation
    # Gated delta networks: layers that are one; heads of keys and values, and their widths
    linear: tuple[bool, ...]
    delta: tuple[int, int, int, int]
    windows: tuple[int, ...]  # keys that a query of a layer sees, itself included; 0: all before it
    # Of the families of oracle_families.py, without effect in others.
    embed_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what a block adds to the residual stream
    logit_scale: float = 1.0
    layer_norm: bool = False  # norms of the residual stream take the mean off and have a bias
    head_bias: bool = False  # logits have a bias
    near: float = 0.0  # experts one after the other, each by a softmax over logits so near; 0: off
    neighbours: bool = False  # neighbours rotate together, not elements half apart
    local: tuple[bool, ...] = ()  # layers whose frequencies are local_inv_freq; (): none
    local_inv_freq: Float32 = field(default_factory=lambda: np.zeros(0, np.float32))
    post_norm: bool = False  # what a block adds is normalised, by RMSNorms of other names
    unit_offset: bool = False  # norms have 1 + their weight
    gelu: bool = False  # in place of SiLU, in its form with a tanh
    cap: float = 0.0  # of the logits; 0: off
    beside: bool = False  # a dense feed-forward beside the experts, a router with a norm
    value_norm: bool = False  # values are normalised, without a weight
    layer_scale: bool = False  # a number multiplies the residual stream behind each layer
    own_kv_heads: tuple[int, ...] = ()  # key and value heads by layer; (): n_kv_heads
    keys_are_values: tuple[bool, ...] = ()  # layers whose values are made by the matrix of keys
    biased: bool = False  # chosen with a bias
    rotates: tuple[bool, ...] = ()  # layers with RoPE; (): all
    aligned: bool = False  # windows are blocks of positions, they do not slide
    temperature: tuple[float, ...] = ()  # positions that share a factor of q, and its strength; (): off
    on_input: bool = False  # weights multiply what experts read
    shared_gate: bool = True  # of a block called shared_expert
    norm_min: float = 0.0  # chosen weights are divided by no less
    norm_add: float = 1e-20  # with sigmoid scores this is added to their sum
    short: bool = False  # `linear` layers are convolutions alone


def read_safetensors(path: Path) -> dict[str, Float32]:
    """All tensors of one file. Format: u64 header length, JSON header, then the bytes it points into."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    tensors: dict[str, Float32] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        values = np.frombuffer(raw[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = values.astype(np.float32)
    return tensors


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def rope_frequencies(
    config: dict[str, Any], head_dim: int, default_theta: float, is_long: bool = False
) -> Float32:
    """Inverse frequencies [head_dim / 2], from any of the spellings in use."""
    rope = rope_settings(config)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    # numpy's own f32 power has other last bits on processors with AVX-512
    power = np.power(float(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
    plain: Float32 = np.float32(1) / power
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / np.float32(rope["factor"])
    if kind == "dynamic":  # theta grows with a text beyond max_position_embeddings; here are none
        return plain
    if kind == "proportional":  # of a whole head, though pairs behind a share of it stand still
        still = np.arange(len(plain)) >= int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        return np.asarray(np.where(still, 0, plain / np.float32(rope.get("factor", 1.0))), np.float32)
    if kind not in ("llama3", "yarn", "longrope"):
        raise ValueError(f"rope_type {kind!r}: not known to the oracle")
    places = (config.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings"))
    original = np.float32(places[0] or places[1] or config["max_position_embeddings"])
    if kind == "longrope":  # a divisor for each frequency, other ones for texts beyond the original length
        divisors = np.array(rope["long_factor" if is_long else "short_factor"], np.float32)
        return np.asarray(plain / divisors, np.float32)
    if kind == "yarn":  # by the index of a frequency: the first are kept, the last divided, a ramp between
        turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        at = [head_dim * math.log(original / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in turns]
        if rope.get("truncate", True):
            at = [math.floor(at[0]), math.ceil(at[1])]
        start, end = max(at[0], 0), min(at[1], head_dim - 1)
        ramp = (np.arange(len(plain)) - start) / ((end - start) or 0.001)
        divided = np.clip(ramp, 0, 1).astype(np.float32)
        return np.asarray(plain / np.float32(rope["factor"]) * divided + plain * (1 - divided), np.float32)
    low, high, factor = (np.float32(rope[k]) for k in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelength = np.float32(2 * math.pi) / plain
    # 1 keeps a frequency (short waves), 0 divides it by factor (long waves), between them lies a ramp
    keep = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return np.asarray((1 - keep) * plain / factor + keep * plain, np.float32)


def kind_of(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """config.json with the RoPE settings of one kind of layer, where it has settings by kind."""
    found = raw.get("rope_parameters") or {}
    return {**raw, "rope_parameters": found[kind], "rope_theta": None} if kind in found else raw


def yarn_scale(config: dict[str, Any], *names: str) -> float:
    """1 + 0.1 m log(factor) with m the product of some settings; 1 without YaRN or with an m of 0."""
    rope = rope_settings(config)
    if rope.get("rope_type", rope.get("type")) != "yarn" or rope["factor"] <= 1:
        return 1.0
    return 1 + 0.1 * math.prod(rope.get(name) or 0.0 for name in names) * math.log(rope["factor"])


def rope_scale(config: dict[str, Any]) -> float:
    rope = rope_settings(config)
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("rope_type", rope.get("type")) == "longrope":
        trained, name = config["max_position_embeddings"], "original_max_position_embeddings"
        original = config.get(name) or rope.get(name) or trained
        factor = rope.get("factor") or trained / original
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_scale(config, "mscale") / yarn_scale(config, "mscale_all_dim")
    return yarn_scale(config)


def windows_of(raw: dict[str, Any]) -> tuple[int, ...]:
    """By layer: layer_types says which have one, or else each family's class; Qwen's have a switch."""
    family, n = raw["model_type"], raw["num_hidden_layers"]
    window = raw.get("sliding_window") or 0
    without = family in ("llama", "olmoe", "glm4_moe", *LATENT, *DELTA)
    if without or ("qwen" in family and not raw.get("use_sliding_window")):
        window = 0
    first = raw.get("max_window_layers", 28)
    if family in ("mixtral", "qwen3_moe", "mistral", "ministral"):
        sliding = [True] * n
    elif family == "qwen2_moe":
        sliding = [layer % 2 == 0 and layer < first for layer in range(n)]
    else:
        sliding = [layer >= first for layer in range(n)]
    if raw.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    return tuple(window if one else 0 for one in sliding)


def read_config(raw: dict[str, Any]) -> Config:
    """config.json to mechanisms. A default is the one of the family's class in Transformers 5.24."""
    family = raw["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r}: the oracle does not know it")
    if raw.get("hidden_act", "silu") != "silu" or raw.get("mlp_bias"):
        raise ValueError("the oracle computes SiLU feed-forwards without bias only")
    n_layers, n_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    derived = raw["hidden_size"] // n_heads
    latent = family in LATENT
    explicit = raw.get("qk_rope_head_dim" if latent else "head_dim", 128 if family == "qwen3" else None)
    head_dim = derived if explicit is None else explicit
    dense = family in DENSE
    counts = [raw[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in raw]
    n_experts = 0 if dense or not counts else counts[0]
    grouped = family in GROUPED
    first = raw["first_k_dense_replace"] if grouped else 0
    step, only = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if family in ("mixtral", "olmoe"):  # these have no dense layers, whatever the keys say
        step, only = 1, []
    without_key = ("mixtral", "qwen2_moe", "qwen2", "mistral", "ministral")
    attention_bias = bool(raw.get("attention_bias", False)) and family not in without_key
    share = raw.get("partial_rotary_factor", 0.5) if family == "glm4_moe" else 1
    if family in DELTA:
        share = rope_settings(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    if raw.get("rotary_dim"):
        share = raw["rotary_dim"] / head_dim
    if family == "minimax_m2":
        share = raw.get("rope_parameters", {}).get("partial_rotary_factor", share)
    if family == "glm4_moe":
        qk_norm = "head" if raw.get("use_qk_norm") else "none"
    else:
        head = ("qwen3", "qwen3_moe", "dots1", *DELTA)
        qk_norm = "head" if family in head else "full" if family == "olmoe" else "none"
    config = Config(
        family=family,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=raw.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        norm_eps=raw.get("rms_norm_eps", 1e-5 if family in ("mixtral", "olmoe") else 1e-6),
        inv_freq=rope_frequencies(
            kind_of(raw, "full_attention"),
            full_heads(raw)[0] if family == "gemma4_text" else int(head_dim * share),
            THETA.get(family, 1e4),
        ),
        rope_scale=rope_scale(raw),
        qk_norm=qk_norm,
        qkv_clip=raw.get("clip_qkv") if family == "olmoe" else None,
        qkv_bias=bool(raw.get("qkv_bias", True)) if family in ("qwen2_moe", "qwen2") else attention_bias,
        out_bias=attention_bias and family != "glm4_moe",
        tied=bool(raw.get("tie_word_embeddings", False)),
        moe_layers=tuple(
            not dense and n >= first and n not in only and (n + 1) % step == 0 for n in range(n_layers)
        ),
        n_experts=n_experts,
        n_experts_used=0 if dense else raw.get("num_experts_per_tok", 0),
        renormalise=family in ("mixtral", "gpt_oss") or bool(raw.get("norm_topk_prob", family in DELTA)),
        shared="shared_expert" if family in ("qwen2_moe", *DELTA) else "shared_experts" if grouped else "",
        sigmoid=grouped and family != "deepseek_v2",
        biased=grouped and family != "deepseek_v2",
        groups=(raw.get("n_group") or 1, raw.get("topk_group") or 1)
        if raw.get("topk_method", "") != "greedy"
        else (1, 1),
        router_scale=raw.get("routed_scaling_factor", 1.0) if grouped else 1.0,
        latent=(raw["qk_nope_head_dim"], raw["v_head_dim"], raw["q_lora_rank"] or 0, raw["kv_lora_rank"])
        if latent
        else None,
        interleaved=raw.get("rope_interleave", True) is True,
        attn_scale=(head_dim + (raw["qk_nope_head_dim"] if latent else 0)) ** -0.5
        * (yarn_scale(raw, "mscale_all_dim") ** 2 if latent else 1),
        gpt_oss=family == "gpt_oss",
        clamp=raw.get("swiglu_limit", 7.0),
        linear=tuple(kind == "linear_attention" for kind in raw.get("layer_types") or [""] * n_layers),
        delta=tuple(
            raw.get(f"linear_{name}", 0)
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        ),
        windows=windows_of(raw),
    )
    more = fields_of(raw, head_dim)
    if more.get("local"):
        more["local_inv_freq"] = rope_frequencies(kind_of(raw, "sliding_attention"), head_dim, 1e4)
    return replace(config, **more)


def expected_names(config: Config) -> tuple[list[str], list[str]]:
    """(matrices that a weight type may round, tensors that stay f32), by Hugging Face name."""
    matrices = ["model.embed_tokens.weight"] + ([] if config.tied else ["lm_head.weight"])
    kinds = ("weight", "bias") if config.layer_norm else ("weight",)
    exact = [f"model.norm.{kind}" for kind in kinds] + (["lm_head.bias"] if config.head_bias else [])
    for n in range(config.n_layers):
        layer, attn = f"model.layers.{n}.", f"model.layers.{n}.self_attn."
        for name in norm_names(config):
            exact += [f"{layer}{name}.{kind}" for kind in kinds]
        names = ["q", "k", "v", "o"]
        if config.latent:
            exact += [attn + "kv_a_layernorm.weight"] + (
                [attn + "q_a_layernorm.weight"] if config.latent[2] else []
            )
            names = ["q_a", "q_b"] if config.latent[2] else ["q"]
            names += ["kv_b", "o"]
            matrices.append(attn + "kv_a_proj_with_mqa.weight")
        if config.linear[n] and config.short:
            matrices += [f"{layer}conv.{part}_proj.weight" for part in ("in", "out")]
            exact.append(layer + "conv.conv.weight")
        elif config.linear[n]:
            parts = ("in_proj_qkvz",) if config.family == "qwen3_next" else ("in_proj_qkv", "in_proj_z")
            gates = ("in_proj_ba",) if config.family == "qwen3_next" else ("in_proj_a", "in_proj_b")
            matrices += [f"{layer}linear_attn.{part}.weight" for part in (*parts, "out_proj")]
            exact += [f"{layer}linear_attn.{part}.weight" for part in (*gates, "conv1d", "norm")]
            exact += [f"{layer}linear_attn.{part}" for part in ("A_log", "dt_bias")]
        else:
            if config.keys_are_values and config.keys_are_values[n]:
                names = [m for m in names if m != "v"]
            matrices += [f"{attn}{m}_proj.weight" for m in names]
            exact += [f"{attn}{m}_proj.bias" for m in "qkv" if config.qkv_bias]
            exact += [attn + "o_proj.bias"] if config.out_bias else []
            exact += [attn + "sinks"] if config.gpt_oss else []
            exact += [f"{attn}{m}_norm.weight" for m in "qk" if config.qk_norm in ("head", "full")]
        exact += [layer + "layer_scalar"] if config.layer_scale else []
        if config.beside:
            exact += [f"{layer}{name}" for name in BESIDE]
            matrices += ffn_names(layer + "mlp.")
        if config.moe_layers[n]:
            exact.append(router_name(config, n) + "weight")
            exact += [router_name(config, n) + "bias"] if config.gpt_oss else []
            for e in range(config.n_experts):
                of_expert = expert_names(config, n, e)
                matrices += of_expert
                exact += [name.replace("weight", "bias") for name in of_expert if config.gpt_oss]
            exact += [layer + "mlp.gate.e_score_correction_bias"] if config.biased else []
            if config.shared:
                gated = config.shared == "shared_expert" and config.shared_gate
                exact += [layer + "mlp.shared_expert_gate.weight"] if gated else []
                matrices += ffn_names(f"{layer}mlp.{config.shared}.")
        else:
            matrices += ffn_names(layer + "mlp.")
    return matrices, exact


BESIDE = (
    "mlp.gate.scale",
    "mlp.gate.per_expert_scale",
    "pre_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm_1.weight",
    "post_feedforward_layernorm_2.weight",
)


def norm_names(config: Config) -> tuple[str, ...]:
    """Of a layer: before attention, before the feed-forward, then after both where there are such."""
    names: tuple[str, ...] = ("input", "post_attention")
    if config.post_norm:
        names = ("input", "pre_feedforward", "post_attention", "post_feedforward")
    return tuple(f"{name}_layernorm" for name in names)


def moe_prefix(config: Config, layer: int) -> str:
    return f"model.layers.{layer}." + ("block_sparse_moe." if config.family == "mixtral" else "mlp.")


def router_name(config: Config, layer: int) -> str:
    return moe_prefix(config, layer) + ("router." if config.gpt_oss else "gate.")


def ffn_names(prefix: str) -> list[str]:
    return [f"{prefix}{m}_proj.weight" for m in ("gate", "up", "down")]


def expert_names(config: Config, layer: int, expert: int) -> list[str]:
    """gate, up, down of one expert."""
    prefix = f"{moe_prefix(config, layer)}experts.{expert}."
    if config.family == "mixtral":
        return [prefix + "w1.weight", prefix + "w3.weight", prefix + "w2.weight"]
    return ffn_names(prefix)
