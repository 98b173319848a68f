"""Streamed experts: the same bytes as mapped ones, whatever the number of slots, the policy, what is read
ahead, and the way in which ids come; what it costs is counted; a file that changes meanwhile is an error,
never other tokens.

Owns: these, for every family with experts. Refuses: how much memory is taken (test_peak.py), which residency
is chosen (test_residency.py), speed (benchmarks/).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import _native as native
from colibri import cache
from colibri.arguments import POLICIES, PREFETCHES
from colibri.convert import convert
from colibri.errors import ColibriError, ModelFileError, ModelIOError
from colibri.format import read_container
from encoder_checkpoints import MAKERS
from fixtures import models
from fixtures.native import engine
from test_bits import CASES, N_IDS, alone, ids_of, pieces

TYPES = ("f32", "bf16", "q8", "q6", "q4")
SLOTS = ("1", "k", "25 %", "50 %", "all")
IDS = list(range(5, 45))


def _streamable() -> list[tuple[str, str]]:
    """Each model of test_bits with experts once, and one of each family that it leaves out; types in turn."""
    names = [name for name, type in CASES if type == "f32"]
    names += ["deepseek_v2", "dots1_odd", "ernie4_5_moe_placed", "minimax_m2_odd"]
    found = [(name, TYPES[at % len(TYPES)]) for at, name in enumerate(names)]
    without = {"llama_llama3", "qwen3_tied", "gemma3_text_odd"}
    return [case for case in found if case[0] not in without] + [("gpt_oss_mxfp4", "q8")]


def slots_of(path: Path, words: str) -> int:
    """Of all layers together."""
    config = read_container(path).config
    n: int = sum(config["n_experts"])
    few: dict[str, int] = {"1": 1, "k": config["n_experts_used"], "25 %": n // 4, "50 %": n // 2, "all": n}
    return max(1, few[words])


# --- bits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("words", SLOTS)
@pytest.mark.parametrize(("name", "type"), _streamable())
def test_slots_and_policies_change_no_bit(name: str, type: str, words: str, policy: str) -> None:
    """A prompt in one chunk, whose experts come in waves; then in small chunks, and id by id."""
    path = models.converted(name, type)
    options = {"slots": slots_of(path, words), "expert_policy": POLICIES[policy]}
    with engine(path, **options) as run:
        assert run.feed(ids_of(N_IDS)).tobytes() == alone(name, type)
    with engine(path, chunk=33, threads=3, lanes=1, prefetch=PREFETCHES[True], **options) as run:
        assert pieces(run, ids_of(N_IDS), [140, 1, 1, 1, 20, 1]) == alone(name, type)


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize(("name", "type"), _streamable())
def test_prefetch_changes_no_bit(name: str, type: str, prefetch: bool | None) -> None:
    """Id by id, through a trial and what follows it; then several sequences at a time, up to more than are
    asked ahead for."""
    path = models.converted(name, type)
    with engine(path, slots=slots_of(path, "25 %"), prefetch=PREFETCHES[prefetch]) as run:
        assert pieces(run, ids_of(N_IDS), [N_IDS - 80, *[1] * 80]) == alone(name, type)
    with engine(path, max_batch=5, slots=slots_of(path, "50 %"), prefetch=PREFETCHES[prefetch]) as run:
        for n in (2, 5):
            found = run.feed_all({s: ids_of(N_IDS)[:1] for s in range(n)})
            assert len({logits.tobytes() for logits in found.values()}) == 1
            assert found[0].tobytes() == alone(name, type)[: found[0].nbytes]
            for s in range(n):
                native.rewind(run.context, s, 0)


@pytest.mark.parametrize("words", SLOTS)
@pytest.mark.parametrize(("name", "type"), _streamable()[::4])
def test_batches_forks_and_rewinds(name: str, type: str, words: str) -> None:
    lengths, first = {1: N_IDS, 0: 131}, {1: 129, 0: 130}
    path = models.converted(name, type)
    with engine(path, max_batch=3, slots=slots_of(path, words), lanes=2) as run:
        texts = {s: ids_of(length, seed=s) for s, length in lengths.items()}
        heads = run.feed_all({s: texts[s][:n] for s, n in first.items()})
        native.fork(run.context, 1, 2)
        tails = run.feed_all({s: texts[s][first[s] :] for s in (0, 1)})
        for s, length in lengths.items():
            assert np.concatenate([heads[s], tails[s]]).tobytes() == alone(name, type, s, length)
        assert run.feed(texts[1][129:], sequence=2).tobytes() == tails[1].tobytes()
        native.rewind(run.context, 1, 7)
        again = run.feed(texts[1][7:], sequence=1)
        assert np.concatenate([heads[1][:7], again]).tobytes() == alone(name, type, 1)


@pytest.mark.parametrize("maker", MAKERS)
def test_encoders(maker: str, tmp_path: Path) -> None:
    path = convert(MAKERS[maker](tmp_path / "hf"), tmp_path / "model.colibri", "q8").path
    source, found = list(range(5, 30)), set()
    for options in [{}, *({"expert_slots": slots_of(path, words), "prefetch": True} for words in SLOTS)]:
        with colibri.load(path, threads=2, **options) as model:  # type: ignore[arg-type]
            found.add(model.logits(IDS[:9], source=source).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [1, 2, 10, 20, 40])
def test_the_demo_writes_the_same(slots: int, policy: str) -> None:
    """Greedy and drawn, in turns, so that a sequence is reused and cut back."""
    sampled: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 5}

    def written(**options: Any) -> list[str]:
        with colibri.load("demo", max_batch=2, **options) as model:
            texts = [model.generate(text, **sampled).text for text in ("Once upon a time", "Once more")]
            texts.append(model.generate("Once upon a", max_tokens=20, temperature=0).text)
            return [*texts, model.logits(IDS).tobytes().hex()]

    assert written(expert_slots=slots, expert_policy=policy, lanes=3, chunk=16) == written()


def test_threads_and_lanes_change_no_bit() -> None:
    path = models.converted("mixtral_bf16", "q8")
    for threads, lanes in ((1, 1), (2, 16), (8, 3)):
        with engine(path, threads=threads, lanes=lanes, slots=2) as run:
            assert run.feed(ids_of(N_IDS)).tobytes() == alone("mixtral_bf16", "q8")


# --- what it costs


def test_costs_are_counted() -> None:
    with colibri.load("demo", expert_slots=40) as model:
        n_layers, used = model.config["n_layers"], model.config["n_experts_used"]
        assert (model.stats.tokens, model.stats.uses, model.stats.hit_rate) == (0, 0, 0)
        assert model.stats.bytes_per_token == 0 == model.stats.wait_seconds
        model.logits(IDS)
        first = model.stats
        assert first.tokens == len(IDS) and len(first.hits) == n_layers
        chosen = [len(np.unique(one.experts)) for one in model.routing(IDS).values()]
        assert first.misses.tolist() == chosen and not first.hits.any(), "each is read once"
        expert = [entry.bytes for entry in read_container(model.path).entries if entry.kind == "expert"]
        assert first.bytes_read.sum() == sum(chosen) * expert[0] and first.wait_ns.all()
        assert first.bytes_per_token == first.bytes_read.sum() / len(IDS)
        again = model.stats.since(first)
        assert again.hits.tolist() == chosen and again.hit_rate == 1 and again.bytes_per_token == 0
        for id in IDS[:3]:
            model.logits([id])
        assert model.stats.since(first).since(again).uses == 3 * n_layers * used
        told = json.loads(json.dumps(model.stats.as_dict()))
        assert told["layers"]["misses"] == model.stats.misses.tolist() and told["tokens"] == 2 * len(IDS) + 3
        assert {**told, "layers": None} == {**model.stats.totals(), "layers": None}
    with colibri.load("demo") as model:
        model.logits(IDS)
        assert (model.stats.tokens, model.stats.uses) == (len(IDS), 0)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_what_is_read_ahead_is_counted(prefetch: bool | None) -> None:
    """The counts of both ways; that a trial is decided by time is for stream_test.c."""
    with colibri.load("demo", expert_slots=4, prefetch=prefetch) as model:
        assert model.stats.prefetch.state == {None: "undecided", True: "on", False: "off"}[prefetch]
        model.logits(IDS)  # more rows than are counted
        for id in [*IDS, *IDS]:
            model.logits([id])
        found = model.stats
        ways = (found.prefetch.off.evaluations, found.prefetch.on.evaluations)
        asked, used = int(found.asked.sum()), int(found.asked_used.sum())
        assert sum(ways) == 2 * len(IDS) and found.prefetch.off.ns + found.prefetch.on.ns > 0
        if prefetch is None:
            assert found.prefetch.state in ("on", "off") and found.prefetch.trials == 1 and min(ways) == 32
            assert min(found.prefetch.off.trial_median_ns, found.prefetch.on.trial_median_ns) > 0
        else:
            assert found.prefetch.trials == 0 and ways[not prefetch] == 0
        if prefetch is not False:
            assert used <= asked and not found.asked[0], "nobody asks for the first layer"
            assert found.asked_rate > 0.3, "a trained router is foreseen better than by chance, 2 of 8"
        else:
            assert asked == used == found.asked_rate == 0
        told = json.loads(json.dumps(found.as_dict()))
        assert told["prefetch"]["asked"] == asked == sum(told["layers"]["asked"])
        assert told["prefetch"]["on"]["evaluations"] == ways[1]
        assert model.stats.since(found).prefetch.on.evaluations == 0
        plan = model.memory
    assert plan.expert_cache >= (4 + 2 * (prefetch is not False)) * plan.slot_bytes


def test_fewer_slots_than_a_token_uses_give_no_hits_with_lru() -> None:
    """The demo's tokens use 2 of 8 experts in 5 layers. One slot less than a layer needs is worst."""
    with colibri.load("demo", expert_slots=8, expert_policy="lru") as model:
        for id in IDS:
            model.logits([id])
        assert model.stats.hits.sum() == 0 and model.stats.misses.sum() == len(IDS) * 10
    with colibri.load("demo", expert_slots=10, expert_policy="lru") as model:
        for id in IDS:
            model.logits([id])
        assert model.stats.hits.sum() > 0


