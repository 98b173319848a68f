"""DeepSeek-V2 and its Lite and Coder models: latent attention, softmax scores never renormalised, all
experts in the choice or those of the best groups, ungated shared experts, dense layers first.

Owns: the keys and tensor names of model_type "deepseek_v2". Defaults: DeepseekV2Config of Transformers 5.24.
Refuses: norm_topk_prob (its own code and Transformers disagree, no release sets it), biases, and what
latent.py, routing.py, decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERT_NAMES
from colibri.convert.decoder import ROUTER, Decoder, ExpertNames, Names
from colibri.convert.keys import Keys
from colibri.convert.latent import TENSORS as LATENT
from colibri.convert.latent import read_latent
from colibri.convert.routing import SHARED_EXPERTS, read_layers

MODEL_TYPES = ("deepseek_v2",)
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV2Model")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "num_experts_per_tok": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
    "first_k_dense_replace": 0,
}

TENSORS: Names = {**LATENT, **ROUTER, **SHARED_EXPERTS}
EXPERTS: ExpertNames | None = SHARED_EXPERT_NAMES


def read_config(keys: Keys) -> Decoder:
    """topk_method "greedy" has no groups, whatever n_group says."""
    keys.allow_code("modeling_deepseek")
    keys.require("scoring_func", ("softmax",), "softmax")
    keys.require("norm_topk_prob", (False,), False)
    keys.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    decoder = read_latent(keys, DEFAULTS, interleaved=True)
    fields = read_layers(keys, DEFAULTS, decoder.config["n_layers"])
    if keys.values.get("topk_method") != "group_limited_greedy":
        for name in ("n_expert_groups", "n_groups_used"):
            fields.pop(name, None)
    decoder.config.update(fields)
    return decoder
