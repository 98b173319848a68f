"""Conversion of families with dense layers first, grouped experts and layers beyond the model.

Owns: which config keys place experts and groups; what is refused by name. Refuses: numbers (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
from colibri.convert import convert
from colibri.convert.registry import known
from colibri.errors import ConversionError
from colibri.format import read_container


def fields(source: Path, out: Path) -> dict[str, Any]:
    return read_container(convert(source, out, "f32").path).config


def test_every_family_is_found() -> None:
    assert set(known()) >= set(checkpoints.FAMILIES)


def test_dense_layers_come_first_and_then_every_so_many(tmp_path: Path) -> None:
    source = checkpoints.dots1(tmp_path / "hf", n_layers=5, first_dense=2, n_shared=3)
    config = fields(source, tmp_path / "m.colibri")
    assert config["n_experts"] == [0, 0, 8, 8, 8]
    assert (config["n_ff"], config["n_ff_expert"], config["n_ff_shared"]) == (96, 48, 144)
    checkpoints.edit_json(source / "config.json", {"moe_layer_freq": 2})
    with pytest.raises(ConversionError, match=r"layers\.3\.mlp\.gate_proj"):
        convert(source, tmp_path / "m.colibri")
    dense = checkpoints.dots1(tmp_path / "dense", first_dense=2)
    config = fields(dense, tmp_path / "m.colibri")
    assert config["n_experts"] == [0, 0] and config["router_score"] == config["n_ff_shared"] == 0


@pytest.mark.parametrize(
    ("groups", "expected"), [((4, 2), (4, 2, 1)), ((1, 1), (0, 0, 0)), ((4, 4), (0, 0, 0))]
)
def test_groups_that_all_stay_are_no_groups(
    groups: tuple[int, int], expected: tuple[int, int, int], tmp_path: Path
) -> None:
    config = fields(checkpoints.glm4_moe(tmp_path / "hf", groups=groups), tmp_path / "m.colibri")
    assert (config["n_expert_groups"], config["n_groups_used"], config["group_score"]) == expected


def test_layers_beyond_the_model_are_left_out_and_listed(tmp_path: Path) -> None:
    source = checkpoints.glm4_moe(tmp_path / "hf")
    plain = convert(source, tmp_path / "plain.colibri", "f32").path
    extra = {f"model.layers.2.{name}": np.ones((4, 4), np.float32) for name in ("eh_proj.weight", "x")}
    checkpoints.edit_tensors(source, extra)
    checkpoints.edit_json(source / "config.json", {"num_nextn_predict_layers": 1})
    report = convert(source, tmp_path / "m.colibri", "f32")
    assert sorted(report.ignored_tensors) == sorted(extra)
    assert report.path.stat().st_size - plain.stat().st_size < 4096
    checkpoints.edit_json(source / "config.json", {"num_nextn_predict_layers": 0})
    with pytest.raises(ConversionError, match="2 tensors are not part of the model"):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("first_k_dense_replace", -1),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.2),
        ("norm_topk_prob", None),
        ("head_bias", 1),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    source = checkpoints.glm4_moe(tmp_path / "hf", config_extra={key: value})
    with pytest.raises(ConversionError, match=key):
        convert(source, tmp_path / "m.colibri")


def test_groups_too_small_for_the_choice_are_refused(tmp_path: Path) -> None:
    source = checkpoints.glm4_moe(tmp_path / "hf", groups=(4, 1), n_experts_used=3)
    with pytest.raises(ConversionError, match="topk_group = 1; expected groups, of n_group = 4, that hold"):
        convert(source, tmp_path / "m.colibri")
