"""Cases 5, 6 and 7 (tests/test_cases.py) beside a running Transformers.

Role: run by .ci/run where torch and transformers are installed; skipped elsewhere.
Owns: that the models which show those reports answer as theirs do. Refuses: why (tests/test_cases.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import checkpoints
from live.test_live_transformers import BOUND, ours, reference
from test_cases import IDS, KINDS, biased, clamped


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "dots1"])
def test_case_5_a_bias_of_3(family: str, groups: tuple[int, int], tmp_path: Path) -> None:
    directory = biased(tmp_path / "hf", family, groups=groups)
    found = ours(directory, tmp_path / "m.colibri", "f32", IDS)
    assert np.abs(found - reference(directory, IDS)).max() < BOUND


def test_case_6_the_clamp_beside_an_ordinary_model(tmp_path: Path) -> None:
    for directory in (
        clamped(tmp_path / "oss", storage="f32"),
        checkpoints.qwen3_moe(tmp_path / "qwen", storage="f32", n_ff_expert=96, n_experts=4),
    ):
        found = ours(directory, tmp_path / "m.colibri", "f32", IDS)
        assert np.abs(found - reference(directory, IDS)).max() < BOUND


@pytest.mark.parametrize("kind", ["absent", "partly absent", "a full layer", "in a side file"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_case_7_extra_layers(family: str, kind: str, tmp_path: Path) -> None:
    extra = {"num_nextn_predict_layers": 1}
    directory = checkpoints.FAMILIES[family](tmp_path / "hf", config_extra=extra, storage="f32")
    KINDS[kind](directory)
    found = ours(directory, tmp_path / "m.colibri", "f32", IDS)
    assert np.abs(found - reference(directory, IDS)).max() < BOUND
