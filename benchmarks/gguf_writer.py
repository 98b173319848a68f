"""Writes a GGUF file of a named shape with random quantised weights, for the engines that read this format.

Owns: tensor names and keys of the qwen3moe graph, under which every shape is written: it is the one
mixture-of-experts graph that all engines compared here have, and its matrices are those of the shape. Blocks
are drawn as blocks (Q8_0, Q4_K), with scales that keep activations and logits in the range of a trained
model. Refuses: quantising given weights, a tokenizer (there is none in the file), meaning.
Memory: one tensor at a time, the largest being a layer's stack of experts.

Needs the package gguf. The same shape, type and seed give the same bytes.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.analysis.shapes import Shape

ARCHITECTURE = "qwen3moe"
QUANTISED = {"q8": "Q8_0", "q4": "Q4_K"}  # our weight type, theirs; 8.5 and 4.5 bits a weight both
POOL_ROWS = 2048  # rows drawn for a kind of matrix; its tensors are made of these
BLOCK_ROWS = 1 << 16  # rows copied at a time
Bytes = npt.NDArray[np.uint8]
Tensor = tuple[str, str, tuple[int, ...]]  # name, kind of matrix ("" for f32), shape with rows last but one


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Every tensor in file order. Shapes are numpy's: the innermost dimension last."""
    d, q, kv = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    e, ff = shape.n_experts, shape.n_ff_expert
    yield "token_embd.weight", "embedding", (shape.n_vocab, d)
    for layer in range(shape.n_layers):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", "", (d,)
        yield f"{at}.attn_q.weight", "q", (q, d)
        yield f"{at}.attn_k.weight", "k", (kv, d)
        yield f"{at}.attn_v.weight", "v", (kv, d)
        yield f"{at}.attn_q_norm.weight", "", (shape.head_dim,)
        yield f"{at}.attn_k_norm.weight", "", (shape.head_dim,)
        yield f"{at}.attn_output.weight", "attn_out", (d, q)
        yield f"{at}.ffn_norm.weight", "", (d,)
        yield f"{at}.ffn_gate_inp.weight", "", (e, d)
        yield f"{at}.ffn_gate_exps.weight", "gate", (e, ff, d)
        yield f"{at}.ffn_up_exps.weight", "up", (e, ff, d)
        yield f"{at}.ffn_down_exps.weight", "down", (e, d, ff)
    yield "output_norm.weight", "", (d,)
    yield "output.weight", "output", (shape.n_vocab, d)


def deviation(kind: str, cols: int, n_layers: int) -> float:
    """Of the weights: matrices keep the size of what they read; those that add to the residual stream are
    smaller, so that it keeps its size over the layers; the output head gives logits of deviation 3."""
    if kind in ("attn_out", "down"):
        return float((2 * n_layers * cols) ** -0.5)
    root = math.sqrt(cols)
    return {"output": 3.0, "embedding": root}.get(kind, 1.0) / root


def q8_0(random: np.random.Generator, rows: int, cols: int, size: float) -> Bytes:
    """[rows, bytes]; a block of 32 weights: scale f16, 32 int8. Gaussian, cut at 3.5 deviations."""
    blocks = np.empty((rows, cols // 32, 34), np.uint8)
    scale = size * 3.5 / 127 * random.uniform(0.8, 1.2, (rows, cols // 32, 1))
    blocks[..., :2] = scale.astype("<f2").view(np.uint8)
    noise = random.standard_normal((rows, cols // 32, 32), dtype=np.float32) * np.float32(127 / 3.5)
    blocks[..., 2:] = np.clip(np.rint(noise), -127, 127).astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_k(random: np.random.Generator, rows: int, cols: int, size: float) -> Bytes:
    """[rows, bytes]; a block of 256 weights: d and dmin f16, 8 scales and 8 minima of 6 bits in 12 bytes,
    256 nibbles. A weight is d * scale * nibble - dmin * minimum: with equal scale and minimum, and dmin of
    7.5 d, it is d * scale * (nibble - 7.5), uniform around zero. Scales are below 16: the upper two of their
    6 bits are empty."""
    if cols % 256:
        raise ValueError(f"Q4_K: expected rows of a multiple of 256 weights, found {cols}")
    blocks = np.empty((rows, cols // 256, 144), np.uint8)
    scales = random.integers(4, 13, (rows, cols // 256, 8), dtype=np.uint8)
    d = np.full((rows, cols // 256, 1), size / (8.4 * 4.61), np.float64)  # mean square of scales, nibbles
    blocks[..., 0:2] = d.astype("<f2").view(np.uint8)
    blocks[..., 2:4] = (7.5 * d).astype("<f2").view(np.uint8)
    blocks[..., 4:8] = blocks[..., 8:12] = scales[..., :4]
    blocks[..., 12:16] = scales[..., 4:] | scales[..., 4:] << 4
    blocks[..., 16:] = random.integers(0, 256, (rows, cols // 256, 128), dtype=np.uint8)
    return blocks.reshape(rows, -1)


DRAW: dict[str, Callable[[np.random.Generator, int, int, float], Bytes]] = {"q8": q8_0, "q4": q4_k}


def describe(writer: Any, name: str, shape: Shape) -> None:
    """The keys."""
    writer.add_name(f"random {name}")
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff_expert * shape.n_experts_used)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.n_experts_used)
    writer.add_expert_feed_forward_length(shape.n_ff_expert)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")


def write(name: str, shape: Shape, type: str, out: Path, seed: int = 0) -> None:
    """Writes the file; it appears under its name when it is complete."""
    gguf: Any = importlib.import_module("gguf")
    quantised = getattr(gguf.GGMLQuantizationType, QUANTISED[type])
    pools: dict[tuple[str, int], Bytes] = {}

    def pool(kind: str, cols: int) -> Bytes:
        if (kind, cols) not in pools:
            random = np.random.default_rng([seed, zlib.crc32(f"{kind} {cols}".encode())])
            pools[kind, cols] = DRAW[type](random, POOL_ROWS, cols, deviation(kind, cols, shape.n_layers))
        return pools[kind, cols]

    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    describe(writer, name, shape)
    for tensor, kind, size in tensors(shape):
        if kind:
            stored = (*size[:-1], pool(kind, size[-1]).shape[1])
            writer.add_tensor_info(tensor, stored, np.dtype(np.uint8), int(np.prod(stored)), quantised)
        else:
            writer.add_tensor_info(tensor, size, np.dtype(np.float32), 4 * int(np.prod(size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind, size in tensors(shape):
        random = np.random.default_rng([seed, zlib.crc32(tensor.encode())])
        if kind:
            writer.write_tensor_data(rows_of(pool(kind, size[-1]), random, int(np.prod(size[:-1]))))
        else:
            noise = random.standard_normal(size, dtype=np.float32)
            router = len(size) == 2
            values = noise / np.float32(size[-1] ** 0.5) if router else 1 + np.float32(0.1) * noise
            writer.write_tensor_data(values.astype(np.float32))
    writer.close()
    part.rename(out)


def rows_of(pool: Bytes, random: np.random.Generator, rows: int) -> Bytes:
    """[rows, bytes], each row one of the pool's."""
    chosen = random.integers(0, len(pool), rows)
    made = np.empty((rows, pool.shape[1]), np.uint8)
    for first in range(0, rows, BLOCK_ROWS):
        np.take(pool, chosen[first : first + BLOCK_ROWS], axis=0, out=made[first : first + BLOCK_ROWS])
    return made
