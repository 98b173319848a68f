"""How experts are chosen and weighted: every rule of the router against the rule written out in numpy.

Owns: scores, bias, groups, scale and ties, from the gate logits that the engine itself reports; configs whose
      rules do not fit together. Refuses: gate logits and families (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from colibri import _native as native
from colibri.errors import ModelFileError
from colibri.format import Writer, read_container, read_entry
from colibri.quantize import pack
from fixtures.native import engine

N_EXPERTS, USED, N_IDS = 12, 4, 200
CONFIG: dict[str, Any] = {
    "n_vocab": 64, "n_vocab_used": 64, "n_layers": 2, "n_embd": 24, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 8, "rope_dim": 8, "context_length": 256, "norm_eps": 1e-6, "attn_scale": 0.4, "n_ff": 16,
    "n_experts": [0, N_EXPERTS], "n_experts_used": USED, "n_ff_expert": 8,
}  # fmt: skip
GROUPS_V2 = {"n_expert_groups": 4, "n_groups_used": 2}
GROUPS_V3 = GROUPS_V2 | {"group_score": 1}
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, norm, scale": {"router_norm": 1, "router_scale": 2.5},
    "softmax, bias": {"router_bias": 1},
    "softmax, groups by their best": GROUPS_V2 | {"router_scale": 16.0},
    "softmax, groups by two": GROUPS_V3 | {"router_norm": 1},
    "softmax, norm by no less": {"router_norm": 1, "router_norm_min": 0.8},
    "sigmoid, chosen before": {"router_score": 2, "router_norm": 1},
    "in turn, near logits": {"router_near": 0.6},
    "in turn, all logits": {"router_near": 900.0},
    "sigmoid": {"router_score": 1},
    "sigmoid, norm": {"router_score": 1, "router_norm": 1},
    "sigmoid, norm by more": {"router_score": 1, "router_norm": 1, "router_norm_add": 0.3},
    "sigmoid, bias, norm, scale": {
        "router_score": 1,
        "router_bias": 1,
        "router_norm": 1,
        "router_scale": 1.8,
    },
    "sigmoid, groups by their best": {"router_score": 1} | GROUPS_V2,
    "sigmoid, groups by two, all on": GROUPS_V3
    | {"router_score": 1, "router_bias": 1, "router_norm": 1, "router_scale": 2.5},
}


def write(path: Path, config: dict[str, Any], router: npt.NDArray[Any] | None = None) -> Path:
    """A random model; `router` replaces the gate's rows."""
    random = np.random.default_rng(5)
    with Writer(path, CONFIG | config, "f32", {}) as writer:
        for entry in writer.tensors:
            if entry.kind == "vector":
                values = random.standard_normal(entry.cols).astype("<f4") * np.float32(0.2)
                if entry.name.endswith("bias"):  # below most scores, so that 0 would not keep a group out
                    values -= 1
                writer.write(entry.name, [values.tobytes()])
                continue
            for rows, cols, type in entry.matrices[:1] if entry.kind == "matrix" else ():
                values = random.standard_normal((rows, cols)).astype(np.float32)
                if entry.name.endswith(".router") and router is not None:
                    values = router.astype(np.float32)
                writer.write(entry.name, [pack(values, type)])
            if entry.kind == "expert":
                parts = [random.standard_normal((r, c)).astype(np.float32) for r, c, _ in entry.matrices]
                writer.write(entry.name, [pack(part, "f32") for part in parts])
    return path


def bias_of(path: Path) -> npt.NDArray[np.float64]:
    return np.frombuffer(read_entry(read_container(path), "layers.1.router_bias"), "<f4").astype(np.float64)


def choose_in_turn(logits: npt.NDArray[Any], near: float) -> tuple[list[int], list[float]]:
    """SparseMixer, arXiv:2409.12136: what is masked is as far from the best as a share of the sizes."""
    left, experts, weights = logits.copy(), [], []
    for _ in range(USED):
        best = int(np.argmax(left))
        masked = (left[best] - logits) / np.maximum(np.abs(logits), left[best]) > near
        shares = np.exp(np.where(masked, -np.inf, left) - left[best])
        experts.append(best)
        weights.append(float(shares[best] / shares.sum()))
        left[best] = -np.inf
    return experts, weights


