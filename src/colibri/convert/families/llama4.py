"""Llama 4, its text: layers that rotate q and k, norm them and see aligned chunks of the past, among layers
that see all of it, do not rotate and scale q by position; sigmoids of the best gate logits multiply what
experts read; an ungated shared expert; dense layers between.

Owns: the keys and tensor names of model_types "llama4" and "llama4_text". Defaults: Llama4TextConfig of
Transformers 5.24. Refuses: biases, and what decoder.py and keys.py refuse. What belongs to images is left out
and listed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri.convert.decoder import (
    ROUTED,
    Decoder,
    ExpertNames,
    Names,
    neighbours_apart,
    read_decoder,
    read_experts,
)
from colibri.convert.keys import Keys

MODEL_TYPES = ("llama4", "llama4_text")
ARCHITECTURES = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM", "Llama4TextModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
THETA = 500000.0
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
}
MOST_STEPS = 1 << 20  # of the factor of q; released files have up to 1,280
KINDS = ("chunked_attention", "full_attention")

BLOCK = "layers.{N}.feed_forward"
TENSORS: Names = {
    **ROUTED,
    **{f"layers.{{N}}.ffn_{part}": (f"{BLOCK}.{part}_proj.weight",) for part in ("gate", "up", "down")},
    **{
        f"layers.{{N}}.shared_{part}": (f"{BLOCK}.shared_expert.{part}_proj.weight",)
        for part in ("gate", "up", "down")
    },
    "layers.{N}.router": (f"{BLOCK}.router.weight",),
}
EXPERTS: ExpertNames | None = ExpertNames((BLOCK,), ("gate_proj", "up_proj", "down_proj"), transposed=True)


def read_config(keys: Keys) -> Decoder:
    """The norm of q and k has no weight and follows the rotation, which keeps lengths but for a scale: ones
    before it."""
    kinds = keys.raw("layer_types")
    keys.values.pop("layer_types", None)
    decoder = read_decoder(keys, DEFAULTS, THETA)
    config, n_layers = decoder.config, decoder.config["n_layers"]
    rotates = _flags(keys, n_layers)
    chunk = keys.optional_integer("attention_chunk_size", 8192)
    kinds = kinds or [KINDS[0] if one and chunk else KINDS[1] for one in rotates]
    if not isinstance(kinds, list) or len(kinds) != n_layers or set(kinds) - set(KINDS):
        raise keys.error("layer_types", f"{' or '.join(KINDS)} for each of num_hidden_layers = {n_layers}")
    if chunk is None and KINDS[0] in kinds:
        raise keys.error("attention_chunk_size", f"a number of positions, since layers are {KINDS[0]}")
    routed = _moe_layers(keys, n_layers)
    keys.raw("for_llm_compressor")
    norm = keys.flag("use_qk_norm", True)
    dense, width = keys.integer("intermediate_size_mlp", 16384), keys.integer("intermediate_size", 8192)
    config.update(
        read_experts(keys, DEFAULTS, routed, "intermediate_size", "num_local_experts"),
        window=[chunk if kind == KINDS[0] else 0 for kind in kinds],
        window_aligned=int(KINDS[0] in kinds),
        rope_set=[0 if one else 2 for one in rotates],
        qk_norm=3 if norm else 0,
        n_ff=0 if all(routed) else dense,
    )
    if any(routed):
        config.update(router_score=2, router_on_input=1, n_ff_shared=width)
    if norm:  # takes away what the rotation scales by
        config["rope_scale"] = 1.0
    ones = np.ones(config["head_dim"], np.float32)
    made = {f"layers.{{N}}.attn_{part}_norm": ones for part in "qk"} if norm else {}
    step, strength = keys.integer("floor_scale", 8192), keys.number("attn_scale", 0.1)
    if keys.flag("attn_temperature_tuning", True):
        if config["context_length"] // step > MOST_STEPS:
            raise keys.error("floor_scale", f"at least max_position_embeddings / {MOST_STEPS}")
        config["temperature_step"] = step
        steps = np.arange(config["context_length"] // step + 1, dtype=np.float64)
        made["attn_temperature"] = (strength * np.log1p(steps)).astype(np.float32)
    left_out = ("vision_model.", "multi_modal_projector.")
    return decoder._replace(cuts=neighbours_apart(config), made=made, left_out=left_out)


def _flags(keys: Keys, n_layers: int) -> list[bool]:
    """Which layers rotate: no_rope_layers says 1 of those that do."""
    interval = keys.integer("no_rope_layer_interval", 4)
    flags = keys.raw("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if not isinstance(flags, list) or len(flags) != n_layers or set(flags) - {0, 1}:
        raise keys.error("no_rope_layers", f"0 or 1 for each of num_hidden_layers = {n_layers}")
    return [flag == 1 for flag in flags]


def _moe_layers(keys: Keys, n_layers: int) -> list[bool]:
    step, layers = keys.integer("interleave_moe_layer_step", 1), keys.raw("moe_layers")
    if layers is None:
        layers = list(range(step - 1, n_layers, step))
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise keys.error("moe_layers", "a list of layer numbers")
    return [layer in layers for layer in range(n_layers)]
