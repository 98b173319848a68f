"""Gated delta networks among gated attention: config keys and tensor names that the families share, and how
projections are cut apart.

Owns: which layers have which, the order of heads that the engine wants: all queries, all keys, all values.
Refuses: heads that do not divide, attention without its gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.decoder import QK_NORM, ROUTER, Cut, Decoder, Names, read_decoder
from colibri.convert.decoder import TENSORS as SHARED
from colibri.convert.keys import Keys
from colibri.convert.windows import FULL

LINEAR, CONV = "linear_attention", "conv"
SHARE = 0.25  # of a head that rotates, where config.json does not say
LEFT_OUT = ("mtp.", "visual.")
_AT = "layers.{N}.linear_attn."
DEFAULTS: dict[str, Any] = {  # that the families' config classes share
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_SIZES = {
    "linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_heads",
    "linear_key_head_dim": "delta_key_dim",
    "linear_value_head_dim": "delta_value_dim",
    "linear_conv_kernel_dim": "conv_width",
}
_CENTERED = ("output_norm", *(f"layers.{{N}}.{name}_norm" for name in ("attn", "attn_q", "attn_k", "ffn")))


def tensors(qkv: str, gate: str, beta: str, decay: str) -> Names:
    """Where every entry stands. A family stores the projections into a state in groups of its own."""
    return {
        **SHARED,
        **QK_NORM,
        **ROUTER,
        "layers.{N}.attn_gate": SHARED["layers.{N}.attn_q"],
        "layers.{N}.delta_qkv": (f"{_AT}in_proj_{qkv}.weight",),
        "layers.{N}.delta_gate": (f"{_AT}in_proj_{gate}.weight",),
        "layers.{N}.delta_beta": (f"{_AT}in_proj_{beta}.weight",),
        "layers.{N}.delta_decay": (f"{_AT}in_proj_{decay}.weight",),
        "layers.{N}.delta_conv": (_AT + "conv1d.weight",),
        "layers.{N}.delta_log_rate": (_AT + "A_log",),
        "layers.{N}.delta_decay_bias": (_AT + "dt_bias",),
        "layers.{N}.delta_value_norm": (_AT + "norm.weight",),
        "layers.{N}.delta_out": (_AT + "out_proj.weight",),
        "layers.{N}.shared_router": ("layers.{N}.mlp.shared_expert_gate.weight",),
        "layers.{N}.shared_gate": ("layers.{N}.mlp.shared_expert.gate_proj.weight",),
        "layers.{N}.shared_up": ("layers.{N}.mlp.shared_expert.up_proj.weight",),
        "layers.{N}.shared_down": ("layers.{N}.mlp.shared_expert.down_proj.weight",),
    }


def read_delta(keys: Keys, defaults: Mapping[str, Any]) -> Decoder:
    """The shared keys of such a decoder. The weights of its norms are stored less 1, but for the one of a
    state's values."""
    interval = keys.integer("full_attention_interval", 4)
    keys.require("attn_output_gate", (True,), True)
    decoder = read_decoder(keys, defaults, share=SHARE, others=(LINEAR,))
    config = decoder.config
    layers = range(config["n_layers"])
    types = keys.raw("layer_types") or [LINEAR if (n + 1) % interval else FULL for n in layers]
    key_heads, heads, key_dim, value_dim, width = (
        keys.integer(name, defaults[name], field=field) for name, field in _SIZES.items()
    )
    if heads % key_heads:
        raise keys.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    config.update(qk_norm=1, attn_gate=int(FULL in types), mixer=[int(kind == LINEAR) for kind in types])
    if LINEAR in types:
        config.update(
            delta_heads=heads,
            delta_key_heads=key_heads,
            delta_key_dim=key_dim,
            delta_value_dim=value_dim,
            conv_width=width,
        )
    head_dim, n_embd, channels = (
        config["head_dim"],
        config["n_embd"],
        2 * key_heads * key_dim + heads * value_dim,
    )
    q = [range(2 * h * head_dim, (2 * h + 1) * head_dim) for h in range(config["n_heads"])]
    gate = [range(one.stop, one.stop + head_dim) for one in q]
    return decoder._replace(
        cuts={
            "layers.{N}.attn_q": rows_of(q, 2 * len(q) * head_dim, n_embd),
            "layers.{N}.attn_gate": rows_of(gate, 2 * len(q) * head_dim, n_embd),
            "layers.{N}.delta_conv": taps_of(channels, width),
        },
        affine=dict.fromkeys(_CENTERED, (1.0, 1.0)),
        left_out=LEFT_OUT,
    )


def taps_of(channels: int, width: int) -> Cut:
    """A convolution [channels, 1, width], tap after tap."""

    def view(tensor: SourceTensor, _head: int) -> View:
        order = tuple(channel * width + tap for tap in range(width) for channel in range(channels))
        return View(tensor, 1, len(order), order=order, flat=True)

    return Cut((channels, 1, width), view)


def rows_of(parts: Sequence[Iterable[int]], rows: int, cols: int) -> Cut:
    """These rows of a source [rows, cols], one part after the other."""

    def view(tensor: SourceTensor, _head: int) -> View:
        order = tuple(chain.from_iterable(parts))
        return View(tensor, len(order), cols, order=order)

    return Cut((rows, cols), view)
