"""Mixtral: softmax over all experts, top-k, weights always renormalised; experts named w1 (gate), w3 (up),
w2 (down).

Owns: the keys and tensor names of model_type "mixtral". Defaults: MixtralConfig of Transformers 5.24.
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import ROUTED, Decoder, ExpertNames, Names, read_decoder, read_experts
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("mixtral",)
ARCHITECTURES = ("MixtralForCausalLM", "MixtralModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
THETA = 1e6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
WINDOWS = Windows(None)

# Files call the block block_sparse_moe; Transformers 5 calls it mlp in memory, and stacks the experts.
TENSORS: Names = {
    **ROUTED,
    "layers.{N}.router": ("layers.{N}.block_sparse_moe.gate.weight", "layers.{N}.mlp.gate.weight"),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("layers.{N}.block_sparse_moe", "layers.{N}.mlp"), ("w1", "w3", "w2")
)


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed; intermediate_size is the width of an expert."""
    decoder = read_decoder(keys, DEFAULTS, THETA, windows=WINDOWS)
    routed = [True] * decoder.config["n_layers"]
    decoder.config.update(
        read_experts(keys, DEFAULTS, routed, "intermediate_size", "num_local_experts"),
        router_norm=1,
    )
    return decoder
