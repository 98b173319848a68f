"""Mistral and Ministral: all-dense, without biases, with a sliding window in every layer or, in Ministral, in
those that layer_types names.

Owns: the keys and tensor names of both model types. Defaults: MistralConfig and MinistralConfig of
Transformers 5.24.
Refuses: layer_types that MistralConfig would ignore, and what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.decoder import Decoder, ExpertNames, Names, read_decoder
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("mistral", "ministral")
ARCHITECTURES = ("MistralForCausalLM", "MistralModel", "MinistralForCausalLM", "MinistralModel")
BOS_DEFAULT: int | None = 1
EOS_DEFAULT: tuple[int, ...] = (2,)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}

TENSORS: Names = SHARED
EXPERTS: ExpertNames | None = None


def read_config(keys: Keys) -> Decoder:
    """Every layer is dense."""
    by_types = keys.values["model_type"] == "ministral"
    decoder = read_decoder(keys, DEFAULTS, windows=Windows(4096, by_types=by_types))
    decoder.config.update(n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"]))
    return decoder
