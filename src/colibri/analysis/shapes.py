"""Sizes of models under a name, so that speed can be measured without downloading one.

Owns: the table, and the config.json and tokenizer.json that a checkpoint of such sizes would have: the
converter's own reading of them decides the mechanisms. benchmarks/synthetic.py writes checkpoints of these
shapes for Transformers, synthetic.py beside this file writes `.colibri` files.
Refuses: weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, by the names of docs/FORMAT.md. Widths are multiples of 32, n_vocab one of 16."""

    family: str  # model_type of config.json
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    n_experts_used: int
    n_ff_expert: int
    n_vocab: int
    context_length: int = 4096

    @property
    def matrices(self) -> tuple[int, int]:
        """Elements of attention, and of one expert, of a layer."""
        heads = 2 * (self.n_heads + self.n_kv_heads) * self.head_dim
        return heads * self.n_embd, 3 * self.n_ff_expert * self.n_embd

    def parameters(self, experts: int) -> int:
        """Elements of all matrices if a layer has this many experts."""
        attention, expert = self.matrices
        layer = attention + experts * expert + self.n_experts * self.n_embd
        return 2 * self.n_vocab * self.n_embd + self.n_layers * layer


SHAPES = {
    "olmoe-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304),  # the sizes of OLMoE-1B-7B
    "qwen3-moe-1b": Shape("qwen3_moe", 12, 1024, 16, 4, 64, 32, 4, 768, 32000),
    "mixtral-tiny": Shape("mixtral", 4, 256, 8, 4, 32, 8, 2, 256, 512),  # to try things: 8 MB in q8
}


def config_json(shape: Shape) -> dict[str, Any]:
    """config.json of the shape's family."""
    common: dict[str, Any] = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.n_vocab,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff_expert,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "num_experts_per_tok": shape.n_experts_used,
        "max_position_embeddings": shape.context_length,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return common | _FAMILIES[shape.family](shape)


def _olmoe(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": shape.n_experts,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
    }


def _qwen3_moe(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": shape.head_dim,
        "intermediate_size": shape.n_ff_expert * shape.n_experts_used,
        "moe_intermediate_size": shape.n_ff_expert,
        "num_experts": shape.n_experts,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _mixtral(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": shape.head_dim,
        "num_local_experts": shape.n_experts,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }


_FAMILIES = {"olmoe": _olmoe, "qwen3_moe": _qwen3_moe, "mixtral": _mixtral}


def tokenizer_json(n_vocab: int) -> str:
    """Ids 1 to 256 are the 256 bytes, 0 ends a text. The ids beyond are words that no text is cut into:
    without them the engine would take those rows of the embedding for padding and never choose them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġw{number}" for number in range(len(tokens), n_vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return str(tokenizer.to_str())
