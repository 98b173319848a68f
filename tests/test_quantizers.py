"""benchmarks/quantizers.py without ggml: equivalent models are equivalent, and q4 is rounded as q4 files are.

Refuses: figures, other quantisers.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.format import read_container

IDS = [5, 9, 200, 17, 3, 44]


@pytest.fixture
def quantizers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("quantizers")


def logits(path: Path) -> Any:
    with colibri.load(path, threads=1, context=16) as model:
        return model.logits(IDS)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "llama"])
@pytest.mark.parametrize("columns", ["outliers", "spread"])
def test_other_columns_same_function(
    quantizers: Any, make_model: Callable[..., Path], tmp_path: Path, family: str, columns: str
) -> None:
    original = read_container(make_model(family))
    tensors = quantizers.read_tensors(original)
    quantizers.change_columns(tensors, original.config, quantizers.drawn(columns, 0))
    quantizers.write_model(tmp_path / "changed.colibri", original, tensors)
    expected, found = logits(original.path), logits(tmp_path / "changed.colibri")
    tolerance = 0 if columns == "outliers" else 1e-3
    assert np.allclose(expected, found, tolerance, tolerance / 10)
    before = quantizers.read_tensors(original)
    assert not np.allclose(before["layers.0.attn_out"][0], tensors["layers.0.attn_out"][0])


def test_rounds_what_q4_files_round(quantizers: Any, make_model: Callable[..., Path], tmp_path: Path) -> None:
    original, packed = read_container(make_model("qwen2_moe")), read_container(make_model("qwen2_moe", "q4"))
    tensors = quantizers.read_tensors(original)
    error = quantizers.write_model(tmp_path / "m.colibri", original, tensors, quantizers.q4)
    assert 0.001 < error < 0.02
    rounded = quantizers.read_tensors(read_container(tmp_path / "m.colibri"))
    for entry in packed.entries:
        for exact, found in zip(tensors.get(entry.name, []), rounded.get(entry.name, []), strict=True):
            assert np.array_equal(exact, found) != ("q4" in entry.types), entry.name
