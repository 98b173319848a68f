"""Draws the ids of a text from logits.

Owns: Chooser, what is done to logits before an id is drawn and what is noted of it; the loop's step of one
stream: what a sequence lacks is evaluated, the next id is chosen, both are timed.
Refuses: texts and when to stop (generate.py), what sequences hold (sequences.py), the draw itself (the C
library).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from colibri import _native as native
from colibri._native import Floats, Ids
from colibri.constraints import Constraint
from colibri.errors import ArgumentError
from colibri.generate import Answer, Logprobs, Stream, Work
from colibri.sampling import NEVER, Sampling
from colibri.sequences import Progress, Sequences


class Chooser:
    """Chooses the ids of one text, one after the other.

    Penalties of presence and frequency count what the text has so far, the repetition penalty its prompt
    too. Order: penalties, biases, constraint, then what colibri_sample does."""

    def __init__(
        self, chosen: Sampling, n_vocab: int, n_vocab_used: int, constraint: Constraint | None, work: Work
    ) -> None:
        """n_vocab_used: ids from there on are padding."""
        self._presence, self._frequency = chosen.presence_penalty or 0.0, chosen.frequency_penalty or 0.0
        self._penalised = chosen.repetition_penalty != 1
        self._constraint, self._n_used, self._work = constraint, n_vocab_used, work
        self._n_top = chosen.logprobs
        if self._n_top is not None:
            work.logprobs = []
        self._n_prompt_top = chosen.prompt_logprobs
        if self._n_prompt_top is not None:
            work.prompt_logprobs = []
        self._sampler = native.sampler(
            native.Sampler(
                temperature=float(chosen.temperature or 0),
                top_k=min(int(chosen.top_k or 0), n_vocab),
                top_p=float(chosen.top_p or 1),
                min_p=float(chosen.min_p or 0),
                repetition_penalty=float(chosen.repetition_penalty or 1),
                seed=int(chosen.seed or 0),
            )
        )
        self._shift = self._biases(chosen, n_vocab) if chosen.logit_bias or self._counts else None
        self._written: set[int] = set()

    @property
    def _counts(self) -> bool:
        return self._presence != 0 or self._frequency != 0

    def _biases(self, chosen: Sampling, n_vocab: int) -> Floats:
        shift = np.zeros(n_vocab, np.float32)
        for id, bias in (chosen.logit_bias or {}).items():
            if id >= self._n_used:
                raise ArgumentError(
                    f"logit_bias: expected ids from 0 to {self._n_used - 1} (of the vocabulary), found {id}"
                )
            shift[id] = -np.inf if bias <= NEVER else bias
        return shift

    def choose(self, context: native.ContextHandle, logits: Floats, ids: Ids) -> int:
        """The next id after ids, prompt and text, whose logits [n_vocab] these are; they stay unchanged."""
        adjusted = logits if self._shift is None else logits + self._shift
        if self._constraint is not None:
            adjusted = np.where(self._constraint.allowed(), adjusted, np.float32(-np.inf))
        id = native.sample(context, adjusted, self._sampler, ids if self._penalised else None, len(ids))
        if self._counts and self._shift is not None:
            self._shift[id] -= self._frequency + (0 if id in self._written else self._presence)
            self._written.add(id)
        if self._constraint is not None:
            self._constraint.consume(id)
            self._work.complete = self._constraint.complete
        if self._work.logprobs is not None:
            self._work.logprobs.append(logprobs(logits[: self._n_used], id, self._n_top or 0))
        return id

    @property
    def sees_prompt(self) -> bool:
        """Whether see_prompt() must be called with the logits after every id of the prompt."""
        return self._n_prompt_top is not None

    def see_prompt(self, logits: Floats, following: Ids) -> None:
        """Logits [n, n_vocab] after some ids of the prompt, and the ids that follow them."""
        for row, id in zip(logits, following.tolist(), strict=False):
            assert self._work.prompt_logprobs is not None
            self._work.prompt_logprobs.append(logprobs(row[: self._n_used], id, self._n_prompt_top or 0))


def logprobs(logits: Floats, id: int, n_top: int) -> Logprobs:
    """How likely an id and the n_top most likely ids are after these logits."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    n_top = min(n_top, len(values))
    best: list[tuple[int, float]] = []
    if n_top:
        least = np.partition(values, len(values) - n_top)[len(values) - n_top]
        among = np.flatnonzero(values >= least)
        best = [(int(at), float(values[at])) for at in among[np.lexsort((among, -values[among]))][:n_top]]
    return Logprobs(id, float(values[id]), best)


@dataclass(frozen=True, eq=False, slots=True)
class Writing:
    """A text to write: its prompt, its limits, how its ids are chosen. Nothing is evaluated yet."""

    ids: Ids
    source: Ids | None  # what an encoder reads
    limit: int  # most ids to write
    answer: Answer
    chooser: Chooser
    work: Work
    seed: int | None

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt and of its source."""
        return len(self.ids) + (0 if self.source is None else len(self.source))


def stream(sequences: Sequences, writing: Writing, progress: Progress | None) -> Stream:
    """Writes a text piece by piece: evaluates what a sequence lacks, then chooses.

    Between two pieces other work may use the model: the sequence is found or made again, with the same
    result."""
    prompt, work = writing.ids, writing.work
    ids = np.empty(len(prompt) + writing.limit, np.int32)
    ids[: len(prompt)] = prompt
    began = sequences.cancels
    sequence = -1

    def read_prompt() -> None:
        started = time.perf_counter()
        sequences.read_alone(prompt, began, writing.chooser.see_prompt)
        work.prefill_seconds += time.perf_counter() - started

    def next_id(generated: list[int]) -> int:
        nonlocal sequence
        n = len(prompt) + len(generated)
        if generated:
            ids[n - 1] = generated[-1]
        with sequences.lock:
            started = time.perf_counter()
            sequence, reused = sequences.hold(
                ids[:n], sequence, began, None if generated else progress, writing.source
            )
            id = writing.chooser.choose(sequences.context, sequences.logits, ids[:n])
            seconds = time.perf_counter() - started
        if generated:
            work.decode_seconds += seconds
        else:
            work.prefill_seconds += seconds
            work.n_reused = 0 if writing.chooser.sees_prompt else reused
        return id

    return Stream(
        next_id,
        writing.answer,
        n_prompt=writing.n_prompt,
        seed=writing.seed,
        work=work,
        read_prompt=read_prompt if writing.chooser.sees_prompt else None,
    )
