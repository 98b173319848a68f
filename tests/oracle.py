"""The second definition of the mathematics: a slow, plain numpy forward pass over a Hugging Face directory.

Role:    given config.json and *.safetensors of a checkpoint (FAMILIES), return the logits of every position
         and what every router decided. The tests hold the engine and the committed Transformers fixtures
         against it. One function per mechanism, shapes in comments (n = positions).
Owns:    reading a checkpoint strictly (every tensor used, none missing), the formulas, greedy decoding.
Refuses: importing colibri (it must be able to disagree with it), speed, a KV cache, configs it does not know
         how to compute.

Precision: everything is float64, so that its own rounding (about 1e-13) vanishes beside that of an f32 engine
and a difference can be read as the engine's. Exception: the RoPE frequencies and the angle, position times
frequency, are rounded to float32, step by step as Transformers does: the models were trained with those
values, and at position 1000 the rounding of the angle is 3e-5: not noise, but part of what the model is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oracle_experts import separate

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
# (tensor name, matrix [rows, cols]) -> matrix as some weight type would store it
Rounding = Callable[[str, Float32], Float32]
# rows [n, cols] that a matrix is about to multiply -> the same rows as an engine would round them
Activations = Callable[[Array], Array]

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "llama", "qwen3", "glm4_moe", "dots1", "gpt_oss")
THETA = {"mixtral": 1e6, "gpt_oss": 150000.0}  # where config.json has none
GROUPED = ("glm4_moe", "dots1")  # routed as DeepSeek-V3
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
}


class Routing(NamedTuple):
    """What the router of one MoE layer decided for every position. E experts, k of them chosen."""

    layer: int
    logits: Array  # [n, E]
    experts: Ints  # [n, k] best first, equal values: lowest index first
    weights: Array  # [n, k] what the experts' outputs are multiplied by
    choice: Array  # [n, E] what the choice is made among


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
    gpt_oss: bool  # sinks, biases of gate logits and experts, a clamped activation
    clamp: float  # of that activation
    windows: tuple[int, ...]  # keys that a query of a layer sees, itself included; 0: all before it


class Checkpoint(NamedTuple):
    """A model ready to compute with."""

    config: Config
    weights: dict[str, Array]  # by Hugging Face name
    activations: Activations | None = None  # applied to the input of every matrix product but the routers'


# ---------------------------------------------------------------------------------------------- reading


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


def rope_frequencies(config: dict[str, Any], head_dim: int, default_theta: float) -> Float32:
    """Inverse frequencies [head_dim / 2], from any of the spellings in use."""
    rope = rope_settings(config)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    plain: Float32 = np.float32(1) / np.power(np.float32(theta), exponent)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / np.float32(rope["factor"])
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r}: expected default, linear, llama3 or yarn")
    places = (config.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings"))
    original = np.float32(places[0] or places[1] or config["max_position_embeddings"])
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
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_scale(config, "mscale") / yarn_scale(config, "mscale_all_dim")
    return yarn_scale(config)


def windows_of(raw: dict[str, Any]) -> tuple[int, ...]:
    """By layer: layer_types says which have one, or else each family's class; Qwen's have a switch."""
    family, n = raw["model_type"], raw["num_hidden_layers"]
    window = raw.get("sliding_window") or 0
    if family in ("llama", "olmoe", "glm4_moe") or ("qwen" in family and not raw.get("use_sliding_window")):
        window = 0
    first = raw.get("max_window_layers", 28)
    if family in ("mixtral", "qwen3_moe"):
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
    explicit = raw.get("head_dim", 128 if family == "qwen3" else None)
    head_dim = derived if explicit is None else explicit
    dense = family in ("llama", "qwen3")
    counts = [raw[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in raw]
    n_experts = 0 if dense else counts[0]
    grouped = family in GROUPED
    first = raw["first_k_dense_replace"] if grouped else 0
    step, only = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if family in ("mixtral", "olmoe"):  # these have no dense layers, whatever the keys say
        step, only = 1, []
    attention_bias = bool(raw.get("attention_bias", False)) and family not in ("mixtral", "qwen2_moe")
    share = raw.get("partial_rotary_factor", 0.5) if family == "glm4_moe" else 1
    if family == "glm4_moe":
        qk_norm = "head" if raw.get("use_qk_norm") else "none"
    else:
        qk_norm = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "full", "dots1": "head"}.get(family, "none")
    return Config(
        family=family,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=raw.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        norm_eps=raw.get("rms_norm_eps", 1e-5 if family in ("mixtral", "olmoe") else 1e-6),
        inv_freq=rope_frequencies(raw, int(head_dim * share), THETA.get(family, 1e4)),
        rope_scale=rope_scale(raw),
        qk_norm=qk_norm,
        qkv_clip=raw.get("clip_qkv") if family == "olmoe" else None,
        qkv_bias=bool(raw.get("qkv_bias", True)) if family == "qwen2_moe" else attention_bias,
        out_bias=attention_bias and family != "glm4_moe",
        tied=bool(raw.get("tie_word_embeddings", False)),
        moe_layers=tuple(
            not dense and n >= first and n not in only and (n + 1) % step == 0 for n in range(n_layers)
        ),
        n_experts=n_experts,
        n_experts_used=0 if dense else raw["num_experts_per_tok"],
        renormalise=family in ("mixtral", "gpt_oss") or bool(raw.get("norm_topk_prob", False)),
        shared="shared_expert" if family == "qwen2_moe" else "shared_experts" if grouped else "",
        sigmoid=grouped,
        groups=(raw.get("n_group") or 1, raw.get("topk_group") or 1),
        router_scale=raw.get("routed_scaling_factor", 1.0) if grouped else 1.0,
        gpt_oss=family == "gpt_oss",
        clamp=raw.get("swiglu_limit", 7.0),
        windows=windows_of(raw),
    )


def expected_names(config: Config) -> tuple[list[str], list[str]]:
    """(matrices that a weight type may round, tensors that stay f32), by Hugging Face name."""
    matrices = ["model.embed_tokens.weight"] + ([] if config.tied else ["lm_head.weight"])
    exact = ["model.norm.weight"]
    for n in range(config.n_layers):
        layer, attn = f"model.layers.{n}.", f"model.layers.{n}.self_attn."
        exact += [layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"]
        matrices += [f"{attn}{m}_proj.weight" for m in "qkvo"]
        exact += [f"{attn}{m}_proj.bias" for m in "qkv" if config.qkv_bias]
        exact += [attn + "o_proj.bias"] if config.out_bias else []
        exact += [attn + "sinks"] if config.gpt_oss else []
        exact += [f"{attn}{m}_norm.weight" for m in "qk" if config.qk_norm != "none"]
        if config.moe_layers[n]:
            exact.append(router_name(config, n) + "weight")
            exact += [router_name(config, n) + "bias"] if config.gpt_oss else []
            for e in range(config.n_experts):
                names = expert_names(config, n, e)
                matrices += names
                exact += [name.replace("weight", "bias") for name in names if config.gpt_oss]
            exact += [layer + "mlp.gate.e_score_correction_bias"] if config.sigmoid else []
            if config.shared:
                exact += [layer + "mlp.shared_expert_gate.weight"] if config.shared == "shared_expert" else []
                matrices += ffn_names(f"{layer}mlp.{config.shared}.")
        else:
            matrices += ffn_names(layer + "mlp.")
    return matrices, exact


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


def load(
    directory: Path | str, rounding: Rounding | None = None, activations: Activations | None = None
) -> Checkpoint:
    """Reads a checkpoint. `rounding` replaces each matrix (not routers, norms, biases) by its stored form."""
    directory = Path(directory)
    config = read_config(json.loads((directory / "config.json").read_text()))
    found: dict[str, Float32] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= read_safetensors(path)
    found = separate(found)
    matrices, exact = expected_names(config)
    unknown = set(found) - set(matrices) - set(exact) - ({"lm_head.weight"} if config.tied else set())
    missing = (set(matrices) | set(exact)) - set(found)
    if unknown or missing:
        raise ValueError(f"{directory}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}")
    weights = {name: found[name].astype(np.float64) for name in exact}
    for name in matrices:
        weights[name] = (rounding(name, found[name]) if rounding else found[name]).astype(np.float64)
    if config.tied and not np.array_equal(
        found.get("lm_head.weight", found["model.embed_tokens.weight"]), found["model.embed_tokens.weight"]
    ):
        raise ValueError(f"{directory}: tie_word_embeddings is true, but lm_head differs from the embedding")
    return Checkpoint(config, weights, activations)


# ------------------------------------------------------------------------------------------- mechanisms


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [..., d] divided by its root mean square over d, times weight [d]."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def softmax(x: Array) -> Array:
    """Over the last axis. -inf becomes 0."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def rotate(x: Array, inv_freq: Float32, scale: float = 1) -> Array:
    """RoPE. x [n, heads, head_dim]; of the first 2f elements, f = len(inv_freq), i turns with i + f."""
    position = np.arange(len(x), dtype=np.float32)
    angle = (position[:, None] * inv_freq).astype(np.float64)[:, None, :]  # [n, 1, head_dim/2], f32 product
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    a, b, rest = np.split(x, [len(inv_freq), 2 * len(inv_freq)], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def linear(model: Checkpoint, name: str, x: Array) -> Array:
    """x [n, cols] times a matrix [rows, cols] -> [n, rows]."""
    return np.asarray((x if model.activations is None else model.activations(x)) @ model.weights[name].T)


def attention(model: Checkpoint, layer: int, x: Array) -> Array:
    """Causal grouped-query attention. x [n, d] -> [n, d]."""
    config, weights, n = model.config, model.weights, len(x)
    prefix = f"model.layers.{layer}.self_attn."

    def project(name: str, heads: int) -> Array:
        """-> [n, heads, head_dim]: projection, bias, full norm, clip, split into heads, per-head norm."""
        y = linear(model, f"{prefix}{name}_proj.weight", x)
        if config.qkv_bias:
            y = y + weights[f"{prefix}{name}_proj.bias"]
        if config.qk_norm == "full" and name != "v":
            y = rms_norm(y, weights[f"{prefix}{name}_norm.weight"], config.norm_eps)
        if config.qkv_clip is not None:
            y = np.clip(y, -config.qkv_clip, config.qkv_clip)
        y = y.reshape(n, heads, config.head_dim)
        if config.qk_norm == "head" and name != "v":
            y = rms_norm(y, weights[f"{prefix}{name}_norm.weight"], config.norm_eps)
        return y

    q = rotate(project("q", config.n_heads), config.inv_freq, config.rope_scale)
    k = rotate(project("k", config.n_kv_heads), config.inv_freq, config.rope_scale)
    v = project("v", config.n_kv_heads)
    group = config.n_heads // config.n_kv_heads  # query head h reads key/value head h // group
    query, key = np.indices((n, n))
    hidden = (key > query) | (key <= query - (config.windows[layer] or n))
    out = np.empty_like(q)
    for h in range(config.n_heads):
        scores = q[:, h] @ k[:, h // group].T / math.sqrt(config.head_dim)  # [n, n]
        scores = np.where(hidden, -np.inf, scores)
        if config.gpt_oss:  # one more score, of no key
            sink = np.full((n, 1), weights[prefix + "sinks"][h])
            scores = np.concatenate([scores, sink], axis=1)
        out[:, h] = softmax(scores)[:, :n] @ v[:, h // group]
    y = linear(model, prefix + "o_proj.weight", out.reshape(n, -1))
    return y + weights[prefix + "o_proj.bias"] if config.out_bias else y


def gated_ffn(model: Checkpoint, names: Sequence[str], x: Array) -> Array:
    """down(SiLU(gate x) * up x). x [n, d]; names of gate [f, d], up [f, d], down [d, f]."""
    gate, up, down = names
    if model.config.gpt_oss:
        g, u = (linear(model, n, x) + model.weights[n.replace("weight", "bias")] for n in (gate, up))
        g, u = np.minimum(g, model.config.clamp), np.clip(u, -model.config.clamp, model.config.clamp)
        inner = (u + 1) * g / (1 + np.exp(-1.702 * g))
        return linear(model, down, inner) + model.weights[down.replace("weight", "bias")]
    return linear(model, down, silu(linear(model, gate, x)) * linear(model, up, x))


def route(config: Config, layer: int, logits: Array, bias: Array | float = 0.0) -> Routing:
    """The k experts with the largest score (plus bias), of the best groups if there are any; their scores
    without bias are the weights, divided by their sum only where the model says so, times a constant."""
    scores = 1 / (1 + np.exp(-logits)) if config.sigmoid else softmax(logits)  # [n, E]
    choice = scores + bias
    if config.groups[0] > config.groups[1]:
        members = choice.reshape(len(choice), config.groups[0], -1)  # [n, groups, experts of a group]
        worth = np.sort(members, axis=-1)[..., -2 if config.sigmoid else -1 :].sum(axis=-1)
        rank = np.argsort(np.argsort(-worth, axis=-1, kind="stable"), axis=-1)
        outside = np.repeat(rank >= config.groups[1], members.shape[-1], axis=-1)
        choice = np.where(outside, -np.inf if config.sigmoid else 0.0, choice)
    # a stable sort of the negated values keeps the lowest index first among equal ones
    experts = np.argsort(-choice, axis=-1, kind="stable")[:, : config.n_experts_used]
    chosen = np.take_along_axis(scores, experts, axis=-1)
    if config.renormalise:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + (1e-20 if config.sigmoid else 0))
    return Routing(layer, logits, experts, chosen * config.router_scale, choice)


def shared_expert(model: Checkpoint, layer: int, x: Array) -> Array:
    """An expert that every token visits, scaled by the sigmoid of its own one-row router if it has one."""
    prefix = f"model.layers.{layer}.mlp."
    out = gated_ffn(model, ffn_names(f"{prefix}{model.config.shared}."), x)
    if model.config.shared != "shared_expert":
        return out
    gate = 1 / (1 + np.exp(-(x @ model.weights[prefix + "shared_expert_gate.weight"].T)))  # [n, 1]
    return np.asarray(gate * out)


def mixture(model: Checkpoint, layer: int, x: Array) -> tuple[Array, Routing]:
    """The MoE feed-forward. x [n, d] -> ([n, d], what was routed where)."""
    config = model.config
    gate = router_name(config, layer)
    bias = model.weights[gate + "e_score_correction_bias"] if config.sigmoid else 0.0
    logits = x @ model.weights[gate + "weight"].T + model.weights.get(gate + "bias", 0.0)
    routing = route(config, layer, logits, bias)
    y = np.zeros_like(x)
    for expert in range(config.n_experts):
        rows, slots = np.nonzero(routing.experts == expert)
        if len(rows):
            out = gated_ffn(model, expert_names(config, layer, expert), x[rows])
            y[rows] += routing.weights[rows, slots, None] * out
    return (y + shared_expert(model, layer, x) if config.shared else y), routing


# ---------------------------------------------------------------------------------------------------- use


def forward(model: Checkpoint, ids: Sequence[int] | Ints) -> tuple[Array, list[Routing]]:
    """Logits [n, n_vocab] of every position and the routing of every MoE layer, in layer order."""
    config, weights = model.config, model.weights
    x = weights["model.embed_tokens.weight"][np.asarray(ids)]  # [n, d]
    routings = []
    for n in range(config.n_layers):
        prefix = f"model.layers.{n}."
        x = x + attention(model, n, rms_norm(x, weights[prefix + "input_layernorm.weight"], config.norm_eps))
        normed = rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], config.norm_eps)
        if config.moe_layers[n]:
            out, routing = mixture(model, n, normed)
            routings.append(routing)
        else:
            out = gated_ffn(model, ffn_names(prefix + "mlp."), normed)
        x = x + out
    x = rms_norm(x, weights["model.norm.weight"], config.norm_eps)
    return linear(model, "model.embed_tokens.weight" if config.tied else "lm_head.weight", x), routings


def greedy(model: Checkpoint, ids: Sequence[int], n_new: int) -> list[int]:
    """n_new ids, each the argmax (lowest id of equals) after all before it; all is recomputed each time."""
    ids = list(ids)
    for _ in range(n_new):
        logits, _ = forward(model, ids)
        ids.append(int(np.argmax(logits[-1])))
    return ids[len(ids) - n_new :]
