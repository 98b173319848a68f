"""Settings of config.json that GGUF files are compared with, by test_gguf_layout.py and by
tools/compare_gguf_with_llama_cpp.py.

Owns: those settings, and when two conversions of one model are the same. Refuses: makers of checkpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fixtures.variants import LINEAR as LINEAR
from fixtures.variants import LLAMA3 as SLOWED

LLAMA3 = SLOWED | {"rope_theta": 500000.0}
LONGROPE = {
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 256,
        "short_factor": [1 + 0.05 * i for i in range(8)],
        "long_factor": [1 + 0.5 * i for i in range(8)],
        "short_mscale": 1.0606601717798212,  # what llama.cpp's converter computes of the lengths
        "long_mscale": 1.0606601717798212,
    },
}
GEMMA3 = {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
# llama.cpp has a fixed step between layers that see all, and constants in place of keys.
LLAMA4 = {"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0]}


def yarn(factor: float, original: int, **others: float) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_theta": 10000.0, "rope_scaling": scaling | others}


def same(entry: str, expected: bytes, found: bytes) -> bool:
    """A rate's logarithm is stored as the rate, which rounds twice."""
    if not entry.endswith("delta_log_rate"):
        return expected == found
    return bool(np.abs(np.frombuffer(expected, "<f4") - np.frombuffer(found, "<f4")).max() < 5e-7)
