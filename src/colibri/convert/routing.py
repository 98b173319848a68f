"""What the families share whose routers take the best experts of the best groups, with shared experts beside
them and dense layers before them.

Owns: those config keys and tensor names. Refuses: other scores and methods than the family's, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri.convert.decoder import ROUTER, Names, read_experts
from colibri.convert.keys import Keys

SHARED_EXPERTS: Names = {
    f"layers.{{N}}.shared_{part}": (f"layers.{{N}}.mlp.shared_experts.{part}_proj.weight",)
    for part in ("gate", "up", "down")
}
BIASED_ROUTER: Names = {
    **ROUTER,
    "layers.{N}.router_bias": ("layers.{N}.mlp.gate.e_score_correction_bias",),
}


def read_layers(keys: Keys, defaults: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Routed layers behind first_k_dense_replace dense ones (every moe_layer_freq-th, counted from 0), their
    experts, shared experts as one that is so much wider, groups, and the scale of the weights."""
    first = keys.integer("first_k_dense_replace", defaults["first_k_dense_replace"], 0)
    step = keys.integer("moe_layer_freq", 1)
    routed = [layer >= first and layer % step == 0 for layer in range(n_layers)]
    fields = read_experts(keys, defaults, routed, "moe_intermediate_size", "n_routed_experts")
    shared = keys.optional_integer("n_shared_experts", defaults["n_shared_experts"], 0) or 0
    n_ff = keys.integer("intermediate_size", defaults["intermediate_size"])
    groups = _read_groups(keys, defaults)
    scale = keys.number("routed_scaling_factor", defaults["routed_scaling_factor"])
    if not any(routed):
        return fields | {"n_ff": n_ff}
    return (
        fields
        | groups
        | {
            "router_scale": scale,
            "n_ff": 0 if all(routed) else n_ff,
            "n_ff_shared": shared * fields["n_ff_expert"],
        }
    )


def read_biased_sigmoid(keys: Keys, defaults: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, int]:
    """Sigmoid scores, chosen with a bias, groups by their two best experts; nothing without experts."""
    keys.require("scoring_func", ("sigmoid",), "sigmoid")
    keys.require("topk_method", ("noaux_tc",), "noaux_tc")
    norm = int(keys.flag("norm_topk_prob", defaults["norm_topk_prob"]))
    if not any(fields["n_experts"]):
        return {}
    grouped = int("n_expert_groups" in fields)
    return {"router_score": 1, "router_bias": 1, "router_norm": norm, "group_score": grouped}


def _read_groups(keys: Keys, defaults: Mapping[str, Any]) -> dict[str, int]:
    """Nothing where all groups stay in the choice."""
    n_experts = keys.integer(
        keys.alias("n_routed_experts", "num_local_experts"), defaults["n_routed_experts"]
    )
    n_used = keys.integer("num_experts_per_tok", defaults["num_experts_per_tok"])
    groups = keys.optional_integer("n_group", defaults["n_group"]) or 1
    used = keys.optional_integer("topk_group", defaults["topk_group"]) or 1
    if n_experts % groups:
        raise keys.error("n_group", f"a divisor of n_routed_experts = {n_experts}")
    if used > groups:
        raise keys.error("topk_group", f"at most n_group = {groups}")
    if used * (n_experts // groups) < n_used:
        raise keys.error(
            "topk_group", f"groups, of n_group = {groups}, that hold num_experts_per_tok = {n_used}"
        )
    return {} if used == groups else {"n_expert_groups": groups, "n_groups_used": used}
