"""Qwen2 and Qwen2.5: all-dense, q, k and v with biases.

Owns: the keys and tensor names of model_type "qwen2". Defaults: Qwen2Config of Transformers 5.24.
Refuses: nothing beyond what decoder.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.decoder import Decoder, ExpertNames, Names, read_decoder
from colibri.convert.keys import Keys
from colibri.convert.windows import Windows

MODEL_TYPES = ("qwen2",)
ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen2Model")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
WINDOWS = Windows(4096, lambda layer, first: layer >= first, 28, switched=True, by_types=True)

TENSORS: Names = SHARED
EXPERTS: ExpertNames | None = None


def read_config(keys: Keys) -> Decoder:
    """Every layer is dense; the biases depend on no key."""
    decoder = read_decoder(keys, DEFAULTS, windows=WINDOWS)
    decoder.config.update(
        attn_qkv_bias=1,
        n_ff=keys.integer("intermediate_size", DEFAULTS["intermediate_size"]),
    )
    return decoder
