"""NLLB-MoE: an encoder and a decoder with sinusoids and LayerNorms; in some layers each token goes to its two
best experts, as many tokens to each as choose it.

Owns: the keys and tensor names of model_type "nllb-moe". Defaults: NllbMoeConfig of Transformers 4.57.1 (the
experts of 5.24 are not those that the router chose).
Refuses: other activations, policies and capacities of experts, and what encoders.py and keys.py refuse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.encoders import EMBEDDINGS, both_stacks, require_encoder, same
from colibri.convert.keys import Keys
from colibri.errors import ConversionError

MODEL_TYPES = ("nllb-moe",)
ARCHITECTURES = ("NllbMoeForConditionalGeneration",)
BOS_DEFAULT: int | None = 0
EOS_DEFAULT: tuple[int, ...] = (2,)
DEFAULTS: dict[str, Any] = {
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}


def _norm(target: str, name: str) -> Names:
    return {target: (f"{name}.weight",), f"{target}_bias": (f"{name}.bias",)}


def _attention(prefix: str, block: str) -> Names:
    names: dict[str, tuple[str, ...]] = dict(_norm(f"{prefix}attn_norm", f"{block}_layer_norm"))
    for part in ("q", "k", "v", "out"):
        name = f"{block}.{part}_proj"
        names[f"{prefix}attn_{part}"] = (f"{name}.weight",)
        names[f"{prefix}attn_{part}_bias"] = (f"{name}.bias",)
    return names


TENSORS: Names = {
    "embedding": EMBEDDINGS,
    "output": ("lm_head.weight",),
    **_norm("output_norm", "decoder.layer_norm"),
    **_norm("encoder_norm", "encoder.layer_norm"),
    **both_stacks(
        {
            **_attention("", "self_attn"),
            **_norm("ffn_norm", "ff_layer_norm"),
            "ffn_gate": ("ffn.fc1.weight",),
            "ffn_down": ("ffn.fc2.weight",),
            "ffn_gate_bias": ("ffn.fc1.bias",),
            "ffn_down_bias": ("ffn.fc2.bias",),
            "router": ("ffn.router.classifier.weight",),
            "router_logit_bias": ("ffn.router.classifier.bias",),
            "experts_gate_bias": ("ffn.experts.expert_{E}.fc1.bias",),
            "experts_down_bias": ("ffn.experts.expert_{E}.fc2.bias",),
        },
        {},
        _attention("cross_", "cross_attention"),
        "layers",
    ),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("encoder.layers.{N}.ffn", "decoder.layers.{N}.ffn"),
    ("fc1", "fc2"),
    single="experts.expert_{E}.{part}.weight",
)
_NO_EFFECT = (  # in training, or where capacity is a share of all tokens
    "dropout activation_dropout init_std encoder_layerdrop decoder_layerdrop expert_capacity "
    "normalize_router_prob_before_dropping batch_prioritized_routing router_type"
)


def read_config(keys: Keys) -> Decoder:
    """What dropout leaves out of experts' outputs in training is a scale of them here."""
    require_encoder(keys)
    keys.require("activation_function", ("relu",), "relu")
    keys.require("second_expert_policy", ("all",), "all")
    keys.require("moe_eval_capacity_token_fraction", (1, 1.0), 1.0)
    for name in _NO_EFFECT.split():
        keys.raw(name)
    n_embd, pad = keys.integer("d_model", 1024, 2, "n_embd"), keys.integer("pad_token_id", 1, 0)
    n_heads = same(keys, "encoder_attention_heads", "decoder_attention_heads", DEFAULTS)
    n_ff = same(keys, "encoder_ffn_dim", "decoder_ffn_dim", DEFAULTS)
    if n_embd % n_heads or n_embd % 2 or n_embd < 4:
        raise ConversionError(
            f"{keys.path}: d_model = {n_embd}; expected an even multiple of "
            f"encoder_attention_heads = {n_heads}. "
            "Check that config.json belongs to these weights."
        )
    layers = [
        keys.integer(f"{stack}_layers", 12, field="n_encoder_layers") for stack in ("encoder", "decoder")
    ]
    keys.alias("num_hidden_layers", "encoder_layers")
    routed = [
        step > 0 and (layer + 1) % step == 0
        for stack, n in zip(("encoder", "decoder"), layers, strict=True)
        for step in (keys.integer(f"{stack}_sparse_step", 4, 0),)
        for layer in range(n)
    ]
    n_experts, dropped = (
        keys.integer("num_experts", 128, 2, "n_experts"),
        keys.number("moe_token_dropout", 0.2),
    )
    if not 0 <= dropped < 1:
        raise keys.error("moe_token_dropout", "a number of at least 0 and below 1")
    config: dict[str, Any] = {
        "n_vocab": keys.integer("vocab_size", 128112),
        "n_layers": sum(layers),
        "n_encoder_layers": layers[0],
        "n_embd": n_embd,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": n_embd // n_heads,
        "rope_dim": 0,
        "sinusoids": pad + 1,
        "context_length": keys.integer("max_position_embeddings", 1024),
        "norm_eps": 1e-5,
        "layer_norm": 1,
        "embed_scale": math.sqrt(n_embd) if keys.flag("scale_embedding", True) else 1.0,
        "attn_scale": (n_embd // n_heads) ** -0.5,
        "attn_qkv_bias": 1,
        "attn_out_bias": 1,
        "tied_output": int(keys.flag("tie_word_embeddings", True)),
        "n_ff": n_ff,
        "ffn_ungated": 1,
        "expert_bias": 1,
    }
    if any(routed):
        config |= {
            "n_experts": [n_experts if one else 0 for one in routed],
            "n_experts_used": 2,
            "n_ff_expert": n_ff,
            "router_norm": 1,
            "router_scale": 1 - dropped,
            "router_logit_bias": int(keys.flag("router_bias", False)),
        }
    exponents = np.arange(n_embd // 2, dtype=np.float32) * np.float32(-math.log(10000) / (n_embd // 2 - 1))
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)  # the same bits everywhere
    return Decoder(
        config,
        np.empty(0, np.float32),
        equal=EMBEDDINGS,
        made={"position_freq": frequencies},
        start_id=2,
    )
