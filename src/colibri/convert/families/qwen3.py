"""Qwen3: all-dense with per-head q/k norm.

Owns: the keys and tensor names of model_type "qwen3". Defaults: Qwen3Config of Transformers 5.24, whose
head_dim is 128 where config.json leaves it out (null means hidden_size / heads).
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import QK_NORM, Decoder, ExpertNames, Names, read_biases, read_decoder
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("qwen3",)
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
WINDOWS = Windows(4096, lambda layer, first: layer >= first, 28, switched=True, by_types=True)

TENSORS: Names = {**SHARED, **QK_NORM}
EXPERTS: ExpertNames | None = None


def read_config(keys: Keys) -> Decoder:
    """Every layer is dense."""
    decoder = read_decoder(keys, DEFAULTS, windows=WINDOWS)
    decoder.config.update(
        read_biases(keys),
        qk_norm=1,
        n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"]),
    )
    return decoder
