"""OLMoE: q/k norm over the full projection, then an optional clip of q, k, v; top-k weights not
renormalised unless norm_topk_prob says so.

Owns: the keys and tensor names of model_type "olmoe". Defaults: OlmoeConfig of Transformers 5.24.
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERTS
from colibri.convert.decoder import (
    QK_NORM,
    ROUTED,
    ROUTER,
    Decoder,
    ExpertNames,
    Names,
    read_biases,
    read_decoder,
    read_experts,
)
from colibri.convert.keys import Keys

MODEL_TYPES = ("olmoe",)
ARCHITECTURES = ("OlmoeForCausalLM", "OlmoeModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = (50279,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}

TENSORS: Names = {
    **ROUTED,
    **QK_NORM,
    **ROUTER,
}
EXPERTS: ExpertNames | None = SHARED_EXPERTS


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed; intermediate_size is the width of an expert. A clip of 0 would zero
    everything."""
    decoder = read_decoder(keys, DEFAULTS)
    routed = [True] * decoder.config["n_layers"]
    clip = keys.raw("clip_qkv")
    if clip is not None and not keys.number("clip_qkv", 0.0):
        raise keys.error("clip_qkv", "null or a number above 0")
    decoder.config.update(
        read_biases(keys) | read_experts(keys, DEFAULTS, routed, "intermediate_size"),
        qk_norm=2,
        qkv_clip=clip or 0.0,
        router_norm=int(keys.flag("norm_topk_prob", False)),
    )
    return decoder
