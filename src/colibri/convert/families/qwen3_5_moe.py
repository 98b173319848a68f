"""Qwen3.5-MoE, the language model alone: the layers of Qwen3-Next with projections stored apart, all routed.

Owns: the keys and tensor names of model_type "qwen3_5_moe" (a config.json that wraps it as text_config) and
"qwen3_5_moe_text". Defaults: Qwen3_5MoeTextConfig of Transformers 5.24.
Refuses: biases, and what delta.py, decoder.py and keys.py refuse. The vision tower and layers that predict
further tokens are left out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERTS
from colibri.convert.decoder import Decoder, ExpertNames, Names, read_experts
from colibri.convert.delta import DEFAULTS as SHARED_DEFAULTS
from colibri.convert.delta import read_delta, tensors
from colibri.convert.keys import Keys

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    **SHARED_DEFAULTS,
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}

TENSORS: Names = tensors(qkv="qkv", gate="z", beta="b", decay="a")
EXPERTS: ExpertNames | None = SHARED_EXPERTS


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed: mlp_only_layers must be empty, and intermediate_size means nothing."""
    for name in ("rope_parameters", "rope_scaling"):  # mrope is of images: a text's three positions are one
        if isinstance(found := keys.values.get(name), dict):
            keys.values[name] = {key: value for key, value in found.items() if not key.startswith("mrope_")}
    decoder = read_delta(keys, DEFAULTS)
    keys.raw("intermediate_size")
    routed = [True] * decoder.config["n_layers"]
    keys.require("norm_topk_prob", (True,), True)
    decoder.config.update(
        read_experts(keys, DEFAULTS, routed, "moe_intermediate_size"),
        router_norm=1,
        n_ff_shared=keys.integer(
            "shared_expert_intermediate_size", DEFAULTS["shared_expert_intermediate_size"]
        ),
        shared_gate=1,
    )
    return decoder
