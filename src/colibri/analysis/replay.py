"""Replays a routing trace against an expert cache: hit rates and bytes of policies and sizes.

Owns: what a trace asks of a cache, figures by layer and in all. Refuses: the rules of caches (policies.py),
tables (cli/replay.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.analysis.policies import POLICIES, Accesses, Integers
from colibri.analysis.trace import Trace
from colibri.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Demand:
    """A trace as accesses of experts, and what is needed to count them."""

    accesses: Accesses
    uses: Integers  # of each expert, in steps
    expert_bytes: Integers  # of each expert's record
    layers: Integers  # of each expert
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy with one number of slots. Arrays are by MoE layer."""

    policy: str
    slots: int
    uses: Integers
    misses: Integers
    bytes: Integers  # read
    tokens: int

    @property
    def hit_rate(self) -> float:
        return _rate(int(self.uses.sum()), int(self.misses.sum()))

    @property
    def bytes_per_token(self) -> float:
        return float(self.bytes.sum()) / self.tokens

    def data(self, layers: Sequence[int] | None = None) -> dict[str, Any]:
        """The figures; layers: the numbers of the MoE layers, where each is wanted."""
        found: dict[str, Any] = {
            "policy": self.policy,
            "slots": self.slots,
            "hit_rate": self.hit_rate,
            "misses": int(self.misses.sum()),
            "bytes_read": int(self.bytes.sum()),
            "bytes_per_token": self.bytes_per_token,
        }
        if layers is not None:
            rows = zip(layers, self.uses.tolist(), self.misses.tolist(), self.bytes.tolist(), strict=True)
            found["layers"] = [
                {
                    "layer": layer,
                    "uses": uses,
                    "hit_rate": _rate(uses, misses),
                    "bytes_per_token": count / self.tokens,
                }
                for layer, uses, misses, count in rows
            ]
        return found


def _rate(uses: int, misses: int) -> float:
    return 1 - misses / uses if uses else 0.0


def demand(trace: Trace, chunk: int | None = None) -> Demand:
    """What a trace asks of a cache. chunk: as if at most so many rows had been evaluated together (routing
    does not depend on it); 1: every token by itself. A source is always read whole."""
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"chunk: expected at least 1, found {chunk}")
    if not trace.n_rows:
        raise ArgumentError(f"{trace.path} holds no rows: there is nothing to replay")
    counts = np.array(trace.header.n_experts, np.int64)
    ends = np.cumsum(counts)
    n = int(ends[-1])
    pieces, lengths, layer_ends = [], [], []
    for chunks, experts in trace.blocks():
        steps, layers = _steps(trace, chunks, chunk)
        of_choice = trace.layers_of(chunks)
        numbers = experts.astype(np.int64) + ((ends - counts)[of_choice] + steps * n)[:, None]
        numbers = np.unique(numbers)  # by step, then by expert
        pieces.append((numbers % n).astype(np.int32))
        lengths.append(np.bincount(numbers // n, minlength=len(layers)))
        layer_ends.append(ends[layers].astype(np.int32))
    accesses = Accesses(
        n,
        np.concatenate(pieces),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]),
        np.concatenate(layer_ends),
    )
    present = np.arange(trace.array("expert_bytes").shape[1]) < counts[:, None]
    return Demand(
        accesses,
        np.bincount(accesses.experts, minlength=n),
        trace.array("expert_bytes")[present],
        np.repeat(np.arange(len(counts)), counts),
        trace.n_rows,
    )


def _steps(trace: Trace, chunks: slice, cut: int | None) -> tuple[Integers, Integers]:
    """(step of every choice of some chunks, layer of every step): steps count from 0."""
    which = trace.array("chunks")[chunks].astype(np.int64)
    stacks = trace.header.stacks
    steps, layers = [], []
    first = 0
    for rows, stack, times in _runs(which):
        depth = len(stacks[stack])
        within = np.arange(rows) // (rows if cut is None or stack else cut)  # which piece a row is in
        n_pieces = int(within[-1]) + 1
        one = within[None, :] * depth + np.arange(depth)[:, None]
        all_of = np.arange(times)[:, None, None] * (n_pieces * depth) + one + first
        steps.append(all_of.ravel())
        layers.append(np.tile(np.array(stacks[stack], np.int64), n_pieces * times))
        first += n_pieces * depth * times
    return np.concatenate(steps), np.concatenate(layers)


def _runs(chunks: Integers) -> list[tuple[int, int, int]]:
    """(rows, stack, how often) of equal chunks that follow each other: decoding is one long run."""
    changes = np.flatnonzero((chunks[1:] != chunks[:-1]).any(axis=1)) + 1
    bounds = [0, *changes.tolist(), len(chunks)]
    return [
        (int(chunks[a, 0]), int(chunks[a, 1]), b - a) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def slot_counts(texts: Sequence[str], n_experts: int) -> list[int]:
    """Numbers of slots from "25%" (of all experts, rounded, at least 1) or "16"."""
    found = []
    for text in texts:
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%?)\s*", text)
        if match is None or (not match[2] and "." in match[1]):
            raise ArgumentError(f"slots: expected numbers and shares such as 16 or 25%, found {text!r}")
        number = float(match[1])
        count = max(1, round(number * n_experts / 100)) if match[2] else int(match[1])
        if not 0 < number <= (100 if match[2] else n_experts):
            raise ArgumentError(
                f"slots: expected 1 to {n_experts} (all experts of all layers) or a share up to 100%, found "
                f"{text!r}"
            )
        found.append(count)
    return found


def replay(
    found: Demand,
    slots: Sequence[int],
    policies: Sequence[str] = ("lru", "lfru", "belady"),
    progress: Callable[[int, int, str], object] | None = None,
) -> list[Outcome]:
    """Every policy with every number of slots. progress: outcomes done, of all, what comes next."""
    for policy in policies:
        if policy not in POLICIES:
            raise ArgumentError(f"policy: expected some of {', '.join(POLICIES)}, found {policy!r}")
    work = [(count, policy) for count in slots for policy in policies]
    outcomes = []
    for done, (count, policy) in enumerate(work):
        if progress is not None:
            progress(done, len(work), f"{policy} with {count} slots")
        misses = POLICIES[policy](found.accesses, count)
        outcomes.append(
            Outcome(
                policy,
                count,
                _by_layer(found, found.uses),
                _by_layer(found, misses),
                _by_layer(found, misses * found.expert_bytes),
                found.tokens,
            )
        )
    return outcomes


def _by_layer(found: Demand, values: Integers) -> Integers:
    """Sums over the experts of each MoE layer."""
    _, place = np.unique(found.layers, return_inverse=True)
    sums = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(sums, place, values)
    return sums
