"""A model of a named shape for Transformers, its weights drawn in the place where they stay: no checkpoint.

Owns: the config (the qwen3_moe graph for every shape, as in gguf_writer.py) and the values, which have the
same deviations as the peers'. Refuses: evaluating (engines.py), a shape that memory cannot hold, meaning.
Memory: the model once and 2048 rows of each kind of matrix. torch and transformers are imported when needed.

The same shape, type and seed give the same values.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

from colibri.analysis import machine
from colibri.analysis.shapes import SHAPES, Shape, config_json
from gguf_writer import POOL_ROWS, deviation

ROW_BLOCK = 1 << 14  # rows copied at a time
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
KINDS = {"embed_tokens": "embedding", "lm_head": "output", "o_proj": "attn_out", "down_proj": "down"}


def weight_bytes(shape: Shape, dtype: str) -> int:
    """Of all matrices; norms are a few thousand values."""
    return shape.parameters(shape.n_experts) * DTYPE_BYTES[dtype]


def build(name: str, dtype: str, experts: str, seed: int = 0) -> Any:
    """Qwen3MoeForCausalLM, ready to be evaluated. Ends the program if its weights are larger than the memory
    that is available: the system would end it later, or something else."""
    import torch
    import transformers

    need, free = weight_bytes(SHAPES[name], dtype), machine.memory_bytes()["available"]
    if free is not None and need > free:
        raise SystemExit(
            f"torch_model.py: {name} in {dtype} needs {need / 1e9:.1f} GB of memory, found "
            f"{free / 1e9:.1f} GB available; end other programs, or leave this contestant out (--skip)"
        )
    shape = dataclasses.replace(SHAPES[name], family="qwen3_moe")
    config = transformers.Qwen3MoeConfig(**config_json(shape))
    made: Any = transformers.Qwen3MoeForCausalLM
    with torch.device("meta"):
        model = made._from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            experts_implementation=experts,
        )
    model = model.to_empty(device="cpu").eval()
    rotary = model.model.rotary_emb  # its frequencies are no weights: computed, in f32, not drawn
    model.model.rotary_emb = type(rotary)(config=model.config)
    _draw(model, shape.n_layers, seed)
    return model


def _draw(model: Any, n_layers: int, seed: int) -> None:
    """Fills every parameter. A matrix's rows are rows of a pool of its kind: drawing seven billion values
    takes minutes, and no engine looks for equal rows."""
    import torch

    pools: dict[tuple[str, int], Any] = {}
    with torch.inference_mode():
        for name, values in model.named_parameters():
            random = torch.Generator().manual_seed(seed << 32 | zlib.crc32(name.encode()))
            if values.dim() == 1:  # a norm
                values.normal_(1.0, 0.1, generator=random)
                continue
            kind, cols = KINDS.get(name.removesuffix(".weight").rpartition(".")[2], ""), values.shape[-1]
            if (kind, cols) not in pools:
                size = deviation(kind, cols, n_layers)
                drawn = torch.empty(POOL_ROWS, cols).normal_(0.0, size, generator=random)
                pools[kind, cols] = drawn.to(values.dtype)
            rows = values.view(-1, cols)
            for first in range(0, len(rows), ROW_BLOCK):
                part = rows[first : first + ROW_BLOCK]
                chosen = torch.randint(POOL_ROWS, (len(part),), generator=random)
                torch.index_select(pools[kind, cols], 0, chosen, out=part)
