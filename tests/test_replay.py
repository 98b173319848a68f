"""Replaying traces: the simulated caches do what the rules of colibri.analysis.policies say, beside a slow
and literal second implementation; nothing beats the optimum; tables and JSON."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.analysis.policies import POLICIES, Accesses
from colibri.analysis.recording import Text, record
from colibri.analysis.replay import demand, replay, slot_counts
from colibri.analysis.trace import Header, Trace
from colibri.analysis.trace_writer import TraceWriter
from colibri.errors import ArgumentError
from test_cli import Result
from test_cli import call as call
from test_trace import found as found

Steps = list[tuple[int, list[int]]]  # (end of the layer, experts numbered through)


# --- the rules once more, literally


class Cache:
    """A cache whose victims are found by looking at everything."""

    def __init__(self, policy: str, slots: int, n_experts: int, future: list[list[int]]) -> None:
        self.policy, self.slots, self.n = policy, slots, n_experts
        self.future = future  # waves still to come, the current one first
        self.inside: set[int] = set()
        self.touched: list[int] = []  # every touch, in order
        self.count = dict.fromkeys(range(n_experts), 0)
        self.touches = 0

    def touch(self, expert: int) -> None:
        self.touched.append(expert)
        self.count[expert] = min(31, self.count[expert] + 1)
        self.touches += 1

    def victim(self, in_use: set[int], end: int) -> int:
        choice = sorted(self.inside - in_use)
        if self.policy == "lru":
            return min(choice, key=lambda e: len(self.touched) - self.touched[::-1].index(e))
        if self.policy == "lfru":
            backwards = [*reversed(range(end)), *reversed(range(end, self.n))]
            level = {count: len(f"{count:b}") if count else 0 for count in range(32)}
            return min(choice, key=lambda e: (level[self.count[e]], backwards.index(e)))
        later = self.future[1:]
        return max(choice, key=lambda e: next((at for at, w in enumerate(later) if e in w), len(later)))

    def wave(self, experts: list[int], end: int) -> list[int]:
        """The misses."""
        misses = [expert for expert in experts if expert not in self.inside]
        in_use = self.inside & set(experts)
        for expert in misses:
            if len(self.inside) == self.slots:
                self.inside.remove(self.victim(in_use, end))
            self.inside.add(expert)
            in_use.add(expert)
        for expert in experts:
            self.touch(expert)
        if self.touches >= 4 * self.n:
            self.touches = 0
            self.count = {expert: count // 2 for expert, count in self.count.items()}
        self.future.pop(0)
        return misses


def waves_of(steps: Steps, slots: int) -> list[tuple[int, list[int]]]:
    return [(end, experts[at : at + slots]) for end, experts in steps for at in range(0, len(experts), slots)]


def reference(policy: str, steps: Steps, slots: int, n_experts: int) -> list[int]:
    waves = waves_of(steps, slots)
    cache = Cache(policy, slots, n_experts, [experts for _, experts in waves])
    misses = [0] * n_experts
    for end, experts in waves:
        for expert in cache.wave(experts, end):
            misses[expert] += 1
    return misses


def fewest_misses(steps: Steps, slots: int) -> int:
    """Of all ways to choose victims."""
    waves = [frozenset(experts) for _, experts in waves_of(steps, slots)]

    @functools.cache
    def fewest(at: int, inside: frozenset[int]) -> int:
        if at == len(waves):
            return 0
        missing = len(waves[at] - inside)
        others = sorted(inside - waves[at])
        keep = slots - len(waves[at])
        if len(others) <= keep:
            return missing + fewest(at + 1, inside | waves[at])
        return missing + min(fewest(at + 1, frozenset(kept) | waves[at]) for kept in subsets(others, keep))

    return fewest(0, frozenset())


def subsets(items: list[int], size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(items, size))


# --- random traces


def random_steps(seed: int, layers: tuple[int, ...], tokens: int, most: int) -> Steps:
    """Steps of layers with so many experts each, some of them loved more than others."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(layers).tolist()
    loves = [rng.dirichlet(np.full(n, 0.7)) for n in layers]
    steps: Steps = []
    for _ in range(tokens):
        for n, end, love in zip(layers, ends, loves, strict=True):
            size = int(rng.integers(1, min(most, n) + 1))
            chosen = rng.choice(n, size, replace=False, p=(love + 0.01) / (love + 0.01).sum())
            steps.append((end, sorted((chosen + end - n).tolist())))
    return steps


def accesses_of(steps: Steps, n_experts: int) -> Accesses:
    sizes = [len(experts) for _, experts in steps]
    return Accesses(
        n_experts,
        np.array([expert for _, experts in steps for expert in experts], np.int32),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array([end for end, _ in steps], np.int32),
    )


