"""Phi-3.5-MoE: LayerNorms with biases, logits with a bias; two experts chosen in turn, each weighted
by a softmax over the gate logits near to its own (SparseMixer).

Owns: the keys and tensor names of model_type "phimoe". Defaults: PhimoeConfig of Transformers 5.24.
Refuses: other numbers of chosen experts, different scales of short and long RoPE, and what decoder.py,
windows.py and keys.py refuse.
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
from colibri.convert.windows import Windows

MODEL_TYPES = ("phimoe",)
ARCHITECTURES = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "PhimoeModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
THETA = 1e6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
}
WINDOWS = Windows(None)
MSCALES = ("short_mscale", "long_mscale")

TENSORS: Names = {
    **ROUTED,
    "output_bias": ("lm_head.bias",),
    "output_norm_bias": ("norm.bias",),
    "layers.{N}.attn_norm_bias": ("layers.{N}.input_layernorm.bias",),
    "layers.{N}.ffn_norm_bias": ("layers.{N}.post_attention_layernorm.bias",),
    "layers.{N}.router": ("layers.{N}.block_sparse_moe.gate.weight", "layers.{N}.mlp.router.weight"),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("layers.{N}.block_sparse_moe", "layers.{N}.mlp"), ("w1", "w3", "w2")
)


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed. router_jitter_noise has an effect at inference too: the width of "near"."""
    keys.allow_code("modeling_phimoe")
    _read_mscale(keys)
    decoder = read_decoder(keys, DEFAULTS, THETA, windows=WINDOWS)
    if keys.context is not None and any("'longrope'" in note for note in keys.notes):
        keys.notes.append(
            "Transformers 5.24 ignores long_factor in this family; the file has it, as the code has that the "
            "model was released with"
        )
    routed = [True] * decoder.config["n_layers"]
    noise = keys.number("router_jitter_noise", 0.01)
    keys.raw("input_jitter_noise")  # in training only
    keys.require("num_experts_per_tok", (2,), 2)
    if not noise:
        raise keys.error("router_jitter_noise", "a number above 0")
    decoder.config.update(
        read_biases(keys),
        **read_experts(keys, DEFAULTS, routed, "intermediate_size", "num_local_experts"),
        layer_norm=1,
        output_bias=int(keys.flag("lm_head_bias", False)),
        router_near=2 * noise,
    )
    return decoder


def _read_mscale(keys: Keys) -> None:
    """The scale of cos and sin is said twice, for short and for long texts: what others call
    attention_factor."""
    for name in ("rope_scaling", "rope_parameters"):
        settings = keys.values.get(name)
        if not isinstance(settings, dict) or not any(scale in settings for scale in MSCALES):
            continue
        short, long = (settings.get(scale) for scale in MSCALES)
        if short != long:
            raise keys.error(name, "the same short_mscale and long_mscale")
        rest = {key: value for key, value in settings.items() if key not in MSCALES}
        keys.values[name] = rest | {"attention_factor": short}
