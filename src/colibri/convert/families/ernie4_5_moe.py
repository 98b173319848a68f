"""ERNIE 4.5 MoE: softmax scores chosen with a bias, divided by their sum; ungated shared experts; RoPE over
pairs of neighbours.

Owns: the keys and tensor names of model_type "ernie4_5_moe". Defaults: Ernie4_5_MoeConfig of Transformers
5.24, which ignores moe_capacity at inference. Refuses: biases, other gates, and what decoder.py and keys.py
refuse. Layers for predicting more than one token (mtp_...) are left out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERT_NAMES
from colibri.convert.decoder import (
    ROUTER,
    Decoder,
    ExpertNames,
    Names,
    neighbours_apart,
    read_decoder,
    read_experts,
)
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.routing import SHARED_EXPERTS

MODEL_TYPES = ("ernie4_5_moe",)
ARCHITECTURES = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
THETA = 500000.0
DEFAULTS: dict[str, Any] = {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
}

TENSORS: Names = {
    **SHARED,
    **ROUTER,
    **SHARED_EXPERTS,
    "layers.{N}.router_bias": (
        "layers.{N}.mlp.moe_statics.e_score_correction_bias",
        "layers.{N}.mlp.gate.moe_statics.e_score_correction_bias",
    ),
}
EXPERTS: ExpertNames | None = SHARED_EXPERT_NAMES


def read_config(keys: Keys) -> Decoder:
    """Every moe_layer_interval-th layer from the start index to the end index is routed; -1 is the last."""
    decoder = read_decoder(keys, DEFAULTS, THETA)
    n_layers = decoder.config["n_layers"]
    keys.require("use_bias", (False,), False)
    keys.require("moe_gate", ("topk",), "topk")
    keys.require("moe_use_aux_free", (True,), True)
    keys.raw("moe_capacity")
    keys.integer("num_nextn_predict_layers", 0, 0)
    start, end = keys.integer("moe_layer_start_index", 1, 0), keys.integer("moe_layer_end_index", -1, -1)
    step = keys.integer("moe_layer_interval", 1)
    last = n_layers - 1 if end == -1 else end
    routed = [start <= layer <= last and (layer + 1) % step == 0 for layer in range(n_layers)]
    fields = read_experts(keys, DEFAULTS, routed, "moe_intermediate_size", "moe_num_experts", "moe_k")
    shared = keys.integer("moe_num_shared_experts", 2, 0)
    n_ff, least = (
        keys.integer("intermediate_size", DEFAULTS["intermediate_size"]),
        keys.number("moe_norm_min", 1e-12),
    )
    decoder.config.update(fields, n_ff=0 if all(routed) else n_ff)
    if any(routed):
        decoder.config.update(
            router_bias=1,
            router_norm=1,
            router_norm_min=least,
            n_ff_shared=shared * fields["n_ff_expert"],
        )
    return decoder._replace(cuts=neighbours_apart(decoder.config), ignored=("mtp_",))
