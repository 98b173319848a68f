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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from family_names import canonical
from oracle_delta import by_key_head, convolve, gated_delta, unit
from oracle_experts import scaled, separate
from oracle_reading import (
    DELTA,
    FAMILIES,
    GROUPED,
    Activations,
    Array,
    Config,
    Float32,
    Ints,
    Rounding,
    expected_names,
    expert_names,
    ffn_names,
    norm_names,
    read_config,
    read_safetensors,
    rope_frequencies,
    router_name,
)  # fmt: skip

__all__ = [
    "Activations",
    "Array",
    "Config",
    "FAMILIES",
    "Float32",
    "GROUPED",
    "Ints",
    "Rounding",
    "expected_names",
    "expert_names",
    "ffn_names",
    "read_config",
    "read_safetensors",
    "rope_frequencies",
    "separate",
]


class Routing(NamedTuple):
    """What the router of one MoE layer decided for every position. E experts, k of them chosen."""

    layer: int
    logits: Array  # [n, E]
    experts: Ints  # [n, k] best first, equal values: lowest index first
    weights: Array  # [n, k] what the experts' outputs are multiplied by
    choice: Array  # [n, E] what the choice is made among


class Checkpoint(NamedTuple):
    """A model ready to compute with."""

    config: Config
    weights: dict[str, Array]  # by Hugging Face name
    activations: Activations | None = None  # applied to the input of every matrix product but the routers'


def stored(config: Config, name: str, matrix: Float32, rounding: Rounding) -> Float32:
    """The matrix as a weight type keeps it. What makes keys and values of a latent is kept by head, the part
    for keys transposed."""
    if not name.endswith("kv_b_proj.weight"):
        return rounding(name, matrix)
    assert config.latent is not None
    plain, value, _, rank = config.latent
    heads = matrix.reshape(config.n_heads, plain + value, rank).copy()
    for h, up in enumerate(heads):
        up[:plain] = rounding(f"{name}, keys of {h}", np.ascontiguousarray(up[:plain].T)).T
        up[plain:] = rounding(f"{name}, values of {h}", up[plain:])
    return heads.reshape(matrix.shape)


def load(
    directory: Path | str, rounding: Rounding | None = None, activations: Activations | None = None
) -> Checkpoint:
    """Reads a checkpoint. `rounding` replaces each matrix (not routers, norms, biases) by its stored form."""
    directory = Path(directory)
    raw = json.loads((directory / "config.json").read_text())
    config = read_config(raw)
    found: dict[str, Float32] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= read_safetensors(path)
    quantised = raw.get("quantization_config") or {}
    found = scaled(found, quantised.get("weight_block_size", (128, 128)))
    found = separate(canonical(config.family, found))
    matrices, exact = expected_names(config)
    unknown = set(found) - set(matrices) - set(exact) - ({"lm_head.weight"} if config.tied else set())
    missing = (set(matrices) | set(exact)) - set(found)
    if unknown or missing:
        raise ValueError(f"{directory}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}")
    weights = {name: found[name].astype(np.float64) for name in exact}
    if config.family in DELTA:  # norms multiply by 1 + weight, but for the one behind the recurrence
        for name in (one for one in exact if one.endswith("norm.weight") and "linear_attn" not in one):
            weights[name] = weights[name] + 1
    for name in matrices:
        matrix = stored(config, name, found[name], rounding) if rounding else found[name]
        weights[name] = matrix.astype(np.float64)
    if config.tied and not np.array_equal(
        found.get("lm_head.weight", found["model.embed_tokens.weight"]), found["model.embed_tokens.weight"]
    ):
        raise ValueError(f"{directory}: tie_word_embeddings is true, but lm_head differs from the embedding")
    return Checkpoint(config, weights, activations)


