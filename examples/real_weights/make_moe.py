"""Makes a Mixture-of-Experts model of a dense Llama in GGUF; no weight is trained or rounded.

    python examples/real_weights/make_moe.py SmolLM2-135M-Instruct.Q4_1.gguf moe.gguf

Owns: the experts and their routers. Refuses: files of other architectures, and weights whose blocks a cut
would break.

Forms (sparse upcycling, arXiv:2212.05055, before its training):
- copies: every expert is the whole feed-forward. Whatever the router says, a token gets what the dense model
  gives.
- slices: every expert is another part of the hidden units. All of them are used with equal weights, and
  `down` is multiplied by their number, a power of two, so that the sum is the dense model's up to the order
  of additions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

PARTS = ("ffn_gate", "ffn_up", "ffn_down")
Array = npt.NDArray[Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=("copies", "slices"), default="copies")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--used", type=int, help="experts a token gets (default: 2 of copies, all slices)")
    parser.add_argument("--router", choices=("random", "zero"), help="(default: random, zero of slices)")
    parser.add_argument("--permute", action="store_true", help="experts and router rows in another order")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    slices = asked.form == "slices"
    asked.used = asked.used or (asked.experts if slices else min(2, asked.experts))
    asked.router = asked.router or ("zero" if slices else "random")
    if slices and (asked.used != asked.experts or asked.router != "zero"):
        parser.error("slices must all be used with equal weights: leave --used and --router out")
    if slices and asked.experts & (asked.experts - 1):
        parser.error("--experts of slices must be a power of two, so that nothing is rounded")
    if not 1 <= asked.used <= asked.experts:
        parser.error("--used must be 1 to the number of experts")
    return asked


def main() -> None:
    asked = arguments()
    reader = gguf.GGUFReader(asked.source)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama" or "llama.expert_count" in reader.fields:
        sys.exit(
            f"{asked.source} is {architecture}, dense or not; expected a dense model of architecture llama"
        )
    writer = gguf.GGUFWriter(asked.out, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "llama.feed_forward_length"):
            continue
        kind, value = field.types[0], field.contents()
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, inner)
    n_ff = int(reader.fields["llama.feed_forward_length"].contents())
    writer.add_feed_forward_length(n_ff if asked.form == "copies" else n_ff // asked.experts)
    writer.add_expert_count(asked.experts)
    writer.add_expert_used_count(asked.used)
    rng = np.random.default_rng(asked.seed)
    order = rng.permutation(asked.experts) if asked.permute else np.arange(asked.experts)
    routers = np.random.default_rng(asked.seed + 1)
    for tensor in reader.tensors:
        block, part, *_ = tensor.name.removeprefix("blk.").split(".")
        if part not in PARTS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        experts = (
            of_copies(tensor, asked.experts) if asked.form == "copies" else of_slices(tensor, asked.experts)
        )
        stacked = np.stack([experts[expert] for expert in order])
        writer.add_tensor(f"blk.{block}.{part}_exps.weight", stacked, raw_dtype=tensor.tensor_type)
        if part == "ffn_gate":
            router = routers.standard_normal((asked.experts, int(tensor.shape[0]))) * 0.05
            rows = router[order] if asked.router == "random" else 0 * router
            writer.add_tensor(f"blk.{block}.ffn_gate_inp.weight", rows.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(
        f"{asked.out}: {asked.experts} experts of {asked.form}, {asked.used} a token, "
        f"{asked.out.stat().st_size:,} bytes"
    )


def of_copies(tensor: Any, count: int) -> list[Array]:
    return [tensor.data] * count


def of_slices(tensor: Any, count: int) -> list[Array]:
    """Rows of gate and up; columns of down, times the number of slices."""
    data = np.asarray(tensor.data)
    if "ffn_down" not in tensor.name:
        return np.split(data, count)
    cut = data.shape[1] // count
    block = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    if data.shape[1] % count or (data.dtype == np.uint8 and cut % block):
        sys.exit(f"{tensor.name}: {count} slices would cut through a block of {tensor.tensor_type.name}")
    return [times(part, tensor.tensor_type, count) for part in np.split(data, count, axis=1)]


def times(data: Array, type: gguf.GGMLQuantizationType, factor: int) -> Array:
    """Multiplied by a power of two: of blocks, their f16 scales."""
    scales = {"Q4_0": (0,), "Q8_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(type.name)
    if data.dtype != np.uint8:
        return (data * factor).astype(data.dtype)
    if scales is None:
        sys.exit(f"slices of {type.name} are not supported: use --form copies")
    width = gguf.GGML_QUANT_SIZES[type][1]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, width)
    for at in scales:
        pair = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        blocks[..., at : at + 2] = (pair * np.float16(factor)).view(np.uint8)
    return blocks.reshape(len(data), -1)


if __name__ == "__main__":
    main()
