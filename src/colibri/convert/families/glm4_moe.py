"""GLM-4.5 and its successors of model_type "glm4_moe": part of a head rotates, optional q/k norm, biases of
q, k, v only; sigmoid scores chosen with a bias, ungated shared experts, dense layers first.

Owns: the keys and tensor names of the family. Defaults: Glm4MoeConfig of Transformers 5.24.
Refuses: nothing beyond what decoder.py, routing.py and keys.py refuse. Layers for predicting more than one
token, behind the last one, are left out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERT_NAMES
from colibri.convert.decoder import QK_NORM, Decoder, ExpertNames, Names, read_decoder
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.routing import BIASED_ROUTER, SHARED_EXPERTS, read_biased_sigmoid, read_layers

MODEL_TYPES = ("glm4_moe",)
ARCHITECTURES = ("Glm4MoeForCausalLM", "Glm4MoeModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
ROTATED_SHARE = 0.5
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}

TENSORS: Names = {**SHARED, **QK_NORM, **BIASED_ROUTER, **SHARED_EXPERTS}
EXPERTS: ExpertNames | None = SHARED_EXPERT_NAMES


def read_config(keys: Keys) -> Decoder:
    """num_nextn_predict_layers are layers that the checkpoint holds beyond num_hidden_layers."""
    decoder = read_decoder(keys, DEFAULTS, share=ROTATED_SHARE)
    fields = read_layers(keys, DEFAULTS, decoder.config["n_layers"])
    decoder.config.update(
        fields | read_biased_sigmoid(keys, DEFAULTS, fields),
        attn_qkv_bias=int(keys.flag("attention_bias", False)),
        qk_norm=int(keys.flag("use_qk_norm", False)),
    )
    return decoder._replace(extra_layers=keys.integer("num_nextn_predict_layers", 1, 0))
