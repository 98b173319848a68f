"""Public reports in their GGUF form, from the file to what a model does: cases 2, 3, 10, 12, 18 and 19.

Owns: the whole way. Case 7 and RoPE settings (8) are in test_gguf_layout.py, hostile, truncated and split
files (14, 15, 16) in test_gguf_container.py. FP8 (11) has no GGUF form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import colibri
import gguf_files
from colibri.convert import convert
from colibri.errors import ConversionError
from colibri.format import read_container

IDS = [int(i) for i in np.random.default_rng(7).integers(3, 295, 40)]


def model_of(tmp_path: Path, family: str = "mixtral", name: str = "m", **file: Any) -> Path:
    """Options of the checkpoint under "checkpoint", those of gguf_files.write beside it."""
    options = {"storage": "f32", **file.pop("checkpoint", {})}
    source = checkpoints.FAMILIES[family](tmp_path / f"{name}-hf", **options)
    gguf = gguf_files.write(source, tmp_path / f"{name}.gguf", **file)
    return convert(gguf, tmp_path / f"{name}.colibri").path


def logits_of(path: Path) -> bytes:
    with colibri.load(path, context=64) as model:
        return model.logits(IDS).tobytes()


def test_case_2_and_12_experts_in_every_spelling_are_the_same_model(tmp_path: Path) -> None:
    wanted = logits_of(model_of(tmp_path, name="apart"))
    assert logits_of(model_of(tmp_path, name="single", experts="single")) == wanted
    assert logits_of(model_of(tmp_path, name="fused", experts="fused")) == wanted


def test_case_3_a_head_that_is_absent_is_the_embedding_and_kept_once(tmp_path: Path) -> None:
    tied = model_of(tmp_path, "qwen3_moe", "tied", checkpoint={"tied": True})
    names = {entry.name for entry in read_container(tied).entries}
    assert "embedding" in names and "output" not in names
    own = model_of(tmp_path, "qwen3_moe", "own")
    assert "output" in {entry.name for entry in read_container(own).entries}
    with pytest.raises(ConversionError, match="no matrix token_embd.weight"):
        model_of(tmp_path, "qwen3_moe", "alone", without="token_embd")


def test_case_10_rows_beyond_the_tokens_are_never_sampled(tmp_path: Path) -> None:
    path = model_of(tmp_path, checkpoint={"extra_rows": 20})
    with colibri.load(path, context=64) as model:
        assert model.n_vocab == 320
        for seed in range(20):
            found = model.generate("Once", max_tokens=8, temperature=50.0, seed=seed)
            assert max(found.ids, default=0) < 300


def test_case_18_and_19_one_bos_and_every_end(tmp_path: Path) -> None:
    """BOS by key and by template; eos by key, end of turn by its own."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    keys = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.chat_template": template,
    }
    path = model_of(tmp_path, keys=keys)
    with colibri.load(path, context=64) as model:
        assert set(model.tokenizer.eos_ids) >= {2, 4}
        assert model.prompt_ids("Once").tolist().count(1) == 1
        ids = list(model.chat_ids([{"role": "user", "content": "Once"}]))
        assert ids.count(1) == 1 and ids[0] == 1
