"""`colibri eval`: perplexity, bits per byte, KL divergence, beside the numpy oracles and plain formulas."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import colibri
import oracle
import oracle_encoders
from colibri.analysis import evaluation
from colibri.analysis.evaluation import Passage, evaluate, token_logprobs, windows_of
from colibri.errors import ArgumentError
from test_cli import Result
from test_cli import call as call
from test_encoders import checkpoint as encoder_checkpoint
from test_encoders import converted as encoder_converted

TEXT = "Once upon a time the bird and the cat sat on a mat. " * 3
Doubles = npt.NDArray[np.float64]


def logs(logits: Any) -> Doubles:
    """ln of a softmax in float64."""
    x = np.asarray(logits, np.float64)
    found: Doubles = (
        x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
    )
    return found


# --- windows


@pytest.mark.parametrize("bos", [[], [1]])
@pytest.mark.parametrize("context", [1, 2, 7, 40])
def test_windows_score_every_token_once(bos: list[int], context: int) -> None:
    ids = np.arange(100, 123, dtype=np.int32)
    for stride in {1, 2, max(1, context - 1), context} & set(range(1, context + 1)):
        found = list(windows_of(ids, np.array(bos, np.int32), context, stride))
        scored = np.concatenate([window.targets for window in found])
        assert scored.tolist() == ids[0 if bos else 1 :].tolist()
        for number, (inputs, targets, _) in enumerate(found):
            assert len(targets) <= len(inputs) <= context and inputs[: len(bos)].tolist() == bos
            assert number == 0 or len(targets) <= stride
            before = [*bos, *range(100, 123)]
            at = before.index(targets[-1])
            assert inputs[len(bos) :].tolist() == before[max(len(bos), at - context + len(bos)) : at]
    assert not list(windows_of(ids[: 0 if bos else 1], np.array(bos, np.int32), context, 1))


# --- numbers


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"adds_bos": True}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("lfm2_moe", {}),
    ],
)
def test_perplexity_is_the_oracles(
    family: str, options: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    path = make_model(family, **options)
    reference = oracle.load(path.parent / "checkpoint")
    with colibri.load(path, context=24) as model:
        found = evaluate(model, [Passage(TEXT), Passage("the cat")], stride=9)
        bos = [model.tokenizer.bos_id] if model.tokenizer.add_bos else []
        assert len(bos) == len(options)
        losses, size = [], 0
        for text in (TEXT, "the cat"):
            ids = np.array(model.tokenizer.encode(text), np.int32)
            size += len(text.encode()) - (0 if bos else len(model.tokenizer.piece(int(ids[0]), True, True)))
            for window in windows_of(ids, np.array(bos, np.int32), 24, 9):
                rows = logs(oracle.forward(reference, window.inputs.tolist())[0])[-len(window.targets) :]
                losses += [-row[id] for row, id in zip(rows, window.targets, strict=True)]
    assert found.tokens == len(losses) and found.bytes == size and (found.context, found.stride) == (24, 9)
    assert found.token_nll == pytest.approx(losses, abs=1e-4)
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / size, rel=1e-4)


@pytest.mark.parametrize("name", ["switch_odd", "nllb_odd"])
def test_a_model_with_an_encoder_scores_a_text_given_its_source(name: str) -> None:
    reference = oracle_encoders.load(encoder_checkpoint(name))
    with colibri.load(encoder_converted(name)) as model:
        languages: dict[str, Any] = (
            {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"} if name == "nllb_odd" else {}
        )
        start = model.start_ids(languages.get("tgt_lang"))
        passages = [Passage("the cat", "a bird"), Passage("a mat", "the cat sat")]
        found = evaluate(model, passages, **languages)
        losses = []
        for text, source in (("the cat", "a bird"), ("a mat", "the cat sat")):
            ids = model.tokenizer.encode(text)
            logits, _ = oracle_encoders.forward(
                reference, model.prompt_ids(source, languages.get("src_lang")).tolist(), [*start, *ids[:-1]]
            )
            rows = logs(logits)[-len(ids) :]
            losses += [-row[id] for row, id in zip(rows, ids, strict=True)]
        assert found.token_nll == pytest.approx(losses, abs=2e-4)
        with pytest.raises(ArgumentError, match="expected a source too"):
            evaluate(model, [Passage("the cat")])
        with pytest.raises(ArgumentError, match="stride=2 has no effect"):
            evaluate(model, [Passage("the cat", "a bird")], stride=2)
        with pytest.raises(ArgumentError, match="a text of .* the context holds"):
            evaluate(model, [Passage("the cat " * 5000, "a bird")], **languages)


def test_a_reference_is_compared_token_by_token(make_model: Callable[..., Path]) -> None:
    with (
        colibri.load(make_model("mixtral", "q4"), context=30) as model,
        colibri.load(make_model("mixtral"), context=64) as exact,
    ):
        found = evaluate(model, [Passage(TEXT)], reference=exact)
        ids = np.array(model.tokenizer.encode(TEXT), np.int32)
        kl, agree = [], 0
        for window in windows_of(ids, np.array([], np.int32), 30, 30):
            ours, theirs = (logs(one.logits(window.inputs))[-len(window.targets) :] for one in (model, exact))
            kl += (np.exp(theirs) * (theirs - ours)).sum(1).tolist()
            agree += int((ours.argmax(1) == theirs.argmax(1)).sum())
        assert found.context == 30 and found.kl_mean is not None and found.kl_mean > 0
        assert found.kl_mean == pytest.approx(np.mean(kl), rel=1e-9)
        assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-9)
        assert found.top1_agreement == agree / found.tokens < 1
        alone = evaluate(exact, [Passage(TEXT)])
        assert found.reference is not None and found.reference.tokens == alone.tokens


def test_a_model_equals_itself(model_path: Path) -> None:
    with colibri.load(model_path, max_batch=2) as model:
        found = evaluate(model, [Passage(TEXT)], reference=model)
        assert (found.kl_mean, found.kl_p99, found.top1_agreement) == (0.0, 0.0, 1.0)
        assert found.reference is not None and found.reference.nll == found.nll


def test_pieces_change_nothing(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with colibri.load(model_path) as model:
        whole = evaluate(model, [Passage(TEXT)], stride=5)
        monkeypatch.setattr(evaluation, "_HELD_BYTES", 4 * model.n_vocab * 3)
        monkeypatch.setattr(evaluation, "_BLOCK", model.n_vocab * 2)
        told: list[tuple[int, int]] = []
        pieces = evaluate(
            model, [Passage(TEXT)], stride=5, progress=lambda done, total: told.append((done, total))
        )
        assert np.array_equal(whole.token_nll, pieces.token_nll) and whole == pieces
        assert told[-1] == (whole.tokens, whole.tokens) and len(told) > 5


def test_log_probabilities_of_a_continuation(model_path: Path) -> None:
    with colibri.load(model_path) as model:
        ids = np.array(model.tokenizer.encode_prompt(TEXT)[:20], np.int32)
        found, best = token_logprobs(model, ids[:-1], ids[-4:])
        rows = logs(model.logits(ids[:-1]))[-4:]
        assert found == pytest.approx(rows[np.arange(4), ids[-4:]])
        assert best.tolist() == (rows.argmax(1) == ids[-4:]).tolist()


# --- what is refused, and what it leaves


def test_what_cannot_be_scored_is_refused(model: colibri.Model, make_model: Callable[..., Path]) -> None:
    for passages, text in (
        ([], "nothing to score"),
        ([Passage("")], "nothing to score"),
        ([Passage("a", "b")], "a source has no effect"),
    ):
        with pytest.raises(ArgumentError, match=text):
            evaluate(model, passages)
    with pytest.raises(ArgumentError, match="tgt_lang='fra_Latn' has no effect"):
        evaluate(model, [Passage(TEXT)], tgt_lang="fra_Latn")
    with pytest.raises(ArgumentError, match="stride: expected an integer from 1 to 64"):
        evaluate(model, [Passage(TEXT)], stride=65)
    with (
        colibri.load(make_model("mixtral")) as other,
        pytest.raises(ArgumentError, match="has 320 tokens and no encoder, .* 300"),
    ):
        evaluate(model, [Passage(TEXT)], reference=other)
    engine = model._sequences
    assert engine.take(np.array([1], np.int32), None, engine.cancels) is not None
    with pytest.raises(ArgumentError, match="AsyncEngine"):
        evaluate(model, [Passage(TEXT)])


def test_an_end_in_the_middle_leaves_the_model_usable(model: colibri.Model) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = evaluate(model, [Passage(TEXT)])
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, [Passage(TEXT)], progress=stop)
    assert evaluate(model, [Passage(TEXT)]) == before


def test_the_command(
    call: Callable[..., Result], model_path: Path, tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    plain, lines = tmp_path / "plain.txt", tmp_path / "lines.jsonl"
    plain.write_text(TEXT)
    lines.write_text(json.dumps({"text": "the cat"}) + "\n\n" + json.dumps({"text": "a bird"}) + "\n")
    options = ("--context", 32, "--stride", 8, "--threads", 1)
    found = call("eval", model_path, "--text", plain, "--jsonl", lines, *options, "--json")
    assert found.status == 0, found.err
    with colibri.load(model_path, context=32) as model:
        passages = [Passage(TEXT), Passage("the cat"), Passage("a bird")]
        expected = evaluate(model, passages, stride=8)
    assert json.loads(found.out) == expected.as_dict()
    streamed = ("--residency", "streamed", "--expert-slots", 2, "--no-prefetch")
    assert call("eval", model_path, "--text", plain, "--jsonl", lines, *options, *streamed, "--json") == found
    beside = call("eval", model_path, "--text", plain, "--reference", model_path)
    assert "KL divergence    mean 0, 99th percentile 0 nats a token" in beside.out
    assert "same best token  100.00 %" in beside.out
    for wrong, text in (
        ((), "no text: give files with --text or --jsonl"),
        (("--text", tmp_path / "absent"), "Cannot read"),
        (("--text", plain, "--source-field", "x"), "--source-field x has no effect without --jsonl"),
        (("--jsonl", lines, "--source-field", "x"), "an object with a text named 'x'"),
        (("--text", plain, "--stride", 0), "--stride: expected"),
    ):
        failed = call("eval", model_path, *wrong)
        assert failed.status and text in failed.err, failed.err
