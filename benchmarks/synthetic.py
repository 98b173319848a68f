"""Writes random checkpoints of named shapes as Hugging Face directories: speed can be measured on models of
any size without downloading one.

Owns: the shapes, tensor names, value ranges, a tokenizer with as many ids as the embedding has rows.
Refuses: meaning. The values keep activations and logits in the range of a trained model, the text is noise.
Memory: one tensor at a time; the largest is the embedding.

    python benchmarks/synthetic.py moe-1b OUTDIR
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

SHARD_BYTES = 1 << 30
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by the names of docs/FORMAT.md."""

    family: str  # model_type of config.json
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    n_experts_used: int
    n_ff_expert: int
    n_vocab: int
    context_length: int = 4096

    @property
    def matrices(self) -> tuple[int, int]:
        """Elements of attention, and of one expert, of a layer."""
        heads = 2 * (self.n_heads + self.n_kv_heads) * self.head_dim
        return heads * self.n_embd, 3 * self.n_ff_expert * self.n_embd

    def parameters(self, experts: int) -> int:
        """Elements of all matrices if a layer has this many experts."""
        attention, expert = self.matrices
        layer = attention + experts * expert + self.n_experts * self.n_embd
        return 2 * self.n_vocab * self.n_embd + self.n_layers * layer


SHAPES = {
    "tiny": Shape("qwen3_moe", 3, 256, 4, 2, 64, 8, 2, 128, 4096),  # to try the benchmarks themselves
    "moe-1b": Shape("qwen3_moe", 12, 1024, 16, 4, 64, 32, 4, 768, 32000),
    "olmoe-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304),  # the sizes of OLMoE-1B-7B
}


def config_json(shape: Shape) -> dict[str, Any]:
    """config.json of the shape's family."""
    common: dict[str, Any] = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.n_vocab,
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "num_experts": shape.n_experts,
        "num_experts_per_tok": shape.n_experts_used,
        "max_position_embeddings": shape.context_length,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if shape.family == "olmoe":
        return common | {
            "architectures": ["OlmoeForCausalLM"],
            "intermediate_size": shape.n_ff_expert,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
        }
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": shape.head_dim,
        "intermediate_size": shape.n_ff_expert * shape.n_experts_used,
        "moe_intermediate_size": shape.n_ff_expert,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


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


def tokenizer_json(n_vocab: int) -> str:
    """Ids 1 to 256 are the 256 bytes, 0 ends a text. The ids beyond are words that no text is cut into:
    without them the engine would take those rows of the embedding for padding and never choose them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġw{number}" for number in range(len(tokens), n_vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return str(tokenizer.to_str())


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
