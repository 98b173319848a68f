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
from colibri.convert.delta import TENSORS as SHARED
from colibri.convert.delta import read_delta
from colibri.convert.keys import Keys

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

TENSORS: Names = {
    **{
        target: names for target, names in SHARED.items() if ".ffn_" not in target or target.endswith("_norm")
    },
    "layers.{N}.delta_qkv": ("layers.{N}.linear_attn.in_proj_qkv.weight",),
    "layers.{N}.delta_gate": ("layers.{N}.linear_attn.in_proj_z.weight",),
    "layers.{N}.delta_beta": ("layers.{N}.linear_attn.in_proj_b.weight",),
    "layers.{N}.delta_decay": ("layers.{N}.linear_attn.in_proj_a.weight",),
}
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
