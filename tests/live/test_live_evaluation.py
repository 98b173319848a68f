"""Perplexity as Transformers has it on the same tiny models.

Role: run by .ci/run where torch and transformers are installed; skipped elsewhere. Owns: that alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import colibri
from colibri.analysis.evaluation import Passage, evaluate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = "Once upon a time the bird and the cat sat on a mat."


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_perplexity_is_the_loss_of_transformers(family: str, make_model: Callable[..., Path]) -> None:
    path = make_model(family, storage="f32")
    with colibri.load(path) as model:
        ids = model.tokenizer.encode(TEXT)
        found = evaluate(model, [Passage(TEXT)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent / "checkpoint", dtype=torch.float32, attn_implementation="eager"
    )
    theirs.train(False)
    with torch.no_grad():
        rows = theirs(torch.tensor([ids])).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(rows, torch.tensor(ids[1:]))
    assert found.tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(math.exp(loss.item()), rel=1e-4)