# ------------------------------------------------------------------------------------------- mechanisms


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [..., d] divided by its root mean square over d, times weight [d]."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def norm(model: Checkpoint, name: str, x: Array) -> Array:
    """A norm of the residual stream [n, d]: RMSNorm, or LayerNorm with a bias."""
    if not model.config.layer_norm:
        return rms_norm(x, model.weights[name + ".weight"] + model.config.unit_offset, model.config.norm_eps)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + model.config.norm_eps)
    return np.asarray(centred / deviation * model.weights[name + ".weight"] + model.weights[name + ".bias"])


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


def turn(config: Config, layer: int, y: Array) -> Array:
    """[n, heads, d]. If neighbours rotate together they are set half apart: scores stay the same."""
    halves = np.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)
    local = config.local and config.local[layer]
    inv_freq = config.local_inv_freq if local else config.inv_freq
    return rotate(halves if config.neighbours else y, inv_freq, config.rope_scale)


def linear(model: Checkpoint, name: str, x: Array) -> Array:
    """x [n, cols] times a matrix [rows, cols] -> [n, rows]."""
    return np.asarray((x if model.activations is None else model.activations(x)) @ model.weights[name].T)


def held(y: Array) -> Array:
    """Keys or values as a cache holds them."""
    return y


def attention(model: Checkpoint, layer: int, x: Array) -> Array:
    """Causal grouped-query attention. x [n, d] -> [n, d]."""
    config, weights, n = model.config, model.weights, len(x)
    prefix = f"model.layers.{layer}.self_attn."

    def project(name: str, heads: int) -> Array:
        """-> [n, heads, head_dim]: projection, bias, full norm, clip, split into heads, per-head norm."""
        source = "k" if name == "v" and config.keys_are_values and config.keys_are_values[layer] else name
        y = linear(model, f"{prefix}{source}_proj.weight", x) if name != "q" else queries
        if config.qkv_bias:
            y = y + weights[f"{prefix}{name}_proj.bias"]
        if config.qk_norm == "full" and name != "v":
            y = rms_norm(y, weights[f"{prefix}{name}_norm.weight"], config.norm_eps)
        if config.qkv_clip is not None:
            y = np.clip(y, -config.qkv_clip, config.qkv_clip)
        y = y.reshape(n, heads, -1)
        if config.qk_norm == "head" and name != "v":
            y = rms_norm(y, weights[f"{prefix}{name}_norm.weight"] + config.unit_offset, config.norm_eps)
        return y

    queries = linear(model, prefix + "q_proj.weight", x)
    if config.family in DELTA:  # beside the query of each head stands its gate
        queries, gate = by_key_head(queries, config.n_heads, (config.head_dim, config.head_dim))
    rotates = not config.rotates or config.rotates[layer]
    n_kv_heads = config.own_kv_heads[layer] if config.own_kv_heads else config.n_kv_heads
    q, k = project("q", config.n_heads), project("k", n_kv_heads)
    if rotates:
        q, k = turn(config, layer, q), turn(config, layer, k)
    if rotates and config.qk_norm == "after":
        q, k = (rms_norm(y, np.ones(config.head_dim), config.norm_eps) for y in (q, k))
    if config.temperature and not rotates:
        step, strength = config.temperature
        q = q * (1 + strength * np.log1p(np.floor((np.arange(n) + 1) / step)))[:, None, None]
    v = project("v", n_kv_heads)
    if config.value_norm:
        v = rms_norm(v, np.ones(v.shape[-1]), config.norm_eps)
    k, v = held(k), held(v)
    group = config.n_heads // n_kv_heads  # query head h reads key/value head h // group
    query, key = np.indices((n, n))
    window = config.windows[layer] or n
    hidden = (key > query) | (key < query // window * window if config.aligned else key <= query - window)
    out = np.empty_like(q)
    for h in range(config.n_heads):
        scores = q[:, h] @ k[:, h // group].T * config.attn_scale  # [n, n]
        scores = np.where(hidden, -np.inf, scores)
        if config.gpt_oss:  # one more score, of no key
            sink = np.full((n, 1), weights[prefix + "sinks"][h])
            scores = np.concatenate([scores, sink], axis=1)
        out[:, h] = softmax(scores)[:, :n] @ v[:, h // group]
    out = out.reshape(n, -1) / (1 + np.exp(-gate)) if config.family in DELTA else out.reshape(n, -1)
    y = linear(model, prefix + "o_proj.weight", out)
    return y + weights[prefix + "o_proj.bias"] if config.out_bias else y


def delta_network(model: Checkpoint, layer: int, x: Array) -> Array:
    """A gated delta network in place of attention. x [n, d] -> [n, d]."""
    config, weights, n = model.config, model.weights, len(x)
    at = f"model.layers.{layer}.linear_attn."
    key_heads, heads, key_dim, value_dim = config.delta
    group = heads // key_heads
    if config.family == "qwen3_next":  # by key head: its query, its key, its heads' values, their gates
        sizes = (key_dim, key_dim, group * value_dim, group * value_dim)
        *qkv, z = by_key_head(linear(model, at + "in_proj_qkvz.weight", x), key_heads, sizes)
        b, a = by_key_head(x @ weights[at + "in_proj_ba.weight"].T, key_heads, (group, group))
        mixed = np.concatenate(qkv, axis=-1)
    else:
        mixed, z = (linear(model, f"{at}in_proj_{part}.weight", x) for part in ("qkv", "z"))
        b, a = (x @ weights[f"{at}in_proj_{part}.weight"].T for part in "ba")
    mixed = silu(convolve(mixed, weights[at + "conv1d.weight"][:, 0]))
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)
    q, k = (np.repeat(unit(y.reshape(n, key_heads, key_dim)), group, axis=1) for y in (q, k))
    beta = 1 / (1 + np.exp(-b))
    decay = np.exp(-np.exp(weights[at + "A_log"]) * np.log1p(np.exp(a + weights[at + "dt_bias"])))
    out = gated_delta(q, k, v.reshape(n, heads, value_dim), beta, decay)
    out = rms_norm(out, weights[at + "norm.weight"], config.norm_eps) * silu(z.reshape(out.shape))
    return linear(model, at + "out_proj.weight", out.reshape(n, -1))


def short_convolution(model: Checkpoint, layer: int, x: Array) -> Array:
    """A convolution between two gates, in place of attention. x [n, d] -> [n, d]."""
    at = f"model.layers.{layer}.conv."
    before, after, values = np.split(linear(model, at + "in_proj.weight", x), 3, axis=-1)
    mixed = convolve(before * values, model.weights[at + "conv.weight"][:, 0])
    return linear(model, at + "out_proj.weight", after * mixed)


def latent_attention(model: Checkpoint, layer: int, x: Array) -> Array:
    """Multi-head latent attention as the paper has it, keys and values made of the latent. x [n, d]."""
    config, weights, n = model.config, model.weights, len(x)
    assert config.latent is not None
    plain, value, q_rank, rank = config.latent
    prefix = f"model.layers.{layer}.self_attn."
    q = x
    if q_rank:
        q = rms_norm(
            linear(model, prefix + "q_a_proj.weight", x), weights[prefix + "q_a_layernorm.weight"], 1e-6
        )
    q = linear(model, prefix + ("q_b_proj.weight" if q_rank else "q_proj.weight"), q)
    q_plain, q_rope = np.split(q.reshape(n, config.n_heads, -1), [plain], axis=-1)
    latent, k_rope = np.split(linear(model, prefix + "kv_a_proj_with_mqa.weight", x), [rank], axis=-1)
    latent = rms_norm(latent, weights[prefix + "kv_a_layernorm.weight"], 1e-6)

    def turn(y: Array) -> Array:
        """[n, heads, rope]. If neighbours turn together they are set half apart: scores stay the same."""
        halves = np.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)
        return rotate(halves if config.interleaved else y, config.inv_freq, config.rope_scale)

    q_rope, k_rope, latent = turn(q_rope), held(turn(k_rope[:, None])[:, 0]), held(latent)
    out = np.empty((n, config.n_heads, value))
    up = weights[prefix + "kv_b_proj.weight"].reshape(config.n_heads, plain + value, rank)
    rounded = (lambda y: y) if model.activations is None else model.activations
    for h in range(config.n_heads):
        # (q_plain . K latent) = (K^T q_plain) . latent: what is rounded is the vector that meets the matrix
        scores = rounded(q_plain[:, h]) @ up[h, :plain] @ latent.T + q_rope[:, h] @ k_rope.T
        future = np.triu(np.ones((n, n), bool), 1)
        attended = softmax(np.where(future, -np.inf, scores * config.attn_scale)) @ latent
        out[:, h] = rounded(attended) @ up[h, plain:].T
    return linear(model, prefix + "o_proj.weight", out.reshape(n, -1))


def gated_ffn(model: Checkpoint, names: Sequence[str], x: Array, scale: Array | float = 1.0) -> Array:
    """down(SiLU(gate x) * up x). x [n, d], times a scale [n, 1]; names of gate and up [f, d], down [d, f].
    What a weight type rounds is x without the scale."""
    gate, up, down = names
    if model.config.gpt_oss:
        g, u = (linear(model, n, x) + model.weights[n.replace("weight", "bias")] for n in (gate, up))
        g, u = np.minimum(g, model.config.clamp), np.clip(u, -model.config.clamp, model.config.clamp)
        inner = (u + 1) * g / (1 + np.exp(-1.702 * g))
        return linear(model, down, inner) + model.weights[down.replace("weight", "bias")]
    if model.config.gelu:
        g = linear(model, gate, x)
        bent = g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2
        return linear(model, down, bent * linear(model, up, x))
    return linear(model, down, silu(scale * linear(model, gate, x)) * scale * linear(model, up, x))


def route(config: Config, layer: int, logits: Array, bias: Array | float = 0.0) -> Routing:
    """The k experts with the largest score (plus bias), of the best groups if there are any; their scores
    without bias are the weights, divided by their sum only where the model says so, times a constant."""
    if config.near:
        return choose_in_turn(config, layer, logits)
    scores = 1 / (1 + np.exp(-logits)) if config.sigmoid else softmax(logits)  # [n, E]
    choice = (logits if config.on_input else scores) + bias
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
        total = chosen.sum(axis=-1, keepdims=True) + (config.norm_add if config.sigmoid else 0)
        chosen = chosen / np.maximum(total, config.norm_min)
    return Routing(layer, logits, experts, chosen * config.router_scale, choice)


def choose_in_turn(config: Config, layer: int, logits: Array) -> Routing:
    """SparseMixer at inference, row by row: the best of those left, and its share in a softmax over those
    left whose distance from it, relative to the larger of its logit and their size, is small."""
    experts = np.empty((len(logits), config.n_experts_used), np.int64)
    weights = np.empty(experts.shape)
    for row, values in enumerate(logits):
        left = list(range(len(values)))
        for i in range(config.n_experts_used):
            best = max(left, key=lambda e: (values[e], -e))
            top = values[best]
            near = [e for e in left if (top - values[e]) / max(abs(values[e]), top) <= config.near]
            experts[row, i], weights[row, i] = best, 1 / sum(np.exp(values[e] - top) for e in near)
            left.remove(best)
    return Routing(layer, logits, experts, weights, logits)


def shared_expert(model: Checkpoint, layer: int, x: Array) -> Array:
    """An expert that every token visits, scaled by the sigmoid of its own one-row router if it has one."""
    prefix = f"model.layers.{layer}.mlp."
    out = gated_ffn(model, ffn_names(f"{prefix}{model.config.shared}."), x)
    if model.config.shared != "shared_expert" or not model.config.shared_gate:
        return out
    gate = 1 / (1 + np.exp(-(x @ model.weights[prefix + "shared_expert_gate.weight"].T)))  # [n, 1]
    return np.asarray(gate * out)


def beside(model: Checkpoint, layer: int, x: Array) -> tuple[Array, Routing]:
    """Experts and a dense feed-forward side by side, of the residual stream x [n, d], each with norms before
    and behind; the router has one too."""
    config, at = model.config, f"model.layers.{layer}."
    dense = gated_ffn(model, ffn_names(at + "mlp."), norm(model, at + "pre_feedforward_layernorm", x))
    scale = model.weights[at + "mlp.gate.scale"] * x.shape[-1] ** -0.5
    logits = rms_norm(x, scale, config.norm_eps) @ model.weights[at + "mlp.gate.weight"].T
    routing = route(config, layer, logits)
    factors = model.weights[at + "mlp.gate.per_expert_scale"][routing.experts]
    routing = routing._replace(weights=routing.weights * factors)
    out = experts(model, layer, norm(model, at + "pre_feedforward_layernorm_2", x), routing)
    both = norm(model, at + "post_feedforward_layernorm_1", dense)
    return both + norm(model, at + "post_feedforward_layernorm_2", out), routing


def mixture(model: Checkpoint, layer: int, x: Array) -> tuple[Array, Routing]:
    """The MoE feed-forward. x [n, d] -> ([n, d], what was routed where)."""
    config = model.config
    gate = router_name(config, layer)
    bias = model.weights.get(gate + "e_score_correction_bias", 0.0)
    logits = x @ model.weights[gate + "weight"].T + model.weights.get(gate + "bias", 0.0)
    routing = route(config, layer, logits, bias)
    y = experts(model, layer, x, routing)
    return (y + shared_expert(model, layer, x) if config.shared else y), routing


def experts(model: Checkpoint, layer: int, x: Array, routing: Routing) -> Array:
    """What the chosen experts say, weighted. x [n, d] -> [n, d]."""
    config, y = model.config, np.zeros_like(x)
    for expert in range(config.n_experts):
        rows, slots = np.nonzero(routing.experts == expert)
        if len(rows):
            weights, names = routing.weights[rows, slots, None], expert_names(config, layer, expert)
            if config.on_input:
                y[rows] += gated_ffn(model, names, x[rows], weights)
            else:
                y[rows] += weights * gated_ffn(model, names, x[rows])
    return y


# ---------------------------------------------------------------------------------------------------- use


def forward(model: Checkpoint, ids: Sequence[int] | Ints) -> tuple[Array, list[Routing]]:
    """Logits [n, n_vocab] of every position and the routing of every MoE layer, in layer order."""
    config, weights = model.config, model.weights
    x = weights["model.embed_tokens.weight"][np.asarray(ids)] * config.embed_scale  # [n, d]
    routings = []
    for n in range(config.n_layers):
        prefix = f"model.layers.{n}."
        attend = latent_attention if config.latent else attention
        if config.linear[n]:
            attend = short_convolution if config.short else delta_network
        names = [prefix + name for name in norm_names(config)]
        out = attend(model, n, norm(model, names[0], x))
        x = x + config.residual_scale * (norm(model, names[2], out) if config.post_norm else out)
        normed = norm(model, names[1], x)
        if config.moe_layers[n]:
            out, routing = beside(model, n, x) if config.beside else mixture(model, n, normed)
            routings.append(routing)
        else:
            out = gated_ffn(model, ffn_names(prefix + "mlp."), normed)
        x = x + config.residual_scale * (norm(model, names[3], out) if config.post_norm else out)
        x = x * weights[prefix + "layer_scalar"] if config.layer_scale else x
    x = norm(model, "model.norm", x)
    logits = linear(model, "model.embed_tokens.weight" if config.tied else "lm_head.weight", x)
    if config.cap:
        logits = config.cap * np.tanh(logits / config.cap)
    return logits * config.logit_scale + weights.get("lm_head.bias", 0.0), routings


def greedy(model: Checkpoint, ids: Sequence[int], n_new: int) -> list[int]:
    """n_new ids, each the argmax (lowest id of equals) after all before it; all is recomputed each time."""
    ids = list(ids)
    for _ in range(n_new):
        logits, _ = forward(model, ids)
        ids.append(int(np.argmax(logits[-1])))
    return ids[len(ids) - n_new :]