# --- faults


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / "copy.colibri"
    path.write_bytes(cache.resolve("demo").read_bytes())
    return path


def fails_then(copy: Path, damage: Callable[[], None], **options: Any) -> ColibriError:
    """What an evaluation raises after the damage; the sequence is as it was, and the model can be closed."""
    with colibri.load(copy, expert_slots=2, **options) as model:
        before = model.logits(IDS)
        damage()
        with pytest.raises(ColibriError) as caught:
            for _ in range(3):
                model.logits(IDS)
        assert before.any()
        return caught.value


def test_a_file_that_is_cut_while_streamed_is_an_error(copy: Path) -> None:
    experts = [entry for entry in read_container(copy).entries if entry.kind == "expert"]
    error = fails_then(copy, lambda: os.truncate(copy, experts[0].offset + 100))
    assert isinstance(error, ModelIOError | ModelFileError), error


def test_a_file_that_is_rewritten_while_streamed_is_an_error(copy: Path) -> None:
    def rewrite() -> None:
        with copy.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    error = fails_then(copy, rewrite)
    assert isinstance(error, ModelIOError | ModelFileError) and "written to" in str(error), error


def test_a_file_that_is_replaced_is_still_the_old_one(copy: Path, tmp_path: Path) -> None:
    with colibri.load(copy, expert_slots=2) as model:
        before = model.logits(IDS).tobytes()
        (tmp_path / "other").write_bytes(b"nothing")
        os.replace(tmp_path / "other", copy)
        assert model.logits(IDS).tobytes() == before


def test_two_processes_stream_one_file(copy: Path) -> None:
    """At the same time, each into its own slots."""
    code = (
        "import colibri, hashlib, sys\n"
        "with colibri.load(sys.argv[1], expert_slots=6, threads=1, context=128) as model:\n"
        f"    rows = [model.logits({IDS}).tobytes() for _ in range(5)]\n"
        "print(hashlib.sha256(b''.join(rows)).hexdigest())"
    )
    command = [sys.executable, "-c", code, str(copy)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate()[0].strip() for process in running}
    with colibri.load("demo") as model:
        expected = hashlib.sha256(5 * model.logits(IDS).tobytes()).hexdigest()
    assert found == {expected}
