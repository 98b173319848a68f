"""Gemma 3, its text: dense blocks normalised before and after, GELU, q/k norm, scaled embeddings; windows
and a small theta in most layers.

Owns: the keys and tensor names of model_types "gemma3" and "gemma3_text". Defaults: Gemma3TextConfig of
Transformers 5.24. The 1 that is added to the weights of norms is added here. Refuses: what sandwich.py,
decoder.py and keys.py refuse. What belongs to images is left out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.keys import Keys
from colibri.convert.sandwich import TENSORS as SANDWICH
from colibri.convert.sandwich import layer_kinds, read_sandwich
from colibri.convert.windows import FULL, SLIDING

MODEL_TYPES = ("gemma3", "gemma3_text")
ARCHITECTURES = ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "Gemma3TextModel")
BOS_DEFAULT: int | None = 2
EOS_DEFAULT: tuple[int, ...] = (1,)
THETA, LOCAL_THETA = 1e6, 1e4
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

TENSORS: Names = SANDWICH
EXPERTS: ExpertNames | None = None


def read_config(keys: Keys) -> Decoder:
    """Old files say one RoPE scaling, of the layers that see all; new ones say settings by kind of layer."""
    n_layers = keys.integer("num_hidden_layers", DEFAULTS["num_hidden_layers"], field="n_layers")
    kinds = layer_kinds(keys, n_layers, keys.integer("sliding_window_pattern", 6))
    keys.raw("_sliding_window_pattern")  # beside layer_types, which count
    scale = keys.number("query_pre_attn_scalar", 256)
    if not scale:
        raise keys.error("query_pre_attn_scalar", "a number above 0")
    decoder = read_sandwich(keys, DEFAULTS, kinds, _ropes(keys))
    config = decoder.config
    config.update(
        attn_scale=scale**-0.5, n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"])
    )
    norms = {name: (1.0, 1.0) for name in TENSORS if name.endswith("_norm")}
    return decoder._replace(affine=norms, left_out=("vision_tower.", "multi_modal_projector."))


def _ropes(keys: Keys) -> dict[str, dict[str, Any]]:
    old, new = keys.raw("rope_scaling") or {}, keys.raw("rope_parameters") or {}
    thetas = {
        FULL: keys.number("rope_theta", THETA),
        SLIDING: keys.number("rope_local_base_freq", LOCAL_THETA),
    }
    for name, found in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(found, dict):
            raise keys.error(name, "an object or null")
    if new and FULL not in new and SLIDING not in new:  # Transformers ignores such
        raise keys.error("rope_parameters", f"settings by kind of layer: {FULL!r}, {SLIDING!r}")
    found = {FULL: (new.get(FULL) or {}) | old, SLIDING: new.get(SLIDING) or {}}
    return {kind: {"rope_theta": thetas[kind]} | settings for kind, settings in found.items()}
