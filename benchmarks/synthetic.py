"""Writes random checkpoints of named shapes as Hugging Face directories: speed can be measured on models of
any size without downloading one.

Owns: tensor names, value ranges, sharding. Sizes, config.json and tokenizer are colibri.analysis.shapes'.
Refuses: meaning. The values keep activations and logits in the range of a trained model, the text is noise.
Memory: one tensor at a time; the largest is the embedding.

    python benchmarks/synthetic.py qwen3-moe-1b OUTDIR
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from colibri.analysis.shapes import END_OF_TEXT, Shape, config_json, tokenizer_json
from colibri.analysis.shapes import SHAPES as NAMED

SHARD_BYTES = 1 << 30
TINY = Shape("qwen3_moe", 3, 256, 4, 2, 64, 8, 2, 128, 4096)  # to try the benchmarks themselves
SHAPES = {"tiny": TINY} | {name: shape for name, shape in NAMED.items() if shape.family != "mixtral"}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor in file order."""
    d, q, kv = shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    q_norm, k_norm = (q, kv) if shape.family == "olmoe" else (shape.head_dim, shape.head_dim)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.n_vocab, d)}
    for layer in range(shape.n_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (d,),
            f"{at}.self_attn.q_proj.weight": (q, d),
            f"{at}.self_attn.k_proj.weight": (kv, d),
            f"{at}.self_attn.v_proj.weight": (kv, d),
            f"{at}.self_attn.q_norm.weight": (q_norm,),
            f"{at}.self_attn.k_norm.weight": (k_norm,),
            f"{at}.self_attn.o_proj.weight": (d, q),
            f"{at}.post_attention_layernorm.weight": (d,),
            f"{at}.mlp.gate.weight": (shape.n_experts, d),
        }
        for expert in range(shape.n_experts):
            shapes |= {
                f"{at}.mlp.experts.{expert}.gate_proj.weight": (shape.n_ff_expert, d),
                f"{at}.mlp.experts.{expert}.up_proj.weight": (shape.n_ff_expert, d),
                f"{at}.mlp.experts.{expert}.down_proj.weight": (d, shape.n_ff_expert),
            }
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (shape.n_vocab, d)}


def values(name: str, size: tuple[int, ...], n_layers: int, seed: int) -> npt.NDArray[Any]:
    """bf16 values that depend on the seed and the tensor's name only. Matrices keep the size of what they
    read; those that add to the residual stream are smaller, so that it keeps its size over the layers; the
    output head is larger, so that logits (deviation 3) single out few tokens, as trained models' do."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = generator.standard_normal(size, dtype=np.float32)
    if len(size) == 1:
        return (1 + np.float32(0.1) * noise).astype(ml_dtypes.bfloat16)
    gain = 1.0
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        gain = (2 * n_layers) ** -0.5
    elif name.startswith("lm_head"):
        gain = 3.0
    elif name.startswith("model.embed_tokens"):
        gain = size[-1] ** 0.5
    noise *= np.float32(gain / size[-1] ** 0.5)
    return noise.astype(ml_dtypes.bfloat16)


def shards(sizes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Consecutive tensors of at most SHARD_BYTES together."""
    part: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, size in sizes.items():
        n_bytes = 2 * int(np.prod(size))
        if part and held + n_bytes > SHARD_BYTES:
            yield part
            part, held = {}, 0
        part[name] = size
        held += n_bytes
    yield part


def write_header(file: BinaryIO, sizes: dict[str, tuple[int, ...]]) -> None:
    """The header of a safetensors file: length, then JSON padded with spaces to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in sizes.items():
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_checkpoint(shape: Shape, out: Path, seed: int) -> int:
    """Writes the directory; the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    parts = list(shards(tensor_shapes(shape)))
    weight_map: dict[str, str] = {}
    total = 0
    for number, sizes in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with (out / name).open("wb") as file:
            write_header(file, sizes)
            for tensor, size in sizes.items():
                file.write(values(tensor, size, shape.n_layers, seed).view(np.uint16).tobytes())
                weight_map[tensor] = name
                total += 2 * int(np.prod(size))
        print(f"{name} written, {total / 1e9:.2f} GB so far", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    for file_name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", config_json(shape)),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", settings),
    ):
        (out / file_name).write_text(json.dumps(content, indent=2), "utf-8")
    (out / "tokenizer.json").write_text(tokenizer_json(shape.n_vocab), "utf-8")
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Writes a random checkpoint as a Hugging Face directory.")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    total = write_checkpoint(shape, args.out, args.seed)
    held, used = (shape.parameters(count) / 1e9 for count in (shape.n_experts, shape.n_experts_used))
    print(
        f"{args.out}: {total / 1e9:.2f} GB, {held:.3f} billion parameters, of which a token uses {used:.3f}"
    )


if __name__ == "__main__":
    main()
