"""Granite 3 MoE: multipliers of embeddings, attention, residual additions and logits; softmax over the best
of the gate logits.

Owns: the keys and tensor names of model_type "granitemoe". Defaults: GraniteMoeConfig of Transformers 5.24.
logits_scaling is folded into the weight of the last norm, which is rounded once.
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import (
    ROUTED,
    Decoder,
    ExpertNames,
    Names,
    read_biases,
    read_decoder,
    read_experts,
)
from colibri.convert.keys import Keys

MODEL_TYPES = ("granitemoe",)
ARCHITECTURES = ("GraniteMoeForCausalLM", "GraniteMoeModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}

TENSORS: Names = {
    **ROUTED,
    "layers.{N}.router": (
        "layers.{N}.block_sparse_moe.router.layer.weight",
        "layers.{N}.block_sparse_moe.router.weight",
    ),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("layers.{N}.block_sparse_moe",),
    ("gate_proj", "up_proj", "down_proj"),
    stacked=("input_linear.weight", "output_linear.weight"),
    transposed=False,
)


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed. Softmax over the chosen logits is softmax over all, divided by their sum."""
    decoder = read_decoder(keys, DEFAULTS)
    routed = [True] * decoder.config["n_layers"]
    multipliers = {
        name: keys.number(name, 1.0)
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    }
    for name, value in multipliers.items():
        if not value:
            raise keys.error(name, "a number above 0")
    decoder.config.update(
        read_biases(keys),
        **read_experts(keys, DEFAULTS, routed, "intermediate_size", "num_local_experts"),
        router_norm=1,
        embed_scale=multipliers["embedding_multiplier"],
        attn_scale=multipliers["attention_multiplier"],
        residual_scale=multipliers["residual_multiplier"],
    )
    return decoder._replace(affine={"output_norm": (0.0, 1 / multipliers["logits_scaling"])})
