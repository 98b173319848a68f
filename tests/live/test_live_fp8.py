"""FP8 checkpoints beside Transformers' own dequantisation.

Role: run by .ci/run where torch, transformers and accelerate are installed; skipped elsewhere.
Owns: that a scale means to us what it means there, bit by bit and through whole models.
Refuses: ragged edges, which Transformers 5.24 cannot read, and compressed-tensors, which needs its package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import fp8_checkpoints
import oracle
from colibri.convert import convert
from fixtures.native import engine

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
BOUND = 1e-4
BLOCK = (4, 8)
SETTINGS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("scale", ["f32", "e8m0", "u8"])
@pytest.mark.parametrize("form", [BLOCK, "channel", "tensor"])
def test_numbers_equal_those_of_transformers(form: fp8_checkpoints.Form, scale: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers.integrations import finegrained_fp8

    reference: Any = finegrained_fp8
    dequantise = reference.Fp8Dequantize(None)._dequantize_one
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32", experts="stacked", n_layers=1)
    directory = fp8_checkpoints.to_fp8(source, tmp_path / "fp8", form, scale=scale)
    stored, count = load_file(directory / "model.safetensors"), 0
    plain = checkpoints.read_tensors(tmp_path / "fp8-plain")
    for name, value in stored.items():
        if value.dtype == torch.float8_e4m3fn:
            scales = stored[name + "_scale_inv"]
            numbers = dequantise(value, scales, torch.float32)
            assert np.array_equal(numbers.numpy(), plain[name])
            count += 1
    assert count == 6


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "llama"])
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Transformers rounds what it dequantises to the type of the model, here f32."""
    pytest.importorskip("accelerate")
    options: dict[str, Any] = {"storage": "f32"}
    source = checkpoints.FAMILIES[family](tmp_path / "hf", **options)
    directory = fp8_checkpoints.to_fp8(source, tmp_path / "fp8", BLOCK, settings=SETTINGS)
    ids = [int(i) for i in np.random.default_rng(6).integers(3, 295, 80)]
    with engine(convert(directory, tmp_path / "m.colibri", "f32").path) as run:
        found = run.feed(ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model.to(torch.float32)(torch.tensor([ids])).logits[0].numpy()
    assert expected.std() > 0.3
    assert np.abs(found - expected).max() < BOUND
    assert np.abs(found - oracle.forward(oracle.load(directory), ids)[0]).max() < BOUND
