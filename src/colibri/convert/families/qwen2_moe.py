"""Qwen2-MoE (and Qwen1.5-MoE): q, k, v biases, routed experts plus one shared expert scaled by a sigmoid
gate.

Owns: the keys and tensor names of model_type "qwen2_moe". Defaults: Qwen2MoeConfig of Transformers 5.24.
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERTS
from colibri.convert.decoder import (
    ROUTER,
    Decoder,
    ExpertNames,
    Names,
    read_decoder,
    read_experts,
    routed_layers,
)
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("qwen2_moe",)
ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen2MoeModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
WINDOWS = Windows(
    4096, lambda layer, first: layer % 2 == 0 and layer < first, 28, switched=True, by_types=True
)

TENSORS: Names = {
    **SHARED,
    **ROUTER,
    "layers.{N}.shared_router": ("layers.{N}.mlp.shared_expert_gate.weight",),
    "layers.{N}.shared_gate": ("layers.{N}.mlp.shared_expert.gate_proj.weight",),
    "layers.{N}.shared_up": ("layers.{N}.mlp.shared_expert.up_proj.weight",),
    "layers.{N}.shared_down": ("layers.{N}.mlp.shared_expert.down_proj.weight",),
}
EXPERTS: ExpertNames | None = SHARED_EXPERTS


def read_config(keys: Keys) -> Decoder:
    """Layers may be dense among routed ones; the shared expert stands in routed layers only."""
    decoder = read_decoder(keys, DEFAULTS, windows=WINDOWS)
    routed = routed_layers(keys, decoder.config["n_layers"])
    n_ff = keys.integer("intermediate_size", DEFAULTS["intermediate_size"])
    n_ff_shared = keys.integer("shared_expert_intermediate_size", DEFAULTS["shared_expert_intermediate_size"])
    decoder.config.update(
        read_experts(keys, DEFAULTS, routed, "moe_intermediate_size"),
        attn_qkv_bias=int(keys.flag("qkv_bias", True)),
        router_norm=int(keys.flag("norm_topk_prob", False)),
        n_ff=0 if all(routed) else n_ff,
        n_ff_shared=n_ff_shared if any(routed) else 0,
        shared_gate=int(any(routed)),
    )
    return decoder
