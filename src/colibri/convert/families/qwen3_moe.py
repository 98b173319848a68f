"""Qwen3-MoE: per-head q/k norm, softmax over all experts, top-k, renormalised if norm_topk_prob says so.

Owns: the keys and tensor names of model_type "qwen3_moe". Defaults: Qwen3MoeConfig of Transformers 5.24
(released checkpoints set norm_topk_prob to true; the class default is false).
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERTS
from colibri.convert.decoder import (
    QK_NORM,
    ROUTER,
    Decoder,
    ExpertNames,
    Names,
    read_biases,
    read_decoder,
    read_experts,
    routed_layers,
)
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("qwen3_moe",)
ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3MoeModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}
WINDOWS = Windows(4096, switched=True)

TENSORS: Names = {**SHARED, **QK_NORM, **ROUTER}
EXPERTS: ExpertNames | None = SHARED_EXPERTS


def read_config(keys: Keys) -> Decoder:
    """Layers may be dense among routed ones; both widths are read, each counts where it is used."""
    decoder = read_decoder(keys, DEFAULTS, windows=WINDOWS)
    routed = routed_layers(keys, decoder.config["n_layers"])
    n_ff = keys.integer("intermediate_size", DEFAULTS["intermediate_size"])
    decoder.config.update(
        read_biases(keys) | read_experts(keys, DEFAULTS, routed, "moe_intermediate_size"),
        qk_norm=1,
        router_norm=int(keys.flag("norm_topk_prob", False)),
        n_ff=0 if all(routed) else n_ff,
    )
    return decoder
