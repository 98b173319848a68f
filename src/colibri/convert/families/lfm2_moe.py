"""LFM2 and LFM2-MoE: short gated convolutions in most layers, attention with q/k norm in the others; dense,
or dense layers first and then experts by sigmoid scores, chosen with a bias.

Owns: the keys and tensor names of model_types "lfm2_moe" and "lfm2". Defaults: Lfm2MoeConfig and Lfm2Config
of Transformers 5.24. Refuses: biases of convolutions, two keys for one thing that differ, and what
decoder.py and keys.py refuse.
"""

from __future__ import annotations

import math
from typing import Any

from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.decoder import Cut, Decoder, ExpertNames, Names, read_decoder, read_experts
from colibri.convert.delta import CONV, rows_of, taps_of
from colibri.convert.keys import Keys
from colibri.convert.windows import FULL

MODEL_TYPES = ("lfm2_moe", "lfm2")
ARCHITECTURES = ("Lfm2MoeForCausalLM", "Lfm2MoeModel", "Lfm2ForCausalLM", "Lfm2Model")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
THETA = 1e6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1792,
    "num_experts_per_tok": 4,
    "num_experts": 32,
}
DENSE_DEFAULTS = DEFAULTS | {"hidden_size": 2560, "intermediate_size": 12288}
# Other names for a size, which the reference implementation does not read.
SAME = {"hidden_size": ("block_dim", "conv_dim", "conv_dim_out"), "num_attention_heads": ("num_heads",)}
UNUSED = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
LANES = 64  # at most so many channels of a convolution are a work item

_IN = ("layers.{N}.conv.in_proj.weight",)  # B, which x is multiplied with before; C, with which after; x
TENSORS: Names = {
    **SHARED,
    "output_norm": ("embedding_norm.weight",),
    "layers.{N}.attn_norm": ("layers.{N}.operator_norm.weight",),
    "layers.{N}.attn_q_norm": ("layers.{N}.self_attn.q_layernorm.weight",),
    "layers.{N}.attn_k_norm": ("layers.{N}.self_attn.k_layernorm.weight",),
    "layers.{N}.attn_out": ("layers.{N}.self_attn.out_proj.weight",),
    **dict.fromkeys((f"layers.{{N}}.delta_{part}" for part in ("beta", "gate", "qkv")), _IN),
    "layers.{N}.delta_conv": ("layers.{N}.conv.conv.weight",),
    "layers.{N}.delta_out": ("layers.{N}.conv.out_proj.weight",),
    "layers.{N}.ffn_norm": ("layers.{N}.ffn_norm.weight",),
    "layers.{N}.ffn_gate": ("layers.{N}.feed_forward.w1.weight",),
    "layers.{N}.ffn_up": ("layers.{N}.feed_forward.w3.weight",),
    "layers.{N}.ffn_down": ("layers.{N}.feed_forward.w2.weight",),
    "layers.{N}.router": ("layers.{N}.feed_forward.gate.weight",),
    "layers.{N}.router_bias": ("layers.{N}.feed_forward.expert_bias",),
}
EXPERTS: ExpertNames | None = ExpertNames(("layers.{N}.feed_forward",), ("w1", "w3", "w2"))


def read_config(keys: Keys) -> Decoder:
    """tie_embedding and block_ff_dim win over the common spellings, as in the reference implementation."""
    dense = keys.values.get("model_type") == "lfm2"
    defaults = DENSE_DEFAULTS if dense else DEFAULTS
    _read_layer_types(keys, keys.integer("num_hidden_layers", defaults["num_hidden_layers"]), dense)
    for name, others in SAME.items():
        for other in others:
            keys.alias(name, other)
    keys.alias("norm_eps", "block_norm_eps")
    for name in UNUSED:
        keys.raw(name)
    for name, value in (("conv_bias", False), ("block_use_swiglu", True), ("use_pos_enc", True)):
        keys.require(name, (value,), value if name == "conv_bias" else None)
    if "tie_embedding" in keys.values:
        keys.values["tie_word_embeddings"] = keys.flag("tie_embedding", True)
    decoder = read_decoder(keys, defaults, THETA, others=(CONV,), eps="norm_eps")
    config, n_embd, types = decoder.config, decoder.config["n_embd"], keys.values["layer_types"]
    n_ff = defaults["intermediate_size"]
    width = _read_width(keys, n_ff) if dense else keys.integer("intermediate_size", n_ff)
    config.update(qk_norm=int(FULL in types), n_ff=width)
    taps = keys.integer("conv_L_cache", 3)
    cuts: dict[str, Cut] = {}
    if CONV in types:
        config.update(
            mixer=[int(kind == CONV) for kind in types],
            delta_heads=n_embd,  # each one channel
            delta_key_heads=n_embd // math.gcd(n_embd, LANES),
            delta_value_dim=1,
            conv_width=taps,
        )
        for start, part in enumerate(("beta", "gate", "qkv")):
            rows = range(start * n_embd, (start + 1) * n_embd)
            cuts[f"layers.{{N}}.delta_{part}"] = rows_of([rows], 3 * n_embd, n_embd)
        cuts["layers.{N}.delta_conv"] = taps_of(n_embd, taps)
    if not dense:
        _read_experts(keys, config)
    return decoder._replace(cuts=cuts)


def _read_layer_types(keys: Keys, n_layers: int, dense: bool) -> None:
    """layer_types, or made of full_attn_idxs; if both are given they agree."""
    full = keys.raw("full_attn_idxs")
    if full is not None and not (isinstance(full, list) and all(layer in range(n_layers) for layer in full)):
        raise keys.error("full_attn_idxs", f"null or numbers of layers from 0 to {n_layers - 1}")
    made = [FULL if full is None or layer in full else CONV for layer in range(n_layers)]
    types = keys.raw("layer_types")
    if types is None:
        if full is None and not dense:
            raise keys.error("layer_types", f"{n_layers} times {CONV!r} or {FULL!r}")
        keys.values["layer_types"] = made
    elif full is not None and types != made:
        raise keys.error("full_attn_idxs", f"the layers whose layer_types are {FULL!r}")


def _read_width(keys: Keys, default: int) -> int:
    """Of the feed-forwards of a dense model. What files say may be the width of one without a gate, of which
    a third is taken off."""
    step, factor = keys.integer("block_multiple_of", 256), keys.raw("block_ffn_dim_multiplier", 1.0)
    n_ff = keys.integer("block_ff_dim" if "block_ff_dim" in keys.values else "intermediate_size", default)
    keys.raw("intermediate_size")
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return n_ff
    n_ff = int(2 * n_ff / 3)
    if factor is None:
        return n_ff
    return -(-int(keys.number("block_ffn_dim_multiplier", 1.0) * n_ff) // step) * step


def _read_experts(keys: Keys, config: dict[str, Any]) -> None:
    """Layers from num_dense_layers on are routed."""
    first = keys.integer("num_dense_layers", 2, 0)
    routed = [layer >= first for layer in range(config["n_layers"])]
    fields = read_experts(keys, DEFAULTS, routed, "moe_intermediate_size")
    biased, norm = keys.flag("use_expert_bias", True), keys.flag("norm_topk_prob", True)
    scale = keys.number("routed_scaling_factor", 1.0)
    config.update(fields)
    if any(routed):
        config.update(
            n_ff=0 if all(routed) else config["n_ff"],
            router_score=1,
            router_bias=int(biased),
            router_norm=int(norm),
            router_norm_add=1e-6 * norm,
            router_scale=scale,
        )
