"""DeepSeek-V3 and -R1, and Kimi-K2, the same model under another model_type: latent attention, sigmoid
scores chosen with a bias among the best groups, an ungated shared expert, dense layers first.

Owns: the keys and tensor names of the family. Defaults: DeepseekV3Config of Transformers 5.24.
Refuses: biases, and what latent.py, routing.py, decoder.py and keys.py refuse. Layers that predict more than
one token, behind the last one, are left out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERT_NAMES
from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.keys import Keys
from colibri.convert.latent import TENSORS as LATENT
from colibri.convert.latent import read_latent
from colibri.convert.routing import BIASED_ROUTER, SHARED_EXPERTS, read_biased_sigmoid, read_layers

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV3Model")
BOS_DEFAULT: int | None = 0
EOS_DEFAULT: tuple[int, ...] = (1,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}

TENSORS: Names = {**LATENT, **BIASED_ROUTER, **SHARED_EXPERTS}
EXPERTS: ExpertNames | None = SHARED_EXPERT_NAMES


def read_config(keys: Keys) -> Decoder:
    """num_nextn_predict_layers are layers that the checkpoint holds beyond num_hidden_layers."""
    keys.allow_code("modeling_deepseek")
    decoder = read_latent(keys, DEFAULTS, keys.flag("rope_interleave", True))
    fields = read_layers(keys, DEFAULTS, decoder.config["n_layers"])
    decoder.config.update(fields | read_biased_sigmoid(keys, DEFAULTS, fields))
    return decoder._replace(extra_layers=keys.integer("num_nextn_predict_layers", 1, 0))
