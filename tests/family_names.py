"""How families of the second wave call their tensors in released checkpoints.

Role: canonical names (those of checkpoint_tensors.py and oracle_reading.py, one tensor per expert) to
      released ones for the writer, and back for the oracle.
Owns: that table; Transformers reads what was written with it and writes what is read with it (live/).
Refuses: importing colibri, values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Canonical part of a name, and the released one.
RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    "granitemoe": (
        (".mlp.gate.weight", ".block_sparse_moe.router.layer.weight"),
        (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
        (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    ),
    "ernie4_5_moe": ((".mlp.gate.e_score_correction_bias", ".mlp.moe_statics.e_score_correction_bias"),),
    "minimax_m2": (
        (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    "phimoe": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    "lfm2": (
        ("model.norm.", "model.embedding_norm."),
        (".input_layernorm.", ".operator_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".q_norm.", ".q_layernorm."),
        (".k_norm.", ".k_layernorm."),
        (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.", ".feed_forward."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    "llama4_text": ((".mlp.gate.weight", ".mlp.router.weight"), (".mlp.", ".feed_forward.")),
    "gemma4_text": (
        (".mlp.gate.weight", ".router.proj.weight"),
        (".mlp.gate.scale", ".router.scale"),
        (".mlp.gate.per_expert_scale", ".router.per_expert_scale"),
        (".mlp.experts.gate_up_proj", ".experts.gate_up_proj"),
        (".mlp.experts.down_proj", ".experts.down_proj"),
    ),
}
RELEASED["lfm2_moe"] = RELEASED["lfm2"]
# Families that keep all experts of a layer in two tensors, and whether those lie as [cols, rows].
STACKED: dict[str, bool] = {"granitemoe": False, "llama4_text": True, "gemma4_text": False}


def released(family: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {_replaced(name, RELEASED.get(family, ()), 0): value for name, value in tensors.items()}


def canonical(family: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """One tensor per expert; names of other families stay as they are."""
    found: dict[str, Array] = {}
    for released_name, value in tensors.items():
        name = _replaced(released_name, RELEASED.get(family, ()), 1)
        if family in STACKED and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            at, part = name.rsplit(".", 1)
            for expert, matrix in enumerate(value.swapaxes(1, 2) if STACKED[family] else value):
                halves = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                found |= {
                    f"{at}.{expert}.{one}.weight": np.ascontiguousarray(half)
                    for one, half in zip(names, halves, strict=True)
                }
        else:
            found[name] = value
    return found


def _replaced(name: str, pairs: tuple[tuple[str, str], ...], source: int) -> str:
    for pair in pairs if source == 0 else reversed(pairs):
        name = name.replace(pair[source], pair[1 - source])
    return name
