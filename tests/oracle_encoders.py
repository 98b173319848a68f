"""Models with an encoder in slow, plain numpy: the second definition, beside oracle.py's decoders.

Role:    logits of a target for a source and what every router decided, from a Hugging Face directory.
Owns:    the formulas: buckets of distances, sinusoids, attention to a source, one or two experts a token, the
         capacity of an expert. float64, but for the angle of a sinusoid and the bucket's logarithm, which the
         references round to f32.
Refuses: importing colibri, speed, a cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oracle_reading import read_safetensors

Array = npt.NDArray[Any]


class Routing(NamedTuple):
    """Of the rows of one layer: gate logits [n, E], experts [n, k] best first, their weights."""

    logits: Array
    experts: Array
    weights: Array


class Model(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, Array]

    @property
    def switch(self) -> bool:
        return bool(self.config["model_type"] == "switch_transformers")


def load(directory: Path) -> Model:
    config = json.loads((directory / "config.json").read_text("utf-8"))
    found = read_safetensors(directory / "model.safetensors")
    return Model(config, {name.removeprefix("model."): w.astype(np.float64) for name, w in found.items()})


def linear(model: Model, name: str, x: Array) -> Array:
    bias = model.weights.get(f"{name}.bias", 0.0)
    return np.asarray(x @ model.weights[f"{name}.weight"].T + bias)


def norm(model: Model, name: str, x: Array) -> Array:
    weight = model.weights[f"{name}.weight"]
    if model.switch:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight)
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return np.asarray(scaled * weight + model.weights[f"{name}.bias"])


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def bucket(distance: int, n_buckets: int, farthest: int, both: bool) -> int:
    first = 0
    if both:
        n_buckets //= 2
        first, distance = (n_buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n_buckets // 2
    if distance < exact:
        return first + distance
    times = math.log(np.float32(distance) / np.float32(exact))
    ratio = np.float32(times) / np.float32(math.log(farthest / exact))
    return first + min(exact + int(ratio * np.float32(n_buckets - exact)), n_buckets - 1)


def biases(model: Model, stack: str, n: int, m: int) -> Array | float:
    """[heads, n, m] of keys m for queries n."""
    if not model.switch:
        return 0.0
    table = model.weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    c = model.config
    sizes = (c["relative_attention_num_buckets"], c["relative_attention_max_distance"])
    found = [[bucket(key - query, *sizes, stack == "encoder") for key in range(m)] for query in range(n)]
    return np.asarray(table[np.array(found)].transpose(2, 0, 1))


def attention(
    model: Model, name: str, x: Array, keys: Array, hidden: Array | None, bias: Array | float
) -> Array:
    """hidden [n, m]: the keys that a query does not see."""
    heads = model.config["num_heads" if model.switch else "encoder_attention_heads"]
    parts = ("q", "k", "v", "o") if model.switch else ("q_proj", "k_proj", "v_proj", "out_proj")
    q, k, v = (
        linear(model, f"{name}.{part}", rows).reshape(len(rows), heads, -1)
        for part, rows in zip(parts[:3], (x, keys, keys), strict=True)
    )
    scale = 1.0 if model.switch else q.shape[-1] ** -0.5
    scores = np.einsum("nhd,mhd->hnm", q, k) * scale + bias
    if hidden is not None:
        scores = np.where(hidden, -np.inf, scores)
    out = np.einsum("hnm,mhd->nhd", softmax(scores), v).reshape(len(x), -1)
    return linear(model, f"{name}.{parts[3]}", out)


def feed_forward(model: Model, name: str, x: Array) -> Array:
    first, second = ("wi", "wo") if model.switch else ("fc1", "fc2")
    return linear(model, f"{name}.{second}", np.maximum(linear(model, f"{name}.{first}", x), 0))


def mixture(model: Model, name: str, x: Array, capacity: int | None) -> tuple[Array, Routing]:
    logits = linear(model, f"{name}.router.classifier", x)
    scores = softmax(logits)
    experts = np.argsort(-scores, axis=-1, kind="stable")[:, : 1 if model.switch else 2]
    weights = np.take_along_axis(scores, experts, axis=-1)
    if not model.switch:
        kept = 1 - model.config["moe_token_dropout"]
        weights = weights / weights.sum(axis=-1, keepdims=True) * kept
    if capacity is not None:  # in the order of the tokens
        for e in range(logits.shape[1]):
            rows = np.flatnonzero(experts[:, 0] == e)
            weights[rows[capacity:]] = 0
    y = np.zeros_like(x)
    for row, (chosen, shares) in enumerate(zip(experts, weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            y[row] += share * feed_forward(model, f"{name}.experts.expert_{expert}", x[row : row + 1])[0]
    return y, Routing(logits, experts, weights)


def embed(model: Model, ids: Sequence[int]) -> Array:
    x = model.weights["shared.weight"][np.asarray(ids)]
    if model.switch:
        return np.asarray(x)
    width = x.shape[1]
    exponents = np.arange(width // 2).astype(np.float32) * -np.float32(math.log(10000) / (width // 2 - 1))
    steps = np.exp(exponents.astype(np.float64))
    places = np.arange(len(x)) + model.config["pad_token_id"] + 1
    angles = np.outer(places.astype(np.float32), steps.astype(np.float32)).astype(np.float64)
    return np.asarray(x * math.sqrt(width) + np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def stack_of(
    model: Model, stack: str, ids: Sequence[int], source: Array | None, found: list[Routing]
) -> Array:
    """The rows behind a stack's last norm; source: what its layers attend to as well."""
    x, n, decoder = embed(model, ids), len(ids), source is not None
    list_name = "block" if model.switch else "layers"
    bias = biases(model, stack, n, n)
    hidden = np.triu(np.ones((n, n), bool), 1) if decoder else None
    layer = 0
    while any(name.startswith(f"{stack}.{list_name}.{layer}.") for name in model.weights):
        at = f"{stack}.{list_name}.{layer}."
        if model.switch:
            last = 2 if decoder else 1
            attend = [f"{at}layer.{i}." for i in range(last)]
            names = [
                f"{one}{kind}"
                for one, kind in zip(attend, ("SelfAttention", "EncDecAttention"), strict=False)
            ]
            norms = [f"{one}layer_norm" for one in attend] + [f"{at}layer.{last}.layer_norm"]
            ffn = f"{at}layer.{last}.mlp"
        else:
            names = [at + "self_attn", at + "cross_attention"][: 1 + decoder]
            norms = [f"{name}_layer_norm" for name in names] + [at + "ff_layer_norm"]
            ffn = at + "ffn"
        normed = norm(model, norms[0], x)
        x = x + attention(model, names[0], normed, normed, hidden, bias)
        if source is not None:
            x = x + attention(model, names[1], norm(model, norms[1], x), source, None, 0.0)
        normed = norm(model, norms[-1], x)
        if f"{ffn}.router.classifier.weight" in model.weights:
            capacity = model.config["expert_capacity"] if model.switch and not decoder else None
            y, routing = mixture(model, ffn, normed, capacity)
            found.append(routing)
        else:
            y = feed_forward(model, ffn, normed)
        x, layer = x + y, layer + 1
    return norm(model, f"{stack}.{'final_layer_norm' if model.switch else 'layer_norm'}", x)


