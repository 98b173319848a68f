"""Llama: the all-dense case.

Owns: the keys and tensor names of model_type "llama". Defaults: LlamaConfig of Transformers 5.24.
Refuses: mlp_bias and pretraining_tp other than neutral (keys.py), and what decoder.py refuses.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.decoder import Decoder, ExpertNames, Names, read_biases, read_decoder
from colibri.convert.keys import Keys

MODEL_TYPES = ("llama",)
ARCHITECTURES = ("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}

TENSORS: Names = SHARED
EXPERTS: ExpertNames | None = None


def read_config(keys: Keys) -> Decoder:
    """Every layer is dense."""
    decoder = read_decoder(keys, DEFAULTS)
    decoder.config.update(
        read_biases(keys),
        n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"]),
    )
    return decoder
