"""Switch Transformers: an encoder and a decoder of T5's make, in some of whose layers each token goes to its
best expert, in the encoder only until the expert has taken expert_capacity tokens.

Owns: the keys and tensor names of model_type "switch_transformers". Defaults: SwitchTransformersConfig of
Transformers 5.24. Refuses: other activations than ReLU, and what encoders.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.encoders import EMBEDDINGS, both_stacks, distance_biases, require_encoder
from colibri.convert.keys import Keys

MODEL_TYPES = ("switch_transformers",)
ARCHITECTURES = ("SwitchTransformersForConditionalGeneration",)
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = (1,)
DEFAULTS: dict[str, Any] = {
    "num_layers": 12,
    "num_sparse_encoder_layers": 3,
    "num_sparse_decoder_layers": 3,
}


def _attention(prefix: str, block: str) -> Names:
    return {f"{prefix}attn_{part}": (f"{block}.{part[0]}.weight",) for part in ("q", "k", "v", "out")}


def _feed_forward(block: str) -> Names:
    return {
        "ffn_norm": (f"{block}.layer_norm.weight",),
        "ffn_gate": (f"{block}.mlp.wi.weight",),
        "ffn_down": (f"{block}.mlp.wo.weight",),
        "router": (f"{block}.mlp.router.classifier.weight",),
        "router_logit_bias": (f"{block}.mlp.router.classifier.bias",),
    }


_BIASES = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
TENSORS: Names = {
    "embedding": EMBEDDINGS,
    "output": ("lm_head.weight",),
    "output_norm": ("decoder.final_layer_norm.weight",),
    "attn_bias": (_BIASES.format("decoder"),),
    "encoder_norm": ("encoder.final_layer_norm.weight",),
    "encoder_attn_bias": (_BIASES.format("encoder"),),
    **both_stacks(
        {"attn_norm": ("layer.0.layer_norm.weight",), **_attention("", "layer.0.SelfAttention")},
        _feed_forward("layer.1"),
        {
            "cross_attn_norm": ("layer.1.layer_norm.weight",),
            **_attention("cross_", "layer.1.EncDecAttention"),
            **_feed_forward("layer.2"),
        },
        "block",
    ),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("encoder.block.{N}.layer.1.mlp", "decoder.block.{N}.layer.2.mlp"),
    ("wi", "wo"),
    single="experts.expert_{E}.{part}.weight",
)


def read_config(keys: Keys) -> Decoder:
    """The attention scale is in the weights. A tied head reads the last norm scaled by n_embd^-0.5."""
    require_encoder(keys)
    keys.require("dense_act_fn", ("relu",), "relu")
    keys.require("feed_forward_proj", ("relu",), None)
    for harmless in ("dropout_rate", "initializer_factor", "add_router_probs", "router_type", "is_gated_act"):
        keys.raw(harmless)  # training, reports, and what dense_act_fn says a second time
    n_embd, n_heads = (
        keys.integer("d_model", 768, field="n_embd"),
        keys.integer("num_heads", 12, field="n_heads"),
    )
    n_encoder = keys.integer("num_layers", DEFAULTS["num_layers"], field="n_encoder_layers")
    n_decoder = keys.optional_integer("num_decoder_layers", 12, field="n_layers") or n_encoder
    routed = _routed(keys, "encoder", n_encoder) + _routed(keys, "decoder", n_decoder)
    n_experts, n_ff = keys.integer("num_experts", 8, field="n_experts"), keys.integer("d_ff", 2048)
    tied = keys.flag("tie_word_embeddings", True)
    span, cuts = distance_biases(keys, n_heads)
    config: dict[str, Any] = {
        "n_vocab": keys.integer("vocab_size", 32128),
        "n_layers": n_encoder + n_decoder,
        "n_encoder_layers": n_encoder,
        "n_embd": n_embd,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": keys.integer("d_kv", 64),
        "rope_dim": 0,
        "context_length": keys.integer("n_positions", 512),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-6),
        "attn_scale": 1.0,
        "attn_bias_span": span,
        "tied_output": int(tied),
        "n_ff": n_ff,
        "ffn_ungated": 1,
    }
    if any(routed):
        config |= {
            "n_experts": [n_experts if one else 0 for one in routed],
            "n_experts_used": 1,
            "n_ff_expert": n_ff,
            "expert_capacity": keys.integer("expert_capacity", 64),
            "router_logit_bias": int(keys.flag("router_bias", False)),
        }
    return Decoder(
        config,
        np.empty(0, np.float32),
        cuts=cuts,
        equal=EMBEDDINGS,
        affine={"output_norm": (0.0, n_embd**-0.5)} if tied else {},
        start_id=keys.optional_integer("pad_token_id", 0, 0),
    )


def _routed(keys: Keys, stack: str, n_layers: int) -> list[bool]:
    """Which layers have experts. The step follows from their number, unless config.json says it."""
    key = f"num_sparse_{stack}_layers"
    n_sparse = keys.integer(key, DEFAULTS[key], 0)
    step = keys.integer(f"{stack}_sparse_step", n_layers // n_sparse if n_sparse else n_layers, 0)
    return [step > 0 and (layer % step == 1 or step == 1) for layer in range(n_layers)]