def forward(model: Model, source: Sequence[int], ids: Sequence[int]) -> tuple[Array, list[Routing]]:
    """Logits [n, n_vocab] of the ids of a target, and the routing of every layer with experts, encoder
    first. In the decoder experts have no capacity: it counts the tokens evaluated together, and those of a
    target come one by one."""
    found: list[Routing] = []
    x = stack_of(model, "decoder", ids, stack_of(model, "encoder", source, None, found), found)
    tied = model.config.get("tie_word_embeddings", True)
    if model.switch and tied:
        x = x * x.shape[1] ** -0.5
    return x @ model.weights["shared.weight" if tied else "lm_head.weight"].T, found


def greedy(model: Model, source: Sequence[int], start: Sequence[int], n: int) -> tuple[list[int], float]:
    """n ids, each the best after all before it, and the smallest lead of a best one."""
    ids, lead, found = list(start), math.inf, []  # type: list[int], float, list[Routing]
    read = stack_of(model, "encoder", source, None, found)
    for _ in range(n):
        x = stack_of(model, "decoder", ids, read, found)[-1:]
        tied = model.config.get("tie_word_embeddings", True)
        if model.switch and tied:
            x = x * x.shape[1] ** -0.5
        logits = (x @ model.weights["shared.weight" if tied else "lm_head.weight"].T)[0]
        order = np.sort(logits)
        lead = min(lead, float(order[-1] - order[-2]))
        ids.append(int(np.argmax(logits)))
    return ids[len(start) :], lead
