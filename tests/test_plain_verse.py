"""The small model with an encoder in examples/plain_verse: it writes its plain verse, and reads its source.

Owns: one known text by the Python API and the command line, one digest of its logits on every machine, that
      the target depends on its source. Refuses: the mechanisms (test_encoders.py). A new model changes both
      literals."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri.errors import UnsupportedError
from test_cli import Result
from test_cli import call as call

HERE = Path(__file__).parent.parent / "examples" / "plain_verse"
MODEL = HERE / "plain.colibri"
SOURCE = "My son, hearken unto the words of thy father."
TARGET = "My son, give ear to the words of your father."
DIGEST = "2f85fa56e57189579fa283e808787cfda6b06e21c8aaa1653adb84d48c1594dd"


@pytest.fixture(scope="module")
def model() -> Iterator[colibri.Model]:
    with colibri.load(MODEL, threads=1) as opened:
        yield opened


def test_it_writes_a_plain_verse(model: colibri.Model, call: Callable[..., Result]) -> None:
    found = model.generate(SOURCE)
    assert (found.text, found.finish_reason) == (TARGET, "stop")
    assert "".join(model.stream(SOURCE)) == TARGET
    assert call("run", MODEL, SOURCE) == (0, TARGET + "\n", "")
    assert call("run", MODEL, stdin=SOURCE.encode()).out == TARGET + "\n"


def test_a_conversation_is_refused(model: colibri.Model, call: Callable[..., Result]) -> None:
    with pytest.raises(UnsupportedError, match=r"holds no conversations.*generate\(\)"):
        model.chat([{"role": "user", "content": SOURCE}])
    found = call("run", MODEL, "--chat", SOURCE)
    assert found.status == 1 and "--chat: the model reads a text and writes another" in found.err


def test_logits_have_one_digest_on_every_machine(model: colibri.Model) -> None:
    target = [*model.start_ids(), *model.tokenizer.encode(TARGET)]
    logits = model.logits(target, source=SOURCE)
    assert hashlib.sha256(logits.tobytes()).hexdigest() == DIGEST


def test_a_target_is_likelier_with_its_own_source(model: colibri.Model) -> None:
    """13 verses that training has not seen; without cross attention the numbers would be equal."""
    pairs = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text("utf-8").splitlines()[::8]]
    own = [loss(model, pair["target"], pair["source"]) for pair in pairs]
    other = [loss(model, a["target"], b["source"]) for a, b in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
    assert np.mean(own) < np.mean(other) - 1 and np.mean(own) < math.log(model.n_vocab) - 4


def loss(model: colibri.Model, target: str, source: str) -> float:
    """Nats a token."""
    ids = [*model.tokenizer.encode(target), *model.tokenizer.eos_ids]
    logits = model.logits([*model.start_ids(), *ids[:-1]], source=source).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids)), ids]))
