"""Multi-head latent attention: config keys and tensor names, and how its projections are cut by head.

Owns: the order of rows that the engine wants: of a head and of the shared key the rotated elements stand
first, and pairs of neighbours become pairs half a rotation apart. Refuses: biases, grouped keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.decoder import TENSORS as GROUPED
from colibri.convert.decoder import Cut, Decoder, Names, permuted, read_decoder
from colibri.convert.keys import Keys

LATENT_NORM_EPS = 1e-6  # the reference implementations give these norms their default, not rms_norm_eps

TENSORS: Names = {
    **{
        target: names
        for target, names in GROUPED.items()
        if not target.startswith(("layers.{N}.attn_k", "layers.{N}.attn_v"))
    },
    "layers.{N}.attn_q_latent": ("layers.{N}.self_attn.q_a_proj.weight",),
    "layers.{N}.attn_q_latent_norm": ("layers.{N}.self_attn.q_a_layernorm.weight",),
    "layers.{N}.attn_q": ("layers.{N}.self_attn.q_b_proj.weight", "layers.{N}.self_attn.q_proj.weight"),
    "layers.{N}.attn_kv_latent": ("layers.{N}.self_attn.kv_a_proj_with_mqa.weight",),
    "layers.{N}.attn_kv_latent_norm": ("layers.{N}.self_attn.kv_a_layernorm.weight",),
    "layers.{N}.attn_k_up.{H}": ("layers.{N}.self_attn.kv_b_proj.weight",),
    "layers.{N}.attn_v_up.{H}": ("layers.{N}.self_attn.kv_b_proj.weight",),
}


def read_latent(keys: Keys, defaults: Mapping[str, Any], interleaved: bool) -> Decoder:
    """The shared keys of such a decoder. interleaved: neighbours rotate together, not elements half apart."""
    rope = keys.integer("qk_rope_head_dim", defaults["qk_rope_head_dim"], 2, "rope_dim")
    if rope % 2:
        raise keys.error("qk_rope_head_dim", "an even number")
    plain = keys.integer("qk_nope_head_dim", defaults["qk_nope_head_dim"], field="head_dim")
    value_dim = keys.integer("v_head_dim", defaults["v_head_dim"], field="value_dim")
    rank = keys.integer("kv_lora_rank", defaults["kv_lora_rank"], field="kv_latent_dim")
    q_rank = keys.optional_integer("q_lora_rank", defaults["q_lora_rank"], field="q_latent_dim") or 0
    if keys.raw("qk_head_dim") not in (None, rope + plain):
        raise keys.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {rope + plain}")
    decoder = read_decoder(keys, defaults, head_dim=rope)
    config = decoder.config
    n_heads, n_embd = config["n_heads"], config["n_embd"]
    if config["n_kv_heads"] != n_heads:
        raise keys.error("num_key_value_heads", f"num_attention_heads = {n_heads}")
    config.update(
        n_kv_heads=1,
        head_dim=rope + plain,
        kv_latent_dim=rank,
        q_latent_dim=q_rank,
        value_dim=value_dim,
        latent_norm_eps=LATENT_NORM_EPS,
        attn_scale=(rope + plain) ** -0.5 * decoder.all_dim_scale**2,
    )
    pairs = [*range(0, rope, 2), *range(1, rope, 2)] if interleaved else [*range(rope)]
    head = [plain + i for i in pairs] + [*range(plain)]
    of_q = tuple(h * (rope + plain) + i for h in range(n_heads) for i in head)
    of_kv = (*(rank + i for i in pairs), *range(rank))
    shape = (n_heads * (plain + value_dim), rank)

    def key_up(tensor: SourceTensor, h: int) -> View:
        return View(tensor, rank, plain, transposed=True, col=h * (plain + value_dim))

    def value_up(tensor: SourceTensor, h: int) -> View:
        return View(tensor, value_dim, rank, start=h * (plain + value_dim) + plain)

    return decoder._replace(
        cuts={
            "layers.{N}.attn_q": permuted(of_q, q_rank or n_embd),
            "layers.{N}.attn_kv_latent": permuted(of_kv, n_embd),
            "layers.{N}.attn_k_up.{H}": Cut(shape, key_up),
            "layers.{N}.attn_v_up.{H}": Cut(shape, value_up),
        }
    )
