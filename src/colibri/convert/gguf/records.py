"""One record per GGUF architecture: which family of ours it is, and what config.json calls its keys.

Owns: that table. Refuses: what keys mean together (peculiarities.py), reading them (architectures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from colibri.convert.gguf import peculiarities as peculiar
from colibri.convert.gguf.metadata import Metadata
from colibri.convert.gguf.peculiarities import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Config


class Architecture(NamedTuple):
    """`keys`: below the architecture's name, and what config.json calls them, beside COMMON. `starts`: what
    holds where a key is absent, or always; a key without a start must be there. `present`: true where the
    file has one of these tensors. `implied`: keys that most files lack, with the value that the architecture
    has."""

    model_type: str
    keys: Mapping[str, str] = {}
    starts: Mapping[str, Any] = {}
    present: Mapping[str, tuple[str, ...]] = {}
    implied: Mapping[str, Any] = {}
    harmless: tuple[str, ...] = ()
    other_heads: bool = False  # which have keys of their own
    factors: bool = True  # rope_freqs.weight divides all frequencies
    finish: Callable[[Metadata, Config], None] | None = None  # what no table says


COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
GROUPED = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
DENSE = {"feed_forward_length": "intermediate_size"}
USED = {"expert_used_count": "num_experts_per_tok"}
LOCAL = {"expert_count": "num_local_experts", **USED}
EXPERTS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size", **USED}
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ROUTED = {
    **DENSE,
    **USED,
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_ROUTED_STARTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
_CONVOLVED = {  # a norm's epsilon has another name in config.json
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}
_Q_BIAS = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        {**GROUPED, **DENSE},
        present={"attention_bias": _Q_BIAS},
        finish=peculiar.routed_if_said,
    ),
    "qwen2": Architecture("qwen2", {**GROUPED, **DENSE}),
    "qwen3": Architecture("qwen3", {**GROUPED, **DENSE}, present={"attention_bias": _Q_BIAS}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**GROUPED, **DENSE, **EXPERTS, **SHARED},
        starts={"norm_topk_prob": False},
        present={"qkv_bias": _Q_BIAS},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": False},
        finish=peculiar.dense_layers,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**GROUPED, **DENSE, **EXPERTS},
        starts={"norm_topk_prob": True},
        present={"attention_bias": _Q_BIAS},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        finish=peculiar.dense_layers,
    ),
    "olmoe": Architecture(
        "olmoe",
        {**GROUPED, **DENSE, **USED, "expert_count": "num_experts"},
        starts={"norm_topk_prob": False},
        present={"attention_bias": _Q_BIAS},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": False},
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        {**ROUTED, "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
        starts={**_ROUTED_STARTS, "q_lora_rank": None},
        other_heads=True,
        finish=peculiar.deepseek,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**GROUPED, **LOCAL, "expert_feed_forward_length": "intermediate_size"},
        present={"attention_bias": _Q_BIAS},
        implied={"expert_gating_func": SOFTMAX_OF_CHOSEN},
        harmless=("feed_forward_length",),
        finish=peculiar.gpt_oss,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {**GROUPED, **ROUTED},
        starts=_ROUTED_STARTS,
        present={"attention_bias": _Q_BIAS, "use_qk_norm": ("blk.0.attn_q_norm.weight",)},
        implied={"expert_gating_func": SIGMOID},
        harmless=("rope.dimension_sections",),  # of images: a text's positions are one
    ),
    "dots1": Architecture(
        "dots1",
        {**GROUPED, **ROUTED},
        starts={**_ROUTED_STARTS, "sliding_window": None},
        present={"attention_bias": _Q_BIAS},
        implied={"expert_gating_func": SIGMOID},
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {
            **GROUPED,
            **DENSE,
            **LOCAL,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
        starts={"attention_multiplier": 0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
        present={"attention_bias": _Q_BIAS},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        finish=peculiar.granite,
    ),
    "phimoe": Architecture(
        "phimoe",
        {**GROUPED, **DENSE, **LOCAL, "attention.sliding_window": "sliding_window"},
        starts={"sliding_window": None},
        present={"attention_bias": _Q_BIAS, "lm_head_bias": ("output.bias",)},
        implied={"expert_gating_func": SOFTMAX},
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **GROUPED,
            **DENSE,
            "expert_count": "moe_num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        starts={"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        harmless=("expert_shared_feed_forward_length",),  # written as another quotient; the tensors count
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {**GROUPED, **LOCAL, "expert_feed_forward_length": "intermediate_size", **DENSE},
        implied={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
    ),
    "gemma3": Architecture("gemma3_text", {**GROUPED, **DENSE}, finish=peculiar.gemma3),
    "lfm2": Architecture("lfm2", {**_CONVOLVED, **DENSE}, finish=peculiar.convolved),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {
            **_CONVOLVED,
            **DENSE,
            **EXPERTS,
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "num_dense_layers",
        },
        starts={"num_dense_layers": 0, "routed_scaling_factor": 1.0},
        implied={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
        finish=peculiar.convolved,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **DENSE,
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "top_k_experts",
        },
        starts={
            "hidden_size_per_layer_input": 0,
            "moe_intermediate_size": 0,
            "num_experts": 0,
            "num_kv_shared_layers": 0,
            "top_k_experts": 0,
        },
        present={"enable_moe_block": ("blk.0.ffn_gate_inp.weight",)},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        other_heads=True,
        factors=False,
        finish=peculiar.gemma4,
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            **GROUPED,
            **LOCAL,
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        implied={"expert_gating_func": SIGMOID},
        finish=peculiar.llama4,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        {**GROUPED, **DENSE, **EXPERTS, **SHARED, **DELTA},
        starts={"norm_topk_prob": True},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        finish=peculiar.delta_next,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**GROUPED, **EXPERTS, **SHARED, **DELTA},
        implied={"expert_gating_func": SOFTMAX, "expert_weights_norm": True},
        harmless=("feed_forward_length", "rope.dimension_sections"),  # of images: a text's positions are one
        finish=peculiar.delta,
    ),
}
