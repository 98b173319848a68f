"""Where the time of evaluations goes: measure(), and the Profile that it fills.

    with colibri.measure(model) as profile:
        model.logits(ids)
    print(dict(zip(profile.phases, (profile.phase_ns.sum(axis=0) / 1e6).tolist())))  # milliseconds

Owns: the arrays, and that they outlive what writes into them. Refuses: clocks (the C library reads them) and
what the figures mean for a reader (colibri.analysis).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from colibri import _native as native
from colibri._native import Counts
from colibri.engine import Model
from colibri.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Profile:
    """Times that every evaluation inside measure() adds to. The last row of phase_ns and wait_ns holds what
    belongs to no layer: embedding and output head. Arrays may be read and zeroed between evaluations."""

    phases: tuple[str, ...]  # names of the columns: embed, norm, qkv, ... in the order of the work
    phase_ns: Counts  # [n_layers + 1, phases] wall-clock nanoseconds
    wait_ns: Counts  # the same: of these, what the calling thread waited for the others
    expert_ns: Counts  # [n_layers, n_experts] nanoseconds, all threads together; 0: not chosen

    def copy(self) -> Profile:
        """The figures as they are now."""
        return Profile(self.phases, self.phase_ns.copy(), self.wait_ns.copy(), self.expert_ns.copy())

    def clear(self) -> None:
        """Back to zero, between evaluations."""
        for array in (self.phase_ns, self.wait_ns, self.expert_ns):
            array[...] = 0


@contextmanager
def measure(model: Model) -> Iterator[Profile]:
    """Measures all evaluations of the model while the `with` block lasts, whichever method asks for them.

    Costs about a microsecond a layer and changes no result. One at a time for a model."""
    if not isinstance(model, Model):
        raise ArgumentError(f"measure: expected an open model, as colibri.load makes it, found {model!r:.80}")
    n_layers, n_experts = model.config["n_layers"], max(model.config["n_experts"])
    phases = native.phase_names()
    profile = Profile(
        phases,
        np.zeros((n_layers + 1, len(phases)), np.uint64),
        np.zeros((n_layers + 1, len(phases)), np.uint64),
        np.zeros((n_layers, n_experts), np.uint64),
    )
    struct = native.profile(profile.phase_ns, profile.wait_ns, profile.expert_ns)
    sequences = model._sequences
    with sequences.lock:
        if sequences.measured:
            raise ArgumentError(
                "the model is being measured already: end the other measure() first, or load a second Model"
            )
        native.measure(sequences.context, struct)
        sequences.measured = True
    try:
        yield profile
    finally:
        with sequences.lock:
            sequences.measured = False
            if not sequences.closed:
                native.measure(sequences.context, None)
