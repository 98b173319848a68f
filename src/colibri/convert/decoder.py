"""What the decoder families share: the config keys and tensor names of a pre-norm transformer with RoPE,
grouped-query attention and gated SiLU feed-forwards, dense or routed.

Owns: those keys and names, with the class defaults that a family hands in.
Refuses: other activations, impossible head sizes, more experts chosen than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.keys import Keys
from colibri.convert.rope import read_rope
from colibri.convert.windows import Windows, read_windows
from colibri.errors import ConversionError

# Target entry to source tensors that may hold it, without the wrapper "model."; {N} is the layer. A vector
# may be every second number of a tensor: name[0::2], or hold the tensors of all experts {E}. With an encoder
# "encoder.{N}." and "decoder.{N}." take the place of "layers.{N}.".
Names = Mapping[str, tuple[str, ...]]


class Cut(NamedTuple):
    """An entry that is a part or a permutation of its source: the source's shape, and the part that a head
    has, asked for when the shape is that."""

    shape: tuple[int, ...]
    view: Callable[[SourceTensor, int], View]


class Decoder(NamedTuple):
    """A model's config fields (without n_vocab_used, which follows from the tokenizer), its RoPE
    frequencies, how many layers behind the last one a checkpoint may hold for other purposes, cuts by
    target entry, of one layer or with {N}; {H} in it is the head; and how the names of tensors begin that
    serve other purposes."""

    config: dict[str, Any]
    inv_freq: npt.NDArray[np.float32]
    extra_layers: int = 0
    cuts: Mapping[str, Cut] = {}
    left_out: tuple[str, ...] = ()  # tensors of other parts begin so
    made: Mapping[str, npt.NDArray[np.float32]] = {}  # entries that have no source
    sources: Mapping[str, tuple[str, ...]] = {}  # of single entries, in place of those of Names
    affine: Mapping[str, tuple[float, float]] = {}  # vectors that become (values + first) x second
    logs: tuple[str, ...] = ()  # vectors that become log(-value)
    all_dim_scale: float = 1.0  # of rope.py's Rope
    equal: tuple[str, ...] = ()  # tensors that hold the embedding, of which the engine has one
    read: tuple[str, ...] = ()  # tensors that frequencies were made of
    start_id: int | None = None  # with an encoder: what a target begins with where config.json is silent


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a layer's experts may stand and how gate, up and down of one expert are called there."""

    blocks: tuple[str, ...]
    parts: tuple[str, ...]  # without up where there is none
    # One tensor [experts, n_embd, 2 n_ff] with gate and up in turns, and down transposed too.
    in_turns: bool = False
    # gate before up, and down, of all experts: below the block; whether transposed, None: their shapes tell.
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    transposed: bool | None = None
    # gate, up and down of all experts, each [experts, rows, cols]: below the block.
    apart: tuple[str, str, str] = (
        "switch_mlp.gate_proj.weight",
        "switch_mlp.up_proj.weight",
        "switch_mlp.down_proj.weight",
    )
    # One part of one expert {E}, below the block. With an encoder, `blocks` are one of its and one of the
    # others.
    single: str = "experts.{E}.{part}.weight"

    def of(self, block: str, expert: int) -> list[str]:
        """The tensors of one expert where each has its own."""
        name = f"{block}.{self.single}".replace("{E}", str(expert))
        return [name.replace("{part}", part) for part in self.parts]


TENSORS: Names = {
    "embedding": ("embed_tokens.weight",),
    "output": ("lm_head.weight",),
    "output_norm": ("norm.weight",),
    "layers.{N}.attn_norm": ("layers.{N}.input_layernorm.weight",),
    "layers.{N}.attn_q": ("layers.{N}.self_attn.q_proj.weight",),
    "layers.{N}.attn_k": ("layers.{N}.self_attn.k_proj.weight",),
    "layers.{N}.attn_v": ("layers.{N}.self_attn.v_proj.weight",),
    "layers.{N}.attn_q_bias": ("layers.{N}.self_attn.q_proj.bias",),
    "layers.{N}.attn_k_bias": ("layers.{N}.self_attn.k_proj.bias",),
    "layers.{N}.attn_v_bias": ("layers.{N}.self_attn.v_proj.bias",),
    "layers.{N}.attn_out": ("layers.{N}.self_attn.o_proj.weight",),
    "layers.{N}.attn_out_bias": ("layers.{N}.self_attn.o_proj.bias",),
    "layers.{N}.ffn_norm": ("layers.{N}.post_attention_layernorm.weight",),
    "layers.{N}.ffn_gate": ("layers.{N}.mlp.gate_proj.weight",),
    "layers.{N}.ffn_up": ("layers.{N}.mlp.up_proj.weight",),
    "layers.{N}.ffn_down": ("layers.{N}.mlp.down_proj.weight",),
}
# Of families whose layers are all routed.
ROUTED: Names = {
    target: names for target, names in TENSORS.items() if ".ffn_" not in target or target.endswith("_norm")
}
QK_NORM: Names = {
    "layers.{N}.attn_q_norm": ("layers.{N}.self_attn.q_norm.weight",),
    "layers.{N}.attn_k_norm": ("layers.{N}.self_attn.k_norm.weight",),
}
ROUTER: Names = {"layers.{N}.router": ("layers.{N}.mlp.gate.weight",)}
EXPERTS = ExpertNames(("layers.{N}.mlp",), ("gate_proj", "up_proj", "down_proj"))

