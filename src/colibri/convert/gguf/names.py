"""The names of tensors in GGUF files: one table from our entries for all architectures.

Owns: that table. Refuses: what an architecture has otherwise (relaid.py).
"""

from __future__ import annotations

from colibri.convert.decoder import ExpertNames, Names


def layer(**names: str) -> Names:
    """Entries of a layer, and how GGUF calls them."""
    return {f"layers.{{N}}.{entry}": (f"blk.{{N}}.{name}",) for entry, name in names.items()}


NAMES: Names = {
    "embedding": ("token_embd.weight",),
    "output": ("output.weight",),
    "output_bias": ("output.bias",),
    "output_norm": ("output_norm.weight",),
    "output_norm_bias": ("output_norm.bias",),
    **layer(
        attn_norm="attn_norm.weight",
        attn_norm_bias="attn_norm.bias",
        attn_q="attn_q.weight",
        attn_k="attn_k.weight",
        attn_v="attn_v.weight",
        attn_q_bias="attn_q.bias",
        attn_k_bias="attn_k.bias",
        attn_v_bias="attn_v.bias",
        attn_q_norm="attn_q_norm.weight",
        attn_k_norm="attn_k_norm.weight",
        attn_q_latent="attn_q_a.weight",
        attn_q_latent_norm="attn_q_a_norm.weight",
        attn_kv_latent="attn_kv_a_mqa.weight",
        attn_kv_latent_norm="attn_kv_a_norm.weight",
        attn_out="attn_output.weight",
        attn_out_bias="attn_output.bias",
        attn_sinks="attn_sinks.weight",
        attn_post_norm="post_attention_norm.weight",
        ffn_norm="ffn_norm.weight",
        ffn_norm_bias="ffn_norm.bias",
        ffn_post_norm="post_ffw_norm.weight",
        expert_norm="pre_ffw_norm_2.weight",
        expert_post_norm="post_ffw_norm_2.weight",
        dense_post_norm="post_ffw_norm_1.weight",
        layer_scale="layer_output_scale.weight",
        ffn_gate="ffn_gate.weight",
        ffn_up="ffn_up.weight",
        ffn_down="ffn_down.weight",
        router="ffn_gate_inp.weight",
        router_logit_bias="ffn_gate_inp.bias",
        router_norm="ffn_gate_inp.scale",
        router_expert_scale="ffn_down_exps.scale",
        shared_router="ffn_gate_inp_shexp.weight",
        shared_gate="ffn_gate_shexp.weight",
        shared_up="ffn_up_shexp.weight",
        shared_down="ffn_down_shexp.weight",
        experts_gate_bias="ffn_gate_exps.bias",
        experts_up_bias="ffn_up_exps.bias",
        experts_down_bias="ffn_down_exps.bias",
    ),
    "layers.{N}.router_bias": ("blk.{N}.exp_probs_b.bias", "blk.{N}.exp_probs_b"),
}
EXPERTS = ExpertNames(
    ("blk.{N}",),
    ("ffn_gate", "ffn_up", "ffn_down"),
    stacked=("ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
    transposed=False,
    apart=("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
    single="{part}.{E}.weight",  # of files of before April 2024
)
