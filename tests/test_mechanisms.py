"""Attention and feed-forward by the fields of a file: every mechanism against the rule written out in numpy.

Owns: sinks, windows, biases of gate logits and experts, activations, biases by distance, sinusoids, encoders
      with cross attention and expert capacity; on random models without rotation, from the tensors of the
      file itself.
Refuses: families and checkpoints (test_parity.py), the router's rules (test_router.py), bits (test_bits.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from colibri.format import Writer, read_container, read_entry
from colibri.quantize import pack, unpack
from fixtures.native import engine

Array = npt.NDArray[Any]
N_IDS = 300  # positions in three blocks of the cache
CONFIG: dict[str, Any] = {
    "n_vocab": 64, "n_vocab_used": 64, "n_layers": 2, "n_embd": 72, "n_heads": 4, "n_kv_heads": 2,
    "head_dim": 8, "rope_dim": 0, "context_length": 512, "norm_eps": 1e-6, "attn_scale": 0.4, "n_ff": 52,
    "n_experts": [0, 6], "n_experts_used": 2, "n_ff_expert": 44, "router_norm": 1,
}  # fmt: skip
ENCODER: dict[str, Any] = {"n_layers": 4, "n_encoder_layers": 2, "n_experts": [0, 6, 6, 0]}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "sinks": {"attn_sinks": 1},
    "window inside a block, all keys": {"window": [20, 0]},
    "window of a block, of one key": {"window": [128, 1]},
    "window over blocks, sinks": {"window": [0, 150], "attn_sinks": 1},
    "gate logits with a bias": {"router_logit_bias": 1},
    "experts with biases": {"expert_bias": 1},
    "a limit alone": {"ffn_limit": 0.6},
    "a clamped activation": {"ffn_limit": 1.5, "ffn_alpha": 1.702, "ffn_up_offset": 1.0},
    "aligned windows": {"window": [20, 150], "window_aligned": 1},
    "queries scaled by position": {"temperature_step": 50, "rope_set": [2, 0]},
    "weights on what experts read": {"router_score": 2, "router_on_input": 1, "router_norm": 0},
    "what is added is normalised": {"post_norm": 1},
    "values normalised": {"value_norm": 1},
    "heads of a layer's own": {"own_head_dim": [0, 20], "own_kv_heads": [4, 1]},
    "narrower heads of a layer's own, all that": {
        "own_head_dim": [5, 0],
        "qk_norm": 1,
        "attn_qkv_bias": 1,
        "attn_gate": 1,
        "attn_sinks": 1,
        "value_norm": 1,
        "window": [0, 150],
    },
    "a factor behind each layer": {"post_norm": 1, "layer_scale": 1},
    "a dense feed-forward beside the experts": {"post_norm": 1, "parallel_dense": 1},
    "a factor of each expert": {"router_expert_scale": 1},
    "GELU": {"ffn_alpha": 1.5957691216, "ffn_cubic": 0.044715},
    "capped logits": {"output_cap": 2.0},
    "a scale of embeddings": {"embed_scale": 12.0},
    "a scale of what layers add": {"residual_scale": 0.22},
    "norms with a mean and a bias": {"layer_norm": 1},
    "logits with a bias": {"output_bias": 1},
    "ungated feed-forwards": {"ffn_ungated": 1},
    "ungated with biases": {"ffn_ungated": 1, "expert_bias": 1},
    "biases by distance": {"attn_bias_span": 40},
    "the shortest biases, a window": {"attn_bias_span": 16, "window": [100, 0]},
    "gated attention": {"attn_gate": 1},
    "sinusoids": {"sinusoids": 2},
    "an encoder": ENCODER,
    "an encoder, biases by distance": ENCODER | {"attn_bias_span": 150, "ffn_ungated": 1, "attn_qkv_bias": 1},
    "an encoder, experts with a capacity": ENCODER
    | {"expert_capacity": 30, "n_experts_used": 1, "router_norm": 0},
    "an encoder, everything": ENCODER
    | {
        "layer_norm": 1,
        "post_norm": 1,
        "attn_gate": 1,
        "sinusoids": 2,
        "attn_qkv_bias": 1,
        "attn_out_bias": 1,
        "attn_sinks": 1,
        "qk_norm": 1,
        "expert_bias": 1,
        "attn_bias_span": 20,
        "embed_scale": 8.0,
        "window": [0, 9, 60, 0],
    },
    "all of them": {
        "layer_norm": 1,
        "output_bias": 1,
        "post_norm": 1,
        "output_cap": 5.0,
        "ffn_cubic": 0.1,
        "embed_scale": 0.5,
        "residual_scale": 3.0,
        "attn_sinks": 1,
        "window": [100, 0],
        "router_logit_bias": 1,
        "expert_bias": 1,
        "ffn_limit": 2.0,
        "ffn_alpha": 1.702,
        "ffn_up_offset": 1.0,
    },
}


def write(path: Path, config: dict[str, Any]) -> Path:
    """A random model; vectors are of size 1, so that each of them matters."""
    random = np.random.default_rng(5)
    with Writer(path, CONFIG | config, "f32", {}) as writer:
        for entry in writer.tensors:
            if entry.kind == "vector":
                values = random.standard_normal(entry.cols).astype("<f4")
                if entry.name in (
                    "attn_bias",
                    "encoder_attn_bias",
                ):  # constant beyond: the outer 16 are equal
                    by_head = values.reshape(writer.config["n_heads"], -1)
                    by_head[:, :16], by_head[:, -16:] = by_head[:, :1], by_head[:, -1:]
                writer.write(entry.name, [values.tobytes()])
                continue
            parts = [random.standard_normal((r, c), np.float32) / np.float32(6) for r, c, _ in entry.matrices]
            writer.write(entry.name, [pack(part, "f32") for part in parts])
    return path


class File:
    """The tensors of a file, in float64."""

    def __init__(self, path: Path) -> None:
        self.container = read_container(path)
        self.config = self.container.config
        self.entries = {entry.name: entry for entry in self.container.entries}

    def vector(self, name: str, default: float = 0.0) -> Array:
        if name not in self.entries:
            return np.array(default)
        return np.frombuffer(read_entry(self.container, name), "<f4").astype(np.float64)

    def matrices(self, name: str) -> list[Array]:
        data, found, at = read_entry(self.container, name), [], 0
        for rows, cols, type in self.entries[name].matrices:
            size = -(-rows // 16) * 16 * cols * 4
            found.append(unpack(data[at : at + size], rows, cols, type).astype(np.float64))
            at += size
        return found

    def norm(self, x: Array, name: str, stream: bool = True) -> Array:
        """stream: of the residual stream."""
        if self.config["layer_norm"] and stream:
            x = x - x.mean(axis=-1, keepdims=True)
        mean = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean + self.config["norm_eps"]) * self.vector(name)
        biased: Array = normed + self.vector(name + "_bias") if stream else normed
        return biased

    def after(self, y: Array, name: str) -> Array:
        """What a block adds, normalised where the config says so."""
        if not self.config["post_norm"]:
            return y
        return self.rms(y, name + "_post_norm")

    def rms(self, y: Array, name: str) -> Array:
        mean = np.mean(y * y, axis=-1, keepdims=True)
        return np.asarray(y / np.sqrt(mean + self.config["norm_eps"]) * self.vector(name))


def attention(
    file: File, at: str, x: Array, window: int, keys: Array | None = None, biases: str = ""
) -> Array:
    """x [n, n_embd] normalised; keys [m, n_embd]: all of them are seen, else those of x up to each row;
    biases: the name of a vector by head and distance."""
    config, n, m = file.config, len(x), len(x if keys is None else keys)
    layer = int(at.split(".")[1])
    head_dim = config["own_head_dim"][layer] or config["head_dim"]

    def heads(rows: Array, part: str) -> Array:
        made = rows @ file.matrices(f"{at}attn_{part}")[0].T + file.vector(f"{at}attn_{part}_bias")
        made = made.reshape(len(rows), -1, head_dim)
        if part == "v" and config["value_norm"]:
            return np.asarray(made / np.sqrt(np.mean(made**2, axis=-1, keepdims=True) + config["norm_eps"]))
        return file.norm(made, f"{at}attn_{part}_norm", False) if config["qk_norm"] and part != "v" else made

    q, k, v = heads(x, "q"), *(heads(x if keys is None else keys, part) for part in "kv")
    sinks, group = file.vector(at + "attn_sinks", -np.inf), config["n_heads"] // k.shape[1]
    out = np.empty_like(q)
    query, key = np.indices((n, m))
    first = query // (window or n) * window if config["window_aligned"] else query + 1 - (window or n)
    seen = (key <= query) & (key >= first) | (keys is not None)
    if (step := config["temperature_step"]) and config["rope_set"][layer] == 2:
        q = q * (1 + file.vector("attn_temperature")[(np.arange(n) + 1) // step])[:, None, None]
    span = config["attn_bias_span"]
    by_distance = file.vector(biases).reshape(config["n_heads"], -1) if biases and span else None
    for head in range(config["n_heads"]):
        scores = q[:, head] @ k[:, head // group].T * config["attn_scale"]
        if by_distance is not None:
            scores = scores + by_distance[head][np.clip(key - query, -span, span) + span]
        weights = np.exp(np.where(seen, scores, -np.inf))
        sink = np.exp(np.broadcast_to(sinks, config["n_heads"])[head])
        total = weights.sum(axis=1, keepdims=True) + sink
        out[:, head] = weights @ v[:, head // group] / total
    out = out.reshape(n, -1)
    if config["attn_gate"]:
        out /= 1 + np.exp(-x @ file.matrices(at + "attn_gate")[0].T)
    return out @ file.matrices(at + "attn_out")[0].T + file.vector(at + "attn_out_bias")


def gated(file: File, x: Array, parts: list[Array], biases: list[Any] | None = None) -> Array:
    config, (gate, *others, down), (gate_bias, *up_bias, down_bias) = file.config, parts, biases or [0, 0, 0]
    g = x @ gate.T + gate_bias
    if config["ffn_ungated"]:
        ungated: Array = np.maximum(g, 0) @ down.T + down_bias
        return ungated
    u = x @ others[0].T + up_bias[0]
    if limit := config["ffn_limit"]:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if config["ffn_cubic"] and config["ffn_alpha"] < 1.6:
        silu = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    else:
        silu = g / (1 + np.exp(-config["ffn_alpha"] * (g + config["ffn_cubic"] * g**3)))
    inner = (u + config["ffn_up_offset"]) * silu
    out: Array = inner @ down.T + down_bias
    return out


def experts(file: File, at: str, x: Array, capacity: int = 0, read: Array | None = None) -> Array:
    """x is what the router reads, and the experts where `read` is not given."""
    config = file.config
    logits = x @ file.matrices(at + "router")[0].T + file.vector(at + "router_logit_bias")
    n_ff, n_embd = config["n_ff_expert"], config["n_embd"]
    names = ("gate", "down") if config["ffn_ungated"] else ("gate", "up", "down")
    widths, y = [(name, n_embd if name == "down" else n_ff) for name in names], np.zeros_like(x)
    taken = np.zeros(len(logits[0]), int)
    for row in range(len(x)):
        best = np.argsort(-logits[row], kind="stable")[: config["n_experts_used"]]
        weights = np.exp(logits[row, best] - logits[row].max())
        weights /= weights.sum() if config["router_norm"] else np.exp(logits[row] - logits[row].max()).sum()
        if config["router_score"] == 2:
            weights = 1 / (1 + np.exp(-logits[row, best]))
        if config["router_expert_scale"]:
            weights *= file.vector(at + "router_expert_scale")[best]
        for expert, weight in zip(best, weights, strict=True):
            taken[expert] += 1
            if capacity and taken[expert] > capacity:
                continue
            biases = [
                file.vector(f"{at}experts_{part}_bias").reshape(-1, width)[expert]
                for part, width in widths
                if config["expert_bias"]
            ]
            parts = file.matrices(f"{at}experts.{expert}")
            if config["router_on_input"]:
                y[row] += gated(file, weight * x[row], parts)
            else:
                y[row] += weight * gated(file, (x if read is None else read)[row], parts, biases)
    return y


def stack(file: File, layers: range, ids: npt.ArrayLike, source: Array | None) -> Array:
    """What the ids become behind some layers; source [m, n_embd]: what cross attention reads."""
    config, encoder = file.config, layers.start < file.config["n_encoder_layers"]
    x = file.matrices("embedding")[0][np.asarray(ids)] * config["embed_scale"]
    if config["sinusoids"]:
        places = (np.arange(len(x)) + config["sinusoids"]).astype(np.float32)
        angles = np.outer(places, file.vector("position_freq").astype(np.float32)).astype(np.float64)
        x = x + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    added = config["residual_scale"]
    for layer in layers:
        at = f"layers.{layer}."
        normed = file.norm(x, at + "attn_norm")
        biases = "encoder_attn_bias" if encoder else "attn_bias"
        keys = normed if encoder else None
        mixed = attention(file, at, normed, config["window"][layer], keys, biases)
        x = x + added * file.after(mixed, at + "attn")
        if source is not None:
            normed = file.norm(x, at + "cross_attn_norm")
            mixed = attention(file, at + "cross_", normed, 0, source)
            x = x + added * file.after(mixed, at + "cross_attn")
        normed = file.norm(x, at + "ffn_norm")
        names = [part for part in ("gate", "up", "down") if f"{at}ffn_{part}" in file.entries]
        parts = [file.matrices(f"{at}ffn_{part}")[0] for part in names]
        if config["n_experts"][layer] and config["parallel_dense"]:
            out = experts(file, at, file.rms(x, at + "router_norm"), read=file.rms(x, at + "expert_norm"))
            said = file.rms(gated(file, normed, parts), at + "dense_post_norm")
            said = said + file.rms(out, at + "expert_post_norm")
        elif config["n_experts"][layer]:
            said = experts(file, at, normed, config["expert_capacity"] if encoder else 0)
        else:
            said = gated(file, normed, parts, [file.vector(f"{at}ffn_{part}_bias") for part in names])
        x = x + added * file.after(said, at + "ffn")
        x = x * file.vector(at + "layer_scale", 1.0)
    found: Array = x
    return found


def forward(path: Path, ids: npt.ArrayLike, source: npt.ArrayLike) -> Array:
    file = File(path)
    n_encoder, n_layers = file.config["n_encoder_layers"], file.config["n_layers"]
    read = None
    if n_encoder:
        read = file.norm(stack(file, range(n_encoder), source, None), "encoder_norm")
    x = file.norm(stack(file, range(n_encoder, n_layers), ids, read), "output_norm")
    logits: Array = x @ file.matrices("output")[0].T + file.vector("output_bias")
    cap = file.config["output_cap"]
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_the_one_written_out(name: str, tmp_path: Path) -> None:
    """One thread and a chunk of all rows, then four threads and single rows, which share out blocks."""
    path = write(tmp_path / "m.colibri", RULES[name])
    ids, source = (
        np.random.default_rng(seed).integers(0, 64, n).tolist() for seed, n in ((1, N_IDS), (2, 200))
    )
    encoder = "n_encoder_layers" in RULES[name]
    expected = forward(path, ids, source)
    with engine(path, threads=1, chunk=N_IDS) as run:
        if encoder:
            run.encode(source)
        found = run.feed(ids)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    with engine(path, threads=4, chunk=len(source) if encoder else 1) as run:
        if encoder:
            run.encode(source)
        assert np.concatenate([run.feed([id]) for id in ids]).tobytes() == found.tobytes()
    if RULES[name]:  # the rule must matter
        plain = write(tmp_path / "n.colibri", ENCODER if encoder and RULES[name] != ENCODER else {})
        assert np.abs(forward(plain, ids, source) - expected).max() > 0.1
