"""Attention and feed-forward by the fields of a file: every mechanism against the rule written out in numpy.

Owns: sinks, windows, biases of gate logits and experts, the clamped activation; on random models without
      rotation, from the tensors of the file itself.
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
    "a scale of embeddings": {"embed_scale": 12.0},
    "a scale of what layers add": {"residual_scale": 0.22},
    "norms with a mean and a bias": {"layer_norm": 1},
    "logits with a bias": {"output_bias": 1},
    "all of them": {
        "layer_norm": 1,
        "output_bias": 1,
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
                writer.write(entry.name, [random.standard_normal(entry.cols).astype("<f4").tobytes()])
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

    def norm(self, x: Array, name: str) -> Array:
        if self.config["layer_norm"]:
            x = x - x.mean(axis=-1, keepdims=True)
        mean = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean + self.config["norm_eps"]) * self.vector(name)
        return normed + self.vector(name + "_bias")


def attention(file: File, at: str, x: Array, window: int) -> Array:
    """x [n, n_embd] normalised."""
    config, n = file.config, len(x)
    q, k, v = (
        (x @ file.matrices(f"{at}attn_{part}")[0].T).reshape(n, -1, config["head_dim"]) for part in "qkv"
    )
    sinks, group = file.vector(at + "attn_sinks", -np.inf), config["n_heads"] // config["n_kv_heads"]
    out = np.empty_like(q)
    query, key = np.indices((n, n))
    seen = (key <= query) & (key > query - (window or n))
    for head in range(config["n_heads"]):
        scores = q[:, head] @ k[:, head // group].T * config["attn_scale"]
        weights = np.exp(np.where(seen, scores, -np.inf))
        sink = np.exp(np.broadcast_to(sinks, config["n_heads"])[head])
        total = weights.sum(axis=1, keepdims=True) + sink
        out[:, head] = weights @ v[:, head // group] / total
    return out.reshape(n, -1) @ file.matrices(at + "attn_out")[0].T


def gated(file: File, x: Array, parts: list[Array], biases: list[Any] | None = None) -> Array:
    (gate, up, down), (gate_bias, up_bias, down_bias) = parts, biases or [0, 0, 0]
    config, g, u = file.config, x @ gate.T + gate_bias, x @ up.T + up_bias
    if limit := config["ffn_limit"]:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    inner = (u + config["ffn_up_offset"]) * g / (1 + np.exp(-config["ffn_alpha"] * g))
    out: Array = inner @ down.T + down_bias
    return out


def experts(file: File, at: str, x: Array) -> Array:
    config = file.config
    logits = x @ file.matrices(at + "router")[0].T + file.vector(at + "router_logit_bias")
    n_ff, n_embd = config["n_ff_expert"], config["n_embd"]
    widths, y = (("gate", n_ff), ("up", n_ff), ("down", n_embd)), np.zeros_like(x)
    for row in range(len(x)):
        best = np.argsort(-logits[row], kind="stable")[: config["n_experts_used"]]
        weights = np.exp(logits[row, best] - logits[row].max())
        for expert, weight in zip(best, weights / weights.sum(), strict=True):
            biases = [
                file.vector(f"{at}experts_{part}_bias").reshape(-1, width)[expert]
                for part, width in widths
                if config["expert_bias"]
            ]
            y[row] += weight * gated(file, x[row], file.matrices(f"{at}experts.{expert}"), biases)
    return y


def forward(path: Path, ids: npt.ArrayLike) -> Array:
    file = File(path)
    x = file.matrices("embedding")[0][np.asarray(ids)] * file.config["embed_scale"]
    added = file.config["residual_scale"]
    for layer, n_experts in enumerate(file.config["n_experts"]):
        at = f"layers.{layer}."
        window = file.config["window"][layer]
        x = x + added * attention(file, at, file.norm(x, at + "attn_norm"), window)
        normed = file.norm(x, at + "ffn_norm")
        if n_experts:
            x = x + added * experts(file, at, normed)
        else:
            parts = [file.matrices(f"{at}ffn_{part}")[0] for part in ("gate", "up", "down")]
            x = x + added * gated(file, normed, parts)
    return file.norm(x, "output_norm") @ file.matrices("output")[0].T + file.vector("output_bias")


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_the_one_written_out(name: str, tmp_path: Path) -> None:
    """One thread and a chunk of all rows, then four threads and single rows, which share out blocks."""
    path = write(tmp_path / "m.colibri", RULES[name])
    ids = np.random.default_rng(1).integers(0, 64, N_IDS).tolist()
    expected = forward(path, ids)
    with engine(path, threads=1, chunk=N_IDS) as run:
        found = run.feed(ids)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    with engine(path, threads=4, chunk=1) as run:
        assert run.feed(ids).tobytes() == found.tobytes()
    if RULES[name]:  # the rule must matter
        assert np.abs(forward(write(tmp_path / "n.colibri", {}), ids) - expected).max() > 0.1
