"""Draws the tokens of a stream.

Owns: the loop's step: what a sequence lacks is evaluated, the next id is sampled, both are timed.
Refuses: texts and when to stop (generate.py), what sequences hold (sequences.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from colibri import _native as native
from colibri._native import Ids
from colibri.generate import Work
from colibri.sampling import Sampling
from colibri.sequences import Progress, Sequences


def drawer(
    sequences: Sequences,
    n_vocab: int,
    prompt: Ids,
    source: Ids | None,
    limit: int,
    chosen: Sampling,
    progress: Progress | None,
    work: Work,
) -> Callable[[list[int]], int]:
    """The function that gives a Stream its next id: evaluates what a sequence lacks, then draws.

    Between two calls other work may use the model: the sequence is found or made again, with the same result.
    """
    ids = np.empty(len(prompt) + limit, np.int32)
    ids[: len(prompt)] = prompt
    penalised = chosen.repetition_penalty != 1
    sampler = native.sampler(
        native.Sampler(
            temperature=float(chosen.temperature or 0),
            top_k=min(int(chosen.top_k or 0), n_vocab),
            top_p=float(chosen.top_p or 1),
            min_p=float(chosen.min_p or 0),
            repetition_penalty=float(chosen.repetition_penalty or 1),
            seed=int(chosen.seed or 0),
        )
    )
    began = sequences.cancels
    sequence = -1

    def next_id(generated: list[int]) -> int:
        nonlocal sequence
        n = len(prompt) + len(generated)
        if generated:
            ids[n - 1] = generated[-1]
        with sequences.lock:
            started = time.perf_counter()
            sequence, reused = sequences.hold(
                ids[:n], sequence, began, None if generated else progress, source
            )
            id = native.sample(
                sequences.context, sequences.logits, sampler, ids[:n] if penalised else None, n
            )
            seconds = time.perf_counter() - started
        if generated:
            work.decode_seconds += seconds
        else:
            work.prefill_seconds, work.n_reused = seconds, reused
        return id

    return next_id
