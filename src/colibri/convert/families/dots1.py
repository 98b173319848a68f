"""dots.llm1: attention with per-head q/k norm over whole-head RoPE; sigmoid scores chosen with a bias, shared
experts without a gate, dense layers first.

Owns: the keys and tensor names of model_type "dots1". Defaults: Dots1Config of Transformers 5.24.
Refuses: nothing beyond what decoder.py, routing.py and keys.py refuse.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERT_NAMES
from colibri.convert.decoder import QK_NORM, Decoder, ExpertNames, Names, read_biases, read_decoder
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.routing import BIASED_ROUTER, SHARED_EXPERTS, read_biased_sigmoid, read_layers
from colibri.convert.windows import Windows

MODEL_TYPES = ("dots1",)
ARCHITECTURES = ("Dots1ForCausalLM", "Dots1Model")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": None,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}

# From layer max_window_layers on, which no released model reaches.
WINDOWS = Windows(4096, lambda layer, first: layer >= first, 62, by_types=True)

TENSORS: Names = {**SHARED, **QK_NORM, **BIASED_ROUTER, **SHARED_EXPERTS}
EXPERTS: ExpertNames | None = SHARED_EXPERT_NAMES


def read_config(keys: Keys) -> Decoder:
    """Dense layers first, then routed ones; attention_bias is that of q, k, v and the output."""
    decoder = read_decoder(keys, DEFAULTS, windows=WINDOWS)
    fields = read_layers(keys, DEFAULTS, decoder.config["n_layers"])
    decoder.config.update(
        read_biases(keys) | fields | read_biased_sigmoid(keys, DEFAULTS, fields),
        qk_norm=1,
    )
    return decoder
