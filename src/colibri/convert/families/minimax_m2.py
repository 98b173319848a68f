"""MiniMax-M2: q/k norm over the full projection, a part of each head rotates; sigmoid scores chosen with a
bias, divided by their sum; experts named w1 (gate), w3 (up), w2 (down).

Owns: the keys and tensor names of model_type "minimax_m2". Defaults: MiniMaxM2Config of Transformers 5.24.
Refuses: linear attention, shared experts, and what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import QK_NORM, ROUTED, Decoder, ExpertNames, Names, read_decoder, read_experts
from colibri.convert.keys import Keys

MODEL_TYPES = ("minimax_m2",)
ARCHITECTURES = ("MiniMaxM2ForCausalLM", "MiniMaxM2Model")
BOS_DEFAULT: int | None = 200034
EOS_DEFAULT: tuple[int, ...] = (200020,)
THETA = 5e6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
}
# Keys of released files with the one value that the reference implementation computes.
FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}
# Of mechanisms that these checkpoints have no use for.
UNUSED = (
    "layernorm_linear_attention_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "use_mtp",
)

TENSORS: Names = {
    **ROUTED,
    **QK_NORM,
    "layers.{N}.router": ("layers.{N}.block_sparse_moe.gate.weight", "layers.{N}.mlp.gate.weight"),
    "layers.{N}.router_bias": (
        "layers.{N}.block_sparse_moe.e_score_correction_bias",
        "layers.{N}.mlp.e_score_correction_bias",
    ),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("layers.{N}.block_sparse_moe", "layers.{N}.mlp"), ("w1", "w3", "w2")
)


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed; rotary_dim says the rotated part of a head where no factor does."""
    keys.allow_code("modeling_minimax_m2")
    head_dim = keys.integer("head_dim", DEFAULTS["head_dim"])
    rotated = keys.optional_integer("rotary_dim", None, 2)
    if rotated is not None and (rotated % 2 or rotated > head_dim):
        raise keys.error("rotary_dim", f"an even number up to head_dim = {head_dim}")
    decoder = read_decoder(keys, DEFAULTS, THETA, share=rotated / head_dim if rotated else 1.0)
    n_layers = decoder.config["n_layers"]
    for name, allowed in FIXED.items():
        keys.require(name, allowed, allowed[0])
    for name in UNUSED:
        keys.raw(name)
    kinds = keys.raw("attn_type_list")
    if kinds not in (None, [1] * n_layers):
        raise keys.error("attn_type_list", f"{n_layers} times 1, attention of the softmax")
    decoder.config.update(
        read_experts(keys, DEFAULTS, [True] * n_layers, "intermediate_size", "num_local_experts"),
        qk_norm=2,
        router_score=1,
        router_bias=1,
        router_norm=1,
    )
    return decoder
