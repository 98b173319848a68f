"""Models with an encoder beside a running Transformers: what save_pretrained writes, and the fixtures.

Role: run by .ci/run, once with Transformers 5.24 and once with 4.57.1, whose NLLB-MoE is the one that was
trained. Owns: that both still answer as the fixtures say. Refuses: families that the installed version
computes wrongly (skipped).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle_encoders as oracle
from colibri.convert import convert
from encoder_checkpoints import VARIANTS
from fixtures.encoder_reference import answers, usable
from fixtures.native import engine
from test_encoders import BOUND, checkpoint, converted, fixture

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHARED = {"vocab_size": 120, "d_model": 48, "num_experts": 5, "pad_token_id": 0, "eos_token_id": 2}
SWITCH = {
    "num_layers": 4, "num_decoder_layers": 3, "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 1,
    "num_heads": 4, "d_kv": 20, "d_ff": 72, "expert_capacity": 9, "decoder_start_token_id": 0,
}  # fmt: skip
NLLB = {
    "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "encoder_sparse_step": 2, "decoder_sparse_step": 3,
    "moe_token_dropout": 0.3, "max_position_embeddings": 256,
}  # fmt: skip
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "switch": ("switch_transformers", "SwitchTransformers", {**SHARED, **SWITCH}),
    "nllb": ("nllb_moe", "NllbMoe", {**SHARED, **NLLB}),
}


def needs(family: str) -> None:
    if not usable(family):
        pytest.skip(f"{family}: Transformers {transformers.__version__} runs other experts than were chosen")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_fixtures_equal_live_transformers(name: str) -> None:
    variant = VARIANTS[name]
    needs(variant.family)
    logits, written = answers(checkpoint(name), variant.source, variant.ids, 8)
    assert np.abs(logits[fixture(name)["rows"]] - fixture(name)["logits"]).max() < 1e-5
    assert written == fixture(name)["greedy"][: len(written)].tolist()
    with engine(converted(name)) as run:
        run.encode(variant.source)
        assert np.abs(run.feed(variant.ids) - logits).max() < BOUND


@pytest.mark.parametrize("kind", SAVED)
def test_what_save_pretrained_writes_converts(kind: str, tmp_path: Path) -> None:
    family, name, settings = SAVED[kind]
    needs(family)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(**settings)
    )
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape)
            value.copy_(1 + 0.1 * noise if value.ndim == 1 else noise / value.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path / "saved")
    source, ids = (
        [int(i) for i in np.random.default_rng(at).integers(3, 120, 150 - 90 * at)] for at in (0, 1)
    )
    report = convert(tmp_path / "saved", tmp_path / "m.colibri", "f32", require_tokenizer=False)
    assert set(report.defaults_used) <= {"n_positions", "tie_word_embeddings"}
    logits, _ = answers(tmp_path / "saved", source, ids, 1)
    with engine(report.path) as run:
        run.encode(source)
        assert np.abs(run.feed(ids) - logits).max() < BOUND
    assert np.abs(oracle.forward(oracle.load(tmp_path / "saved"), source, ids)[0] - logits).max() < 5e-5
