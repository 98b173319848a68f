"""How well a model predicts given texts, alone or beside a reference model (docs/EVALUATION.md).

Owns: which ids are scored after which others (windows), and the formulas. Refuses: generating, tasks
(colibri.lm_eval), options and bars (cli/evaluate.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri._native import Floats, Ids, Input
from colibri.arguments import bounded
from colibri.engine import Model
from colibri.errors import ArgumentError, NumericError

Doubles = npt.NDArray[np.float64]
Progress = Callable[[int, int], object]  # tokens scored, tokens to score

_HELD_BYTES = 32 << 20  # of logits of one model at a time
_BLOCK = 1 << 20  # logits that are float64 at a time


class Passage(NamedTuple):
    """A text to score; of a model with an encoder, what it should make of a source."""

    text: str
    source: str | None = None
    where: str = "the text"  # for errors


class Window(NamedTuple):
    """What is evaluated together: each of the last `len(targets)` inputs is followed by its target."""

    inputs: Ids  # [n], at most the context
    targets: Ids  # [m], m <= n
    source: Ids | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What evaluate() measured. Natural logarithms; bits only where the name says so."""

    tokens: int  # scored
    bytes: int  # of the texts in UTF-8, without what stands before the first token scored
    nll: float  # nats, the sum over tokens of -ln p(token | those before it)
    texts: int
    context: int
    stride: int
    reference: Evaluation | None = None  # of the reference model, on the same tokens
    kl_mean: float | None = None  # nats a token, of the reference against the model
    kl_p99: float | None = None  # of 100 tokens one has more
    top1_agreement: float | None = None  # share of tokens before which both models prefer the same one
    token_nll: Doubles = field(default_factory=lambda: np.empty(0), compare=False, repr=False)  # [tokens]

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); infinite where that is beyond a float."""
        return math.exp(mean) if (mean := self.nll / self.tokens) < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.bytes if self.bytes else math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all of it but the figures of single tokens."""
        found = asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        found["reference"] = None if self.reference is None else self.reference.as_dict()
        del found["token_nll"]
        return found