# Buffers that old versions saved; recomputed from config.json.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "embed_positions.weights")


def read_decoder(
    keys: Keys,
    defaults: Mapping[str, Any],
    theta: float = 10000.0,
    share: float | None = None,
    head_dim: int | None = None,
    windows: Windows | None = None,
    others: tuple[str, ...] = (),
    eps: str = "rms_norm_eps",
) -> Decoder:
    """The shared keys. `defaults` are those of the family's config class in Transformers 5.24; None for
    num_key_value_heads means as many as heads, an absent or None head_dim means hidden_size / heads.
    `share` as in read_rope, `windows` and `others` as in read_windows. `head_dim`: a family that knows it
    allows no other in config.json. `eps`: the key of norms' epsilon.
    """
    keys.require("hidden_act", ("silu", "swish"), "silu")
    n_embd = keys.integer("hidden_size", defaults["hidden_size"], field="n_embd")
    n_heads = keys.integer("num_attention_heads", defaults["num_attention_heads"], field="n_heads")
    n_kv_heads = keys.optional_integer("num_key_value_heads", defaults["num_key_value_heads"]) or n_heads
    if n_heads % n_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
    found = keys.optional_integer("head_dim", defaults.get("head_dim"), field="head_dim")
    if head_dim is not None and found not in (None, head_dim):
        raise keys.error("head_dim", f"null or {head_dim}")
    head_dim, head_name = found if head_dim is None else head_dim, "head_dim"
    if head_dim is None:
        if n_embd % n_heads:
            raise ConversionError(
                f"{keys.path}: head_dim is not given and hidden_size {n_embd} is not a multiple of "
                f"num_attention_heads {n_heads}. Add the head_dim that the weights were made with."
            )
        head_dim, head_name = n_embd // n_heads, "hidden_size / num_attention_heads"
    context_length = keys.integer("max_position_embeddings", defaults["max_position_embeddings"])
    n_layers = keys.integer("num_hidden_layers", defaults["num_hidden_layers"], field="n_layers")
    rope = read_rope(keys, head_dim, context_length, theta, share, head_name)
    config = {
        "n_vocab": keys.integer("vocab_size", defaults["vocab_size"], field="n_vocab"),
        "n_layers": n_layers,
        "n_embd": n_embd,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "rope_dim": rope.dim,
        "rope_scale": rope.scale,
        "context_length": rope.context_length,
        "norm_eps": keys.number(eps, defaults[eps]),
        "attn_scale": head_dim**-0.5,
        "tied_output": int(keys.flag("tie_word_embeddings", defaults.get("tie_word_embeddings", False))),
        "window": read_windows(keys, windows, n_layers, context_length, others),
    }
    return Decoder(config, rope.inv_freq, all_dim_scale=rope.all_dim_scale)


def read_experts(
    keys: Keys,
    defaults: Mapping[str, Any],
    layers: list[bool],
    width_key: str,
    count_key: str = "num_experts",
    used_key: str = "num_experts_per_tok",
) -> dict[str, Any]:
    """Fields of the routed experts; `layers` says which layers have them."""
    other = "num_experts" if count_key == "num_local_experts" else "num_local_experts"
    n_experts = keys.integer(keys.alias(count_key, other), defaults[count_key], field="n_experts")
    n_used = keys.integer(used_key, defaults[used_key], field="n_experts_used")
    width = keys.integer(width_key, defaults[width_key], field="n_ff_expert")
    if n_used > n_experts:
        raise keys.error(used_key, f"at most {count_key} = {n_experts}")
    if not any(layers):
        return {"n_experts": [0] * len(layers)}
    return {
        "n_experts": [n_experts if routed else 0 for routed in layers],
        "n_experts_used": n_used,
        "n_ff_expert": width,
    }


def routed_layers(keys: Keys, n_layers: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th one that is not in mlp_only_layers."""
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.raw("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise keys.error("mlp_only_layers", "a list of layer numbers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers)]


def read_biases(keys: Keys) -> dict[str, int]:
    """attention_bias: q, k, v and the output have biases."""
    bias = int(keys.flag("attention_bias", False))
    return {"attn_qkv_bias": bias, "attn_out_bias": bias}


def permuted(order: tuple[int, ...], cols: int) -> Cut:
    rows = len(order)
    return Cut((rows, cols), lambda tensor, _: View(tensor, rows, cols, order=order))


def neighbours_apart(config: Mapping[str, Any]) -> dict[str, Cut]:
    """Rows of q and k for families that rotate neighbours together: half a rotation apart, as the engine has
    them. Scores stay the same."""
    dim, rope = config["head_dim"], config["rope_dim"]
    head = [*range(0, rope, 2), *range(1, rope, 2), *range(rope, dim)]

    def rows(n_heads: int) -> tuple[int, ...]:
        return tuple(h * dim + i for h in range(n_heads) for i in head)

    return {
        "layers.{N}.attn_q": permuted(rows(config["n_heads"]), config["n_embd"]),
        "layers.{N}.attn_k": permuted(rows(config["n_kv_heads"]), config["n_embd"]),
    }
