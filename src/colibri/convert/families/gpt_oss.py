"""GPT-OSS: attention with sinks, in every second layer with a window; YaRN; softmax over the best of gate
logits that have a bias; experts with biases and a clamped activation, gate and up in turns.

Owns: the keys and tensor names of model_type "gpt_oss". Defaults: GptOssConfig of Transformers 5.24.
Refuses: other quantisation than mxfp4, and what decoder.py, windows.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import ROUTED, Decoder, ExpertNames, Names, read_decoder, read_experts
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("gpt_oss",)
ARCHITECTURES = ("GptOssForCausalLM", "GptOssModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
THETA = 150000.0
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
WINDOWS = Windows(128, lambda layer, _first: layer % 2 == 0, by_types=True)

TENSORS: Names = {
    **ROUTED,
    "layers.{N}.attn_sinks": ("layers.{N}.self_attn.sinks",),
    "layers.{N}.router": ("layers.{N}.mlp.router.weight",),
    "layers.{N}.router_logit_bias": ("layers.{N}.mlp.router.bias",),
    "layers.{N}.experts_gate_bias": ("layers.{N}.mlp.experts.gate_up_proj_bias[0::2]",),
    "layers.{N}.experts_up_bias": ("layers.{N}.mlp.experts.gate_up_proj_bias[1::2]",),
    "layers.{N}.experts_down_bias": ("layers.{N}.mlp.experts.down_proj_bias",),
}
EXPERTS: ExpertNames | None = ExpertNames(
    ("layers.{N}.mlp",), ("gate_proj", "up_proj", "down_proj"), in_turns=True
)


def read_config(keys: Keys) -> Decoder:
    """Every layer is routed. Softmax over the chosen logits is softmax over all, divided by their sum."""
    if not (keys.values.get("rope_scaling") or keys.values.get("rope_parameters")):
        keys.values["rope_parameters"] = keys.defaults["rope_parameters"] = ROPE
    decoder = read_decoder(keys, DEFAULTS, THETA, windows=WINDOWS)
    keys.alias("num_experts_per_tok", "experts_per_token")
    keys.raw("initial_context_length")  # the original length, said a second time
    quantised = keys.raw("quantization_config")
    if quantised is not None and (
        not isinstance(quantised, dict) or quantised.get("quant_method") != "mxfp4"
    ):
        raise keys.error("quantization_config", "null or quant_method 'mxfp4'")
    limit = keys.number("swiglu_limit", 7.0)
    if not limit:
        raise keys.error("swiglu_limit", "a number above 0")
    bias = int(keys.flag("attention_bias", True))
    routed = [True] * decoder.config["n_layers"]
    decoder.config.update(
        read_experts(keys, DEFAULTS, routed, "intermediate_size", "num_local_experts"),
        attn_qkv_bias=bias,
        attn_out_bias=bias,
        attn_sinks=1,
        router_logit_bias=1,
        router_norm=1,
        expert_bias=1,
        ffn_limit=limit,
        ffn_alpha=keys.number("swiglu_alpha", 1.702),
        ffn_up_offset=1.0,
    )
    return decoder
