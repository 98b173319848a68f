"""The two loops that speed is measured on: a prompt evaluated in one piece, then ids one after the other.

Owns: random ids that repeat from a seed, clocks around the engine's own way into the library, times by phase
of the same loops. Ids are given, not drawn from the model: the work is then the same for every machine, type
and thread count, no end token ends it, and routing is that of varied text. The greedy choice is made and
dropped, since a text pays for it.
Refuses: medians, machines, tables.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from colibri import _native as native
from colibri._native import Ids
from colibri.engine import Model
from colibri.errors import ArgumentError, ColibriError
from colibri.profiling import Profile, measure
from colibri.residency import Traffic

MATRIX_PHASES = ("qkv", "attn_out", "gate_up", "down", "output")  # the rest is not reading weights


@dataclass(frozen=True, slots=True)
class Timed:
    """Evaluations that were measured together."""

    tokens: int
    seconds: float  # around them, as the caller sees it
    profile: Profile
    traffic: Traffic  # of streamed experts


def lengths(
    limit: int, n_prompt: int | None, n_decode: int | None, *, default_prompt: int, default_decode: int
) -> tuple[int, int]:
    """Tokens of prompt and of decoding, both at least 1, together at most limit: the positions that the model
    was trained for. None takes the default, or less where that is too much for the model."""
    for name, value in (("prompt", n_prompt), ("decode", n_decode)):
        if value is not None and value < 1:
            raise ArgumentError(f"{name}: expected at least 1 token, found {value}")
    decode = n_decode or max(1, min(default_decode, limit // 2, limit - (n_prompt or 1)))
    prompt = n_prompt or max(1, min(default_prompt, limit - decode))
    if prompt + decode > limit:
        raise ArgumentError(
            f"prompt: {prompt} tokens and {decode} decoded are {prompt + decode}, but the model was trained "
            f"for {limit} positions: choose fewer"
        )
    return prompt, decode


class Loops:
    """A model with ids for a prompt and what follows it. Each prompt begins differently, so that none is
    taken from what the model still holds."""

    def __init__(self, model: Model, n_prompt: int, n_decode: int, seed: int = 0) -> None:
        self.model = model
        self.n_prompt, self.n_decode = n_prompt, n_decode
        self._random = np.random.default_rng(seed)
        self._n_ids = int(model.config["n_vocab_used"])
        self._greedy = native.sampler(native.Sampler(0, 0, 1, 0, 1, 0))
        self._sequence = -1
        self._encoder = bool(model.config["n_encoder_layers"])
        self.ids = self._fresh()

    @property
    def source(self) -> Ids | None:
        """With an encoder: the prompt, which is read; decoding begins with its last id."""
        return self.ids[: self.n_prompt] if self._encoder else None

    def renew(self) -> None:
        """Other ids, with another beginning."""
        first = self.ids[0]
        self.ids = self._fresh()
        if self.ids[0] == first:
            self.ids[0] = (first + 1) % self._n_ids

    def prefill(self) -> float:
        """Evaluates the prompt; seconds until the first id after it is chosen."""
        started = time.perf_counter()
        kept = self._step(self.n_prompt)
        seconds = time.perf_counter() - started
        if kept:
            raise ColibriError(f"{kept} ids of the prompt were not evaluated: call renew() before prefill()")
        return seconds

    def decode(self, n: int | None = None) -> float:
        """Evaluates n ids (default: all) behind the prompt one by one; seconds."""
        started = time.perf_counter()
        for position in range(self.n_prompt, self.n_prompt + (n or self.n_decode)):
            self._step(position + 1)
        return time.perf_counter() - started

    def timed(self) -> tuple[Timed, Timed]:
        """Prefill and decode with times by phase."""
        with measure(self.model) as profile:
            before = self.model.stats
            seconds = self.prefill()
            between = self.model.stats
            prefill = Timed(self.n_prompt, seconds, profile.copy(), between.since(before))
            profile.clear()
            seconds = self.decode()
            return prefill, Timed(self.n_decode, seconds, profile.copy(), self.model.stats.since(between))

    def _fresh(self) -> Ids:
        return self._random.integers(0, self._n_ids, self.n_prompt + self.n_decode, dtype=np.int32)

    def _step(self, n: int) -> int:
        """The sequence holds the first n ids afterwards; how many it held before."""
        sequences = self.model._sequences
        with sequences.lock:
            held = self.ids[self.n_prompt - 1 if self._encoder else 0 : n]
            self._sequence, kept = sequences.hold(held, self._sequence, sequences.cancels, None, self.source)
            native.sample(sequences.context, sequences.logits, self._greedy, None, n)
        return kept


def phases_ns(profile: Profile, *names: str) -> int:
    """Nanoseconds of these phases together."""
    return int(profile.phase_ns[:, [profile.phases.index(name) for name in names]].sum())


def outside_matrices_ns(profile: Profile) -> int:
    """Nanoseconds of all phases that are not products with weight matrices."""
    return phases_ns(profile, *(name for name in profile.phases if name not in MATRIX_PHASES))


def wait_share(profile: Profile) -> float:
    """The part of the time that the calling thread waited for the others."""
    total = int(profile.phase_ns.sum())
    return int(profile.wait_ns.sum()) / total if total else 0.0