SHAPES = [((4, 4), 60, 2), ((3, 5, 2), 50, 3), ((8, 8, 8), 40, 8), ((6,), 80, 4), ((12, 1, 9), 30, 12)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_every_policy_does_what_its_rules_say(policy: str, at: int) -> None:
    layers, tokens, most = SHAPES[at]
    n = sum(layers)
    steps = random_steps(at, layers, tokens, most)
    for slots in range(1, n + 1):
        found = POLICIES[policy](accesses_of(steps, n), slots)
        expected = reference(policy, steps, slots, n)
        if policy == "belady":  # of experts that are used again in the same wave, or never, any may go
            assert int(found.sum()) == sum(expected), slots
        else:
            assert found.tolist() == expected, slots


@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_nothing_beats_belady(at: int) -> None:
    layers, tokens, most = SHAPES[at]
    n = sum(layers)
    accesses = accesses_of(random_steps(100 + at, layers, 4 * tokens, most), n)
    for slots in range(1, n + 1):
        misses = {name: int(policy(accesses, slots).sum()) for name, policy in POLICIES.items()}
        assert misses["belady"] <= min(misses.values())
    assert misses == dict.fromkeys(POLICIES, len(np.unique(accesses.experts))), "with room for all, each once"


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_best_of_all_choices(seed: int) -> None:
    steps = random_steps(seed, (3, 4), 6, 3)
    for slots in range(1, 8):
        assert POLICIES["belady"](accesses_of(steps, 7), slots).sum() == fewest_misses(steps, slots)


def test_a_long_run_keeps_to_the_rules() -> None:
    """Counts reach their limit, are halved often, and the heap of the optimum is made anew."""
    steps = random_steps(7, (5, 5), 700, 2)
    for policy in POLICIES:
        for slots in (2, 5):
            found = POLICIES[policy](accesses_of(steps, 10), slots)
            assert int(found.sum()) == sum(reference(policy, steps, slots, 10))


@pytest.mark.parametrize("seed", range(3))
def test_counts_end_at_31(seed: int) -> None:
    """Two experts that are used most of the time, others now and then: past 31 nothing tells them apart."""
    rng = np.random.default_rng(seed)
    steps: Steps = []
    for _ in range(600):
        hot = rng.random() < 0.9
        expert = int(rng.choice([3, 17], p=[0.65, 0.35])) if hot else int(rng.integers(30))
        steps.append((expert // 10 * 10 + 10, [expert]))
    for slots in (2, 3, 4):
        found = POLICIES["lfru"](accesses_of(steps, 30), slots)
        assert found.tolist() == reference("lfru", steps, slots, 30)


def test_a_scan_defeats_lru_alone() -> None:
    """Layers whose experts are all used, token after token: lru forgets each one just before its use."""
    steps: Steps = [(4 * layer + 4, list(range(4 * layer, 4 * layer + 4))) for layer in range(10)] * 50
    uses = sum(len(experts) for _, experts in steps)
    rates = {name: 1 - policy(accesses_of(steps, 40), 20).sum() / uses for name, policy in POLICIES.items()}
    assert rates["lru"] == 0 and rates["belady"] > 0.43 and rates["belady"] - rates["lfru"] < 0.05


# --- from a trace to accesses


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Two layers, of 3 and 5 experts, that know a source of theirs first; chunks of 2 rows and 1."""
    header = Header({"name": "made"}, 4, 1, (2, 3, 0, 5), 2)
    sizes = np.arange(1, 21).reshape(4, 5) * 100
    with TraceWriter(tmp_path / "made.trace", header, sizes) as writer:
        choices = [[1, 0], [0, 1], [2, 0], [0, 2], [4, 3], [4, 1], [1, 2], [0, 4]]
        source = found([(2, 1), (2, 0), (1, 0)], choices, [1, 2, 1, 2, 3])
        source["positions"][2:] = range(3)
        writer.add_sequence(source, n_prompt=2)
    return tmp_path / "made.trace"


def steps_of(accesses: Accesses) -> Steps:
    starts = accesses.starts.tolist()
    pieces = [accesses.experts[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    return list(zip(accesses.ends.tolist(), pieces, strict=True))


def test_a_trace_becomes_steps_of_distinct_experts(made: Path) -> None:
    found = demand(Trace(made))
    assert steps_of(found.accesses) == [
        (2, [0, 1]),
        (5, [2, 4]),
        (10, [6, 8, 9]),
        (5, [3, 4]),
        (10, [5, 9]),
    ]
    assert found.tokens == 5 and found.uses.tolist() == [1, 1, 1, 1, 2, 1, 1, 0, 1, 2]
    assert found.expert_bytes.tolist() == [100, 200, 600, 700, 800, 1600, 1700, 1800, 1900, 2000]
    assert found.layers.tolist() == [0, 0, 1, 1, 1, 3, 3, 3, 3, 3]


def test_chunks_may_be_cut(made: Path) -> None:
    found = demand(Trace(made), 1)
    assert steps_of(found.accesses) == [
        (2, [0, 1]),  # a source stays whole
        *[(5, [2, 4]), (10, [8, 9])],
        *[(5, [2, 4]), (10, [6, 9])],
        *[(5, [3, 4]), (10, [5, 9])],
    ]
    assert steps_of(demand(Trace(made), 2).accesses) == steps_of(demand(Trace(made)).accesses)
    with pytest.raises(ArgumentError, match="chunk: expected at least 1"):
        demand(Trace(made), 0)


def test_a_cut_trace_is_one_of_smaller_chunks(model_path: Path, tmp_path: Path) -> None:
    texts = [Text("Once upon a time there was a bird"), Text("The cat")]
    with colibri.load(model_path, context=64) as model:
        record(model, texts, tmp_path / "whole.trace")
    for chunk in (1, 3):
        with colibri.load(model_path, context=64, chunk=chunk) as model:
            record(model, texts, tmp_path / "cut.trace")
        cut = demand(Trace(tmp_path / "whole.trace"), chunk)
        assert steps_of(cut.accesses) == steps_of(demand(Trace(tmp_path / "cut.trace")).accesses)


def test_outcomes_by_layer_and_in_bytes(made: Path) -> None:
    found = demand(Trace(made))
    (outcome,) = replay(found, [10], ["lru"])
    assert outcome.uses.tolist() == [2, 4, 5] and outcome.misses.tolist() == [2, 3, 4]
    assert outcome.bytes.tolist() == [300, 2100, 7200] and outcome.hit_rate == pytest.approx(2 / 11)
    data = outcome.data([0, 1, 3])
    assert data["bytes_read"] == 9600 and data["bytes_per_token"] == 1920
    assert [row["layer"] for row in data["layers"]] == [0, 1, 3]
    assert [row["hit_rate"] for row in data["layers"]] == pytest.approx([0, 0.25, 0.2])
    with pytest.raises(ArgumentError, match="policy: expected some of lru, lfru, belady, found 'fifo'"):
        replay(found, [10], ["fifo"])


def test_sizes_are_numbers_or_shares() -> None:
    assert slot_counts(["25%", "16", " 100 % ", "0.1%", "12.5%"], 40) == [10, 16, 40, 1, 5]
    for text in ("0", "41", "0%", "101%", "-1", "x", "", "1.5", "1e3", "²"):
        with pytest.raises(ArgumentError, match="slots: expected"):
            slot_counts([text], 40)


# --- the command


def test_the_command_prints_a_table(call: Callable[..., Result], made: Path) -> None:
    found = call("replay", made, "--slots", "20%,10", "--layers")
    assert (found.status, found.err) == (0, "")
    for words in ("made.trace: made, 5 tokens in 5 steps; 10 experts in 3 layers", "lru hits", "lfru hits"):
        assert words in found.out, words
    rows = [line.split() for line in found.out.splitlines() if line.split()[:1] in (["2"], ["10"])]
    rows = [row for row in rows if row[1] != "slots:"]
    assert [row[:2] for row in rows] == [["2", "20%"], ["10", "100%"]]
    assert rows[1][2:5] == ["18.2%"] * 3 and "10 slots: hit rate by layer" in found.out


def test_the_command_prints_json(call: Callable[..., Result], made: Path) -> None:
    found = call("replay", made, "--slots", "2,50%", "--policy", "lfru", "--json", "--chunk", 1, "--layers")
    assert (found.status, found.err) == (0, "")
    data: dict[str, Any] = json.loads(found.out)
    assert (data["tokens"], data["steps"], data["experts"], data["chunk"]) == (5, 7, 10, 1)
    assert [(one["policy"], one["slots"]) for one in data["outcomes"]] == [
        *[("lfru", 2), ("belady", 2)],
        *[("lfru", 5), ("belady", 5)],
    ]
    for one in data["outcomes"]:
        assert one["share"] == one["slots"] / 10 and len(one["layers"]) == 3
        assert one["hit_rate"] == pytest.approx(1 - one["misses"] / data["uses"])
    assert "layers" not in json.loads(call("replay", made, "--json").out)["outcomes"][0]


def test_the_command_refuses(call: Callable[..., Result], made: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no trace")
    for status, arguments, words in (
        (2, [made, "--slots", "11"], "--slots: expected 1 to 10"),
        (2, [made, "--policy", "fifo"], "--policy: expected some of"),
        (2, [made, "--chunk", "0"], "--chunk: expected at least 1"),
        (1, [tmp_path / "text"], "is no routing trace"),
        (1, [tmp_path / "none"], "Cannot read"),
    ):
        found = call("replay", *arguments)
        assert (found.status, found.out) == (status, ""), found.err
        assert words in found.err and "Traceback" not in found.err
