"""The engine's cache of experts keeps to the rules that `colibri replay` simulates, miss by miss.

Owns: that equality, for both policies, sizes from one slot on, prompts and single tokens, with prefetch and
without. Refuses: the rules
themselves (test_replay.py), bits (test_residency.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import colibri
from colibri._native import RoutingView
from colibri.analysis.policies import POLICIES, Accesses


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 10, 20, 33, 40])
def test_misses_are_those_of_the_simulation(slots: int, policy: str, prefetch: bool) -> None:
    rng = np.random.default_rng(slots)
    steps: list[tuple[int, npt.NDArray[np.int32]]] = []

    def observe(view: RoutingView) -> None:
        steps.append((view.layer, np.unique(view.rows().experts)))

    with colibri.load(
        "demo",
        expert_slots=slots,
        expert_policy=policy,
        prefetch=prefetch,
        chunk=8,
        context=128,
        threads=1,
    ) as model:
        counts = np.array(model.config["n_experts"])
        firsts = np.cumsum(counts) - counts
        with model.observe(routing=observe):
            for _ in range(12):  # often enough for counts to be halved
                model.generate(rng.integers(5, 500, int(rng.integers(1, 30))).tolist(), max_tokens=25)
        found = model.stats.misses.astype(np.int64)
        uses = (model.stats.hits + model.stats.misses).astype(np.int64)
    experts = [firsts[layer] + chosen for layer, chosen in steps]
    lengths = np.array([len(chosen) for chosen in experts], np.int64)
    accesses = Accesses(
        int(counts.sum()),
        np.concatenate(experts).astype(np.int32),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        np.array([firsts[layer] + counts[layer] for layer, _ in steps], np.int32),
    )
    assert lengths.sum() == uses.sum() > 4 * counts.sum()
    missed = POLICIES[policy](accesses, slots)
    layers = np.repeat(np.arange(len(counts)), counts)
    assert np.bincount(layers, missed, len(counts)).astype(np.int64).tolist() == found.tolist()
