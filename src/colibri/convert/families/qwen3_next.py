"""Qwen3-Next: gated delta networks, each fourth layer gated attention; routed experts and a gated shared one.

Owns: the keys and tensor names of model_type "qwen3_next", whose projections have the parts of a key head
side by side. Defaults: Qwen3NextConfig of Transformers 5.24.
Refuses: biases, and what delta.py, decoder.py and keys.py refuse. Layers that predict further tokens are left
out and listed.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.decoder import EXPERTS as SHARED_EXPERTS
from colibri.convert.decoder import Decoder, ExpertNames, Names, read_experts, routed_layers
from colibri.convert.delta import DEFAULTS as SHARED_DEFAULTS
from colibri.convert.delta import read_delta, rows_of, tensors
from colibri.convert.keys import Keys

MODEL_TYPES = ("qwen3_next",)
ARCHITECTURES = ("Qwen3NextForCausalLM", "Qwen3NextModel")
BOS_DEFAULT: int | None = None
EOS_DEFAULT: tuple[int, ...] = ()
DEFAULTS: dict[str, Any] = {
    **SHARED_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}

TENSORS: Names = tensors(qkv="qkvz", gate="qkvz", beta="ba", decay="ba")
EXPERTS: ExpertNames | None = SHARED_EXPERTS


def read_config(keys: Keys) -> Decoder:
    """Layers may be dense among routed ones; the shared expert stands in routed layers only."""
    decoder = read_delta(keys, DEFAULTS)
    routed = routed_layers(keys, decoder.config["n_layers"])
    n_ff = keys.integer("intermediate_size", DEFAULTS["intermediate_size"])
    n_ff_shared = keys.integer("shared_expert_intermediate_size", DEFAULTS["shared_expert_intermediate_size"])
    decoder.config.update(
        read_experts(keys, DEFAULTS, routed, "moe_intermediate_size"),
        router_norm=int(keys.flag("norm_topk_prob", True)),
        n_ff=0 if all(routed) else n_ff,
        n_ff_shared=n_ff_shared if any(routed) else 0,
        shared_gate=int(any(routed)),
    )
    return (
        decoder._replace(cuts={**decoder.cuts, **_cuts(decoder.config)})
        if any(decoder.config["mixer"])
        else decoder
    )


def _cuts(config: dict[str, Any]) -> dict[str, Any]:
    """By key head lie its query, its key, and the values and the gates of the heads that read it; and the
    same heads' betas, then their decays."""
    key_heads, key_dim, n_embd = config["delta_key_heads"], config["delta_key_dim"], config["n_embd"]
    group = config["delta_heads"] // key_heads
    sizes = (key_dim, key_dim, group * config["delta_value_dim"], group * config["delta_value_dim"])
    rows = sum(sizes)
    starts = [sum(sizes[:part]) for part in range(4)]

    def part(start: int, size: int, stride: int) -> list[range]:
        return [range(h * stride + start, h * stride + start + size) for h in range(key_heads)]

    q, k, v, gate = (part(start, size, rows) for start, size in zip(starts, sizes, strict=True))
    beta, decay = part(0, group, 2 * group), part(group, group, 2 * group)
    return {
        "layers.{N}.delta_qkv": rows_of([*q, *k, *v], rows * key_heads, n_embd),
        "layers.{N}.delta_gate": rows_of(gate, rows * key_heads, n_embd),
        "layers.{N}.delta_beta": rows_of(beta, 2 * group * key_heads, n_embd),
        "layers.{N}.delta_decay": rows_of(decay, 2 * group * key_heads, n_embd),
    }