def evaluate(
    model: Model,
    passages: Sequence[Passage],
    *,
    reference: Model | None = None,
    stride: int | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Scores texts: perplexity, bits per byte, and beside a reference model the Kullback-Leibler divergence
    and how often both prefer the same token.

    stride: new tokens that each window but the first scores, 1 to the model's context (default: all of it,
    so that each token is evaluated once); smaller ones give the tokens after a cut more to go by and cost
    context / stride times as much. A model with an encoder scores texts given their sources, whole;
    src_lang and tgt_lang name the languages of both, where it knows some.
    """
    stride = bounded("stride", stride, model.context)
    if stride is not None and model.config["n_encoder_layers"]:
        raise ArgumentError(f"stride={stride} has no effect: a model with an encoder reads texts whole")
    languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    for name, language in languages.items():
        if language is not None and not model.config["n_encoder_layers"]:
            raise ArgumentError(f"{name}={language!r} has no effect: the model has no encoder")
    room = model.context
    if reference is not None:
        _check_reference(model, reference)
        room = min(room, reference.context)
    step = min(room, stride or room)
    plans = [_planned(model, passage, room, step, languages) for passage in passages]
    if reference is not None:
        _check_same_ids(model, reference, passages, src_lang)
    total = sum(len(window.targets) for _, windows in plans for window in windows)
    if not total:
        raise ArgumentError(
            "nothing to score: expected texts with a token that follows another, found "
            f"{len(plans)} without; give more text"
        )
    models = [model] if reference is None else [model, reference]
    tally = _Tally(total, reference is not None)
    for _, windows in plans:
        for window in windows:
            for rows, targets in _rows(models, window):
                tally.add(rows, targets)
                if progress is not None:
                    progress(tally.done, total)
    sizes: dict[str, Any] = {"tokens": total, "bytes": sum(size for size, _ in plans), "texts": len(plans)}
    return tally.result({**sizes, "context": room, "stride": step})


def token_logprobs(model: Model, inputs: Ids, targets: Ids) -> tuple[Doubles, npt.NDArray[np.bool_]]:
    """(ln p of each target after those before it, whether it is the most likely one), both [m]: targets
    follow the last m inputs."""
    tally = _Tally(len(targets), False)
    best = []
    for rows, following in _rows([model], Window(inputs, targets)):
        tally.add(rows, following)
        best.append(rows[0].argmax(1) == following)
    return -tally.nll[0], np.concatenate(best)


def windows_of(ids: Ids, bos: Ids, context: int, stride: int) -> Iterator[Window]:
    """Cuts a text's ids, so that every one of them is a target once, the first one only behind BOS.

    Each window ends with the last target and reaches back as far as the context holds, after BOS, which
    begins every window of a model whose texts begin with it. [] of bos: the model has none."""
    n, room = len(ids), context - len(bos)
    first = 0 if len(bos) else 1
    end = min(n, first + context)
    while first < end:
        begin = max(0, end - 1 - room)
        yield Window(np.concatenate([bos, ids[begin : end - 1]]).astype(np.int32), ids[first:end])
        first, end = end, min(n, end + stride)


def _planned(
    model: Model, passage: Passage, room: int, stride: int, languages: dict[str, str | None]
) -> tuple[int, list[Window]]:
    """(bytes that are scored, windows)"""
    size = len(passage.text.encode("utf-8", "surrogatepass"))
    if model.config["n_encoder_layers"]:
        return size, [_conditional(model, passage, **languages)]
    if passage.source is not None:
        raise ArgumentError(
            f"{passage.where}: a source has no effect: the model has no encoder; leave it out"
        )
    tokenizer = model.tokenizer
    ids = np.array(tokenizer.encode(passage.text), np.int32)
    bos = np.array([tokenizer.bos_id] if tokenizer.add_bos else [], np.int32)
    if not len(bos) and len(ids):
        size = max(0, size - len(tokenizer.piece(int(ids[0]), True, True)))
    return size, list(windows_of(ids, bos, room, stride))


def _conditional(model: Model, passage: Passage, src_lang: str | None, tgt_lang: str | None) -> Window:
    """A target given its source: neither is cut."""
    if passage.source is None:
        raise ArgumentError(
            f"{passage.where}: expected a source too, since the model reads one text and writes another, "
            "found none; give JSON Lines with both, and the name of the field with --source-field"
        )
    source = model.prompt_ids(passage.source, src_lang)
    targets = np.array(model.tokenizer.encode(passage.text), np.int32)
    inputs = np.concatenate([np.array(model.start_ids(tgt_lang), np.int32), targets[:-1]]).astype(np.int32)
    for what, n in (("source", len(source)), ("text", len(inputs))):
        if n > model.context:
            raise ArgumentError(
                f"{passage.where}: a {what} of {n} tokens, the context holds {model.context}; it is read "
                "whole: give shorter ones or a larger context"
            )
    return Window(inputs, targets, source)


def _rows(models: Sequence[Model], window: Window) -> Iterator[tuple[list[Floats], Ids]]:
    """Piece by piece the logits of each model before some targets, and those targets."""
    n, before = len(window.inputs), len(window.inputs) - len(window.targets)
    most = max(1, _HELD_BYTES // (4 * models[0].n_vocab))
    taken: list[tuple[Model, int, int]] = []
    try:
        for model in models:
            sequences = model._sequences
            began = sequences.cancels
            found = sequences.take(window.inputs, window.source, began, fresh=True)
            if found is None:
                raise ArgumentError(
                    f"{model.path.name}: all {model.max_batch} sequences are in use by an AsyncEngine; load "
                    "the model a second time"
                )
            taken.append((model, found[0], began))
        pieces = [0, before, *range(before + most, n, most), n]
        for begin, end in zip(pieces, pieces[1:], strict=False):
            if begin == end:
                continue
            rows = []
            for model, sequence, began in taken:
                scored = begin >= before
                logits = np.empty((end - begin, model.n_vocab), np.float32) if scored else None
                item = Input(sequence, window.inputs[begin:end], logits)
                model._sequences.advance([item], [window.inputs[:end]], began)
                if logits is not None:
                    rows.append(logits)
            if rows:
                yield rows, window.targets[begin - before : end - before]
    finally:
        for model, sequence, _ in taken:
            model._sequences.give_back(sequence)


class _Tally:
    """What each token adds."""

    def __init__(self, total: int, compared: bool) -> None:
        self.done = 0
        self.nll = np.zeros((1 + compared, total))
        self.kl, self.agree = np.zeros(total * compared), 0

    def add(self, rows: list[Floats], targets: Ids) -> None:
        """rows: logits [n, n_vocab] of each model."""
        step = max(1, _BLOCK // rows[0].shape[1])
        for at in range(0, len(targets), step):
            following = targets[at : at + step]
            logs = [log_softmax(logits[at : at + step]) for logits in rows]
            here = slice(self.done, self.done + len(following))
            for which, log in enumerate(logs):
                self.nll[which, here] = -log[np.arange(len(following)), following]
            if len(logs) == 2:
                ours, theirs = logs
                share = np.exp(theirs)
                gap = np.where(share > 0, theirs - ours, 0.0)  # what has no share counts for nothing
                self.kl[here] = np.maximum((share * gap).sum(1), 0.0)
                self.agree += int((ours.argmax(1) == theirs.argmax(1)).sum())
            self.done += len(following)

    def result(self, sizes: dict[str, Any]) -> Evaluation:
        def of(which: int, **more: Any) -> Evaluation:
            values = self.nll[which]
            return Evaluation(nll=math.fsum(values), token_nll=values, **sizes, **more)

        if len(self.nll) == 1:
            return of(0)
        return of(
            0,
            reference=of(1),
            kl_mean=math.fsum(self.kl) / len(self.kl),
            kl_p99=float(np.percentile(self.kl, 99)),
            top1_agreement=self.agree / len(self.kl),
        )


def log_softmax(logits: Floats) -> Doubles:
    """ln of each token's probability, float64 [n, n_vocab]."""
    values = logits.astype(np.float64)
    values -= values.max(1, keepdims=True)
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    if not np.isfinite(values).all():
        raise NumericError("a logit is NaN or infinite: the weights are damaged, or overflow")
    return values


def _check_reference(model: Model, reference: Model) -> None:
    ours, theirs = (
        (one.n_vocab, "an encoder" if one.config["n_encoder_layers"] else "no encoder")
        for one in (model, reference)
    )
    if ours != theirs:
        raise ArgumentError(
            f"reference: expected a model of the same vocabulary and kind: {model.path.name} has {ours[0]} "
            f"tokens and {ours[1]}, {reference.path.name} {theirs[0]} and {theirs[1]}"
        )


def _check_same_ids(
    model: Model, reference: Model, passages: Sequence[Passage], src_lang: str | None
) -> None:
    """The reference reads the same ids."""

    def read(one: Model, passage: Passage) -> tuple[object, ...]:
        source = None if passage.source is None else one.prompt_ids(passage.source, src_lang).tolist()
        return one.tokenizer.encode(passage.text), source, one.tokenizer.add_bos and one.tokenizer.bos_id

    for passage in passages:
        if read(model, passage) != read(reference, passage):
            raise ArgumentError(
                f"reference: {reference.path.name} reads {passage.where} as other tokens than "
                f"{model.path.name}; compare models of one tokenizer"
            )
