"""What families share whose blocks are normalised before and after, with windows and frequencies of their own
in most layers.

Owns: those keys and tensor names, and the frequencies by kind of layer. Refuses: other activations than GELU
by tanh, attention in both directions, capped attention scores, layer types in contradiction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri.convert.decoder import QK_NORM, Decoder, Names, read_decoder
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.rope import read_rope
from colibri.convert.windows import FULL, SLIDING, Windows

TENSORS: Names = {
    **SHARED,
    **QK_NORM,
    "layers.{N}.attn_post_norm": ("layers.{N}.post_attention_layernorm.weight",),
    "layers.{N}.ffn_norm": ("layers.{N}.pre_feedforward_layernorm.weight",),
    "layers.{N}.ffn_post_norm": ("layers.{N}.post_feedforward_layernorm.weight",),
}
# gelu(x) = x sigmoid(alpha (x + cubic x^3)) in the form with a tanh
GELU = {"ffn_alpha": 2 * math.sqrt(2 / math.pi), "ffn_cubic": 0.044715}


def layer_kinds(keys: Keys, n_layers: int, step: int) -> list[str]:
    """layer_types, or else every step-th layer sees all."""
    kinds = keys.raw("layer_types")
    if kinds is None:
        return [SLIDING if (layer + 1) % step else FULL for layer in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers or set(kinds) - {FULL, SLIDING}:
        raise keys.error("layer_types", f"{FULL!r} or {SLIDING!r} for each of num_hidden_layers = {n_layers}")
    return kinds


def read_sandwich(
    keys: Keys,
    defaults: Mapping[str, Any],
    kinds: list[str],
    ropes: Mapping[str, dict[str, Any]],
    full_dim: int | None = None,
) -> Decoder:
    """`ropes`: RoPE settings of FULL and SLIDING, with their theta. full_dim: width of a head in layers of
    kind FULL, None: head_dim."""
    keys.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    keys.require("hidden_act", ("gelu_pytorch_tanh",), None)
    keys.require("use_bidirectional_attention", (False, "vision"), None)
    keys.require("attn_logit_softcapping", (), None)
    for name in ("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq", "hidden_act"):
        keys.values.pop(name, None)
    keys.values |= {"rope_parameters": ropes[FULL], "layer_types": kinds}
    placed = Windows(defaults["sliding_window"], lambda layer, _: kinds[layer] == SLIDING)
    decoder = read_decoder(keys, defaults, windows=placed)
    config = decoder.config
    dims = {FULL: full_dim or config["head_dim"], SLIDING: config["head_dim"]}
    names = {FULL: "global_head_dim" if full_dim else "head_dim", SLIDING: "head_dim"}
    length = config["context_length"]
    found = [
        read_rope(Keys({"rope_parameters": ropes[k]}, keys.path), dims[k], length, 1, head_name=names[k])
        for k in (FULL, SLIDING)
    ]
    if found[0].scale != found[1].scale:
        raise keys.error(
            "rope_parameters",
            f"one attention factor in all layers (now {found[0].scale:g} and {found[1].scale:g})",
            "Other factors are not supported.",
        )
    rope_dim = max(dims.values())
    inv_freq = np.zeros((2, rope_dim // 2), np.float32)
    for row, rope in zip(inv_freq, found, strict=True):
        row[: len(rope.inv_freq)] = rope.inv_freq
    cap = keys.raw("final_logit_softcapping")
    if cap is not None and not keys.number("final_logit_softcapping", 0.0):
        raise keys.error("final_logit_softcapping", "null or a number above 0")
    config.update(
        GELU,
        rope_dim=rope_dim,
        rope_sets=2,
        rope_set=[int(kind == SLIDING) for kind in kinds],
        qk_norm=1,
        post_norm=1,
        embed_scale=math.sqrt(config["n_embd"]),
        output_cap=0.0 if cap is None else keys.number("final_logit_softcapping", 0.0),
    )
    return decoder._replace(inv_freq=inv_freq.reshape(-1))