def choose(
    logits: npt.NDArray[Any], rule: dict[str, Any], bias: npt.NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """One row, as the papers write it."""
    if near := rule.get("router_near"):
        return choose_in_turn(logits, near)
    if rule.get("router_score"):
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    choice = (logits if rule.get("router_score") == 2 else scores) + bias
    if groups := rule.get("n_expert_groups"):
        by_two = rule.get("group_score", 0)
        members = choice.reshape(groups, -1)
        worth = np.sort(members, axis=1)[:, -2:].sum(axis=1) if by_two else members.max(axis=1)
        best = np.argsort(-worth, kind="stable")[: rule["n_groups_used"]]
        outside = ~np.isin(np.arange(N_EXPERTS) // (N_EXPERTS // groups), best)
        choice = np.where(outside, -np.inf if by_two else 0.0, choice)
    experts = np.argsort(-choice, kind="stable")[:USED]
    weights = scores[experts]
    if rule.get("router_norm"):
        weights = weights / max(
            weights.sum() + 1e-20 + rule.get("router_norm_add", 0), rule.get("router_norm_min", 0)
        )
    return experts.tolist(), (weights * rule.get("router_scale", 1)).tolist()


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_the_one_written_out(name: str, tmp_path: Path) -> None:
    rule = RULES[name]
    path = write(tmp_path / "m.colibri", rule)
    bias = bias_of(path) if "router_bias" in rule else np.zeros(N_EXPERTS)
    with engine(path, chunk=50) as run:
        rows = run.routing(np.random.default_rng(1).integers(0, 64, N_IDS))[1]
    plain = 0
    for logits, experts, weights in zip(rows.logits, rows.experts, rows.weights, strict=True):
        expected, expected_weights = choose(logits.astype(np.float64), rule, bias)
        assert experts.tolist() == expected
        assert weights == pytest.approx(expected_weights, rel=2e-6)
        plain += sorted(expected) == sorted(np.argsort(-logits)[:USED].tolist())
    if "router_bias" in rule or "n_expert_groups" in rule:  # the rule must matter
        assert plain < 0.9 * N_IDS


@pytest.mark.parametrize("groups", [{}, GROUPS_V2, GROUPS_V3], ids=["none", "by best", "by two"])
@pytest.mark.parametrize("score", [0, 1], ids=["softmax", "sigmoid"])
def test_equal_scores_choose_the_lowest_experts_and_groups(
    score: int, groups: dict[str, int], tmp_path: Path
) -> None:
    """All gate rows equal: the first experts, and with groups those of the first groups."""
    path = write(tmp_path / "m.colibri", {"router_score": score} | groups, np.ones((N_EXPERTS, 24)))
    with engine(path) as run:
        rows = run.routing(range(40))[1]
    assert (rows.experts == np.arange(USED)).all()


def test_sigmoids_that_vanish_together_are_not_blown_up_by_the_norm(tmp_path: Path) -> None:
    """All logits of a row are 1e4 or -1e4: four equal weights, or none, since the sum has 1e-20 added."""
    rule = {"router_score": 1, "router_norm": 1}
    path = write(tmp_path / "m.colibri", rule, np.full((N_EXPERTS, 24), 1e4))
    with engine(path) as run:
        rows = run.routing(range(40))[1]
    high, low = rows.logits[:, 0] > 100, rows.logits[:, 0] < -100
    assert high.sum() > 5 and (rows.weights[high] == 0.25).all()
    assert low.sum() > 5 and rows.weights[low].max() < 1e-15


@pytest.mark.parametrize(("score", "best"), [(1, False), (2, True)])
def test_saturated_sigmoids_are_told_apart_by_their_logits(score: int, best: bool, tmp_path: Path) -> None:
    """Logits of thousands: all sigmoids are 0 or 1. With score 1 the lowest numbers win among equals."""
    router = np.random.default_rng(3).standard_normal((N_EXPERTS, 24)) * 1000
    path = write(tmp_path / "m.colibri", {"router_score": score}, router)
    with engine(path) as run:
        rows = run.routing(range(40))[1]
    expected = np.argsort(-rows.logits, axis=1, kind="stable")[:, :USED]
    assert (rows.experts == expected).all() == best


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"n_groups_used": 1}, "n_expert_groups is 0"),
        ({"group_score": 1}, "n_expert_groups is 0"),
        ({"n_expert_groups": 4}, "n_groups_used is not below"),
        ({"n_expert_groups": 4, "n_groups_used": 4}, "n_groups_used is not below"),
        ({"n_expert_groups": 5, "n_groups_used": 2}, "not a multiple of n_expert_groups"),
        ({"n_expert_groups": 24, "n_groups_used": 12}, "not a multiple of n_expert_groups"),
        ({"n_expert_groups": 4, "n_groups_used": 1}, "fewer experts than n_experts_used"),
        (GROUPS_V3 | {"n_expert_groups": 12, "n_groups_used": 5}, "groups of two experts"),
        (GROUPS_V2 | {"router_bias": 1}, "router_bias needs group_score 1"),
        (GROUPS_V2 | {"router_near": 0.1}, "router_near goes without"),
        (GROUPS_V2 | {"router_score": 2}, "router_score 2 goes without"),
        ({"router_bias": 1, "router_score": 2}, "router_score 2 goes without"),
        ({"router_on_input": 1, "expert_bias": 1}, "router_on_input goes without"),
        ({"router_on_input": 1, "ffn_ungated": 1}, "router_on_input goes without"),
        ({"router_on_input": 1, "ffn_cubic": 1.0}, "router_on_input goes without"),
        ({"router_on_input": 1, "ffn_limit": 1.0}, "router_on_input goes without"),
        ({"router_on_input": 1, "ffn_up_offset": 1.0}, "router_on_input goes without"),
        ({"parallel_dense": 1}, "parallel_dense needs post_norm"),
        ({"parallel_dense": 1, "post_norm": 1, "layer_norm": 1}, "parallel_dense needs post_norm"),
        ({"parallel_dense": 1, "post_norm": 1, "n_ff_shared": 8}, "parallel_dense needs post_norm"),
        ({"parallel_dense": 1, "post_norm": 1, "expert_bias": 1}, "parallel_dense needs post_norm"),
        ({"layer_scale": 1}, "layer_scale needs post_norm"),
        ({"own_kv_heads": [0, 3]}, "not a multiple of a layer's"),
        ({"own_head_dim": [0, 5], "rope_dim": 8}, "is odd"),
        ({"own_head_dim": [2, 4], "rope_dim": 6}, "larger than every head"),
        ({"own_head_dim": [0, 4], "n_encoder_layers": 1}, "own_head_dim and own_kv_heads go without"),
        ({"rope_set": [1, 0]}, "a layer's rope_set"),
        ({"router_near": 0.1, "router_score": 1}, "router_near goes without"),
        ({"router_near": 0.1, "router_bias": 1}, "router_near goes without"),
    ],
)
def test_rules_that_do_not_fit_are_refused(config: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=fault):
        native.open_model(write(tmp_path / "m.colibri", config))
