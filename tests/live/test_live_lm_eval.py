"""Colibri as a model of lm_eval, on a task of local files.

Role: run where lm_eval is installed; skipped elsewhere. Owns: its three kinds of requests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.analysis.evaluation import Passage, evaluate

pytest.importorskip("lm_eval")

TASK = """task: colibri_local
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: [" mat.", " qzxv"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_requests_are_what_the_model_says() -> None:
    from colibri.lm_eval import ColibriLM

    lm = ColibriLM("demo", context=128)
    model = lm.model
    context, text = "The cat sat on the", " mat."
    before, whole = model.prompt_ids(context), model.prompt_ids(context + text)
    rows = model.logits(whole[:-1])[len(before) - 1 :].astype(np.float64)
    logs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
    logs -= rows.max(1, keepdims=True)
    targets = whole[len(before) :]
    ((found, greedy),) = lm.loglikelihood([request(context, text)], disable_tqdm=True)
    assert found == pytest.approx(logs[np.arange(len(targets)), targets].sum())
    assert greedy == bool((rows.argmax(1) == targets).all())
    assert lm.loglikelihood([request(context + " ", "mat.")], disable_tqdm=True) == [(found, greedy)]
    ((alone, _),) = lm.loglikelihood([request("", context)], disable_tqdm=True)
    assert math.isfinite(alone)
    (rolling,) = lm.loglikelihood_rolling([request(context)], disable_tqdm=True)
    assert rolling == -evaluate(model, [Passage(context)]).nll
    (written,) = lm.generate_until([request(context, {"until": ["."], "max_gen_toks": 20})], True)
    assert written == model.generate(context, max_tokens=20, temperature=0, stop=["."]).text
    with pytest.raises(colibri.ArgumentError, match="'other' are not known here"):
        lm.generate_until([request(context, {"other": 1})], True)
    with pytest.raises(colibri.ArgumentError, match="batch_size has no effect"):
        ColibriLM("demo", batch_size=8)


def test_a_task_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import colibri.lm_eval  # noqa: F401 - registers "colibri"

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"q": "The cat sat on the", "label": at} for at in (0, 1)]))
    (tmp_path / "local.yaml").write_text(TASK.format(data=data))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(
        "colibri",
        model_args={"pretrained": "demo", "context": 128},
        tasks=["colibri_local"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found["results"]["colibri_local"]["acc,none"] == 0.5
