"""What a trace and its measures say of routers, beside output_router_logits of a running Transformers.

Role: run by .ci/run where torch and transformers are installed; skipped elsewhere.
Owns: that equality. Refuses: the formulas (tests/test_analysis.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import colibri
from colibri.analysis.choices import by_layer
from colibri.analysis.load import expert_load
from colibri.analysis.recording import Text, record
from colibri.analysis.trace import Trace
from colibri.convert import convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = "Once upon a time there was a little colibri who lived in a garden near the sea. " * 6


@pytest.mark.parametrize("make", [checkpoints.mixtral, checkpoints.qwen3_moe, checkpoints.olmoe])
def test_logits_and_load_equal_those_of_transformers(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make(tmp_path / "hf", storage="f32", n_experts=8)
    path = convert(source, tmp_path / "m.colibri", "f32").path
    with colibri.load(path, context=512) as model:
        record(model, [Text(TEXT)], tmp_path / "run.trace", logits=True)
        used = model.config["n_experts_used"]
    trace = Trace(tmp_path / "run.trace")
    reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    reference.train(False)
    with torch.no_grad():
        ids = torch.tensor(trace.array("ids").tolist())[None]
        expected = reference(ids, output_router_logits=True).router_logits
    layers = by_layer(trace)
    assert len(layers) == len(expected) > 1 and trace.n_rows > 100
    for found, logits in zip(layers, expected, strict=True):
        assert found.logits is not None
        assert np.abs(found.logits - logits.numpy()).max() < 1e-4
        chosen = torch.topk(logits, used).indices.numpy()
        load = expert_load(found.experts, 8, found.weights)
        assert np.array_equal(load.counts, np.bincount(chosen.ravel(), minlength=8))
        assert np.array_equal(np.sort(found.experts, axis=1), np.sort(chosen, axis=1))
