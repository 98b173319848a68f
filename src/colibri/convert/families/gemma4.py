"""Gemma 4, its text: blocks normalised before and after, GELU, q/k/v norm, a factor behind each layer;
windows and a small theta in most layers, other heads in those that see all; a dense feed-forward alone, or
beside experts whose router has a norm of its own and a factor for each of them. Layers that see all turn a
part of their heads, and may make values of the keys' weights.

Owns: the keys and tensor names of model_types "gemma4" and "gemma4_text". Defaults: Gemma4TextConfig of
Transformers 5.24. Refuses: shared keys and values, inputs by layer, heads that differ among layers of one
kind, and what sandwich.py, decoder.py and keys.py refuse. What belongs to images and sound is left out and
listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import Decoder, ExpertNames, Names, read_experts
from colibri.convert.keys import Keys
from colibri.convert.sandwich import TENSORS as SANDWICH
from colibri.convert.sandwich import layer_kinds, read_sandwich
from colibri.convert.windows import FULL, SLIDING

MODEL_TYPES = ("gemma4", "gemma4_text")
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4TextModel")
BOS_DEFAULT: int | None = 2
EOS_DEFAULT: tuple[int, ...] = (1,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "num_experts": 0,
    "top_k_experts": 0,
    "moe_intermediate_size": 0,
}
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
OTHERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
HEADS = ("head_dim", "num_key_value_heads")

AT = "layers.{N}"
TENSORS: Names = {
    **SANDWICH,
    f"{AT}.layer_scale": (f"{AT}.layer_scalar",),
    f"{AT}.router": (f"{AT}.router.proj.weight",),
    f"{AT}.router_norm": (f"{AT}.router.scale",),
    f"{AT}.router_expert_scale": (f"{AT}.router.per_expert_scale",),
    f"{AT}.expert_norm": (f"{AT}.pre_feedforward_layernorm_2.weight",),
    f"{AT}.dense_post_norm": (f"{AT}.post_feedforward_layernorm_1.weight",),
    f"{AT}.expert_post_norm": (f"{AT}.post_feedforward_layernorm_2.weight",),
}
EXPERTS: ExpertNames | None = ExpertNames((AT,), ("gate_proj", "up_proj", "down_proj"), transposed=False)


def read_config(keys: Keys) -> Decoder:
    """A router's norm is its scale by the root of the width."""
    n_layers = keys.integer("num_hidden_layers", DEFAULTS["num_hidden_layers"])
    kinds = layer_kinds(keys, n_layers, 6)
    kinds = [*kinds[:-1], FULL]  # whatever the file says
    for name, most in (("num_kv_shared_layers", 0), ("hidden_size_per_layer_input", 256)):
        keys.require(name, (0,), most)
    keys.require("use_double_wide_mlp", (False,), False)
    keys.raw("vocab_size_per_layer_input")
    ropes = keys.raw("rope_parameters") or ROPES
    sound = isinstance(ropes, dict) and set(ropes) == {FULL, SLIDING}
    if not sound or not all(isinstance(one, dict) and one.get("rope_theta") for one in ropes.values()):
        raise keys.error("rope_parameters", f"settings with a rope_theta for {FULL!r} and {SLIDING!r}")
    width, number = _full_heads(keys, kinds)
    decoder = read_sandwich(keys, DEFAULTS, kinds, ropes, width)
    config, routed = decoder.config, keys.flag("enable_moe_block", False)
    config.update(
        attn_scale=1.0,
        n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"]),
        own_head_dim=[width if kind == FULL and width != config["head_dim"] else 0 for kind in kinds],
        own_kv_heads=[number if kind == FULL and number != config["n_kv_heads"] else 0 for kind in kinds],
        value_norm=1,
        layer_scale=1,
    )
    if routed:
        layers = [True] * n_layers
        config.update(
            read_experts(keys, DEFAULTS, layers, "moe_intermediate_size", used_key="top_k_experts"),
            parallel_dense=1,
            router_norm=1,
            router_expert_scale=1,
        )
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        keys.raw(name)  # without effect where nothing is routed
    same = keys.flag("attention_k_eq_v", False)
    made_of_keys = [layer for layer, kind in enumerate(kinds) if same and kind == FULL]
    return decoder._replace(
        affine={f"{AT}.router_norm": (0.0, config["n_embd"] ** -0.5)},
        sources={f"layers.{n}.attn_v": (f"layers.{n}.self_attn.k_proj.weight",) for n in made_of_keys},
        left_out=OTHERS,
    )


def _full_heads(keys: Keys, kinds: list[str]) -> tuple[int, int]:
    """Width of the heads of layers that see all, and how many keys and values have. per_layer_config is what
    newer files say in place of the other keys, of which the number counts only beside attention_k_eq_v."""
    usual = {name: keys.integer(name, DEFAULTS[name]) for name in HEADS}
    n_heads = keys.integer("num_attention_heads", DEFAULTS["num_attention_heads"])
    given = keys.raw("per_layer_config")
    if given is None:
        wide = keys.integer("global_head_dim", DEFAULTS["global_head_dim"])
        count = keys.optional_integer("num_global_key_value_heads", None)
        width, number = wide, count if count and keys.flag("attention_k_eq_v", False) else usual[HEADS[1]]
    else:
        places = [str(layer) for layer, kind in enumerate(kinds) if kind == FULL]
        own = given.get(places[-1], {}) if isinstance(given, dict) else None
        if not isinstance(own, dict) or given not in ({}, dict.fromkeys(places, own)):
            raise keys.error(
                "per_layer_config", f"one kind of heads for layers {', '.join(places)}, none for others"
            )
        inner = Keys(usual | own, keys.path)
        width, number = (inner.integer(name, usual[name]) for name in HEADS)
        inner.finish()
        for name in ("global_head_dim", "num_global_key_value_heads"):
            keys.raw(name)
    if n_heads % number:
        raise keys.error("num_global_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
    return width, number
