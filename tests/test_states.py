"""Sequences of models with recurrent states: what a rewind, a fork, a failure and a full context do to them.

Owns: how many ids are evaluated again (told by progress), that results stay the same bits, what memory the
states take. Refuses: what test_bits.py shows for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
import oracle
from checkpoints import lfm2
from colibri import _native as native
from colibri.convert import convert
from colibri.errors import CancelledError, ContextFullError
from fixtures import models
from fixtures.native import Engine, engine
from test_bits import alone, ids_of

Case = tuple[str, str]
CASES = [("qwen3_next_odd", "f32"), ("lfm2_moe_odd", "f32")]  # matrices that decay; windows of a convolution
LAYERS = 3  # of both, the first and the last with a state
IDS = ids_of(300)


@pytest.fixture(params=CASES, ids=[name for name, _ in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def feed(run: Engine, ids: Sequence[int], sequence: int = 0) -> tuple[bytes, int]:
    """Logits, and how many ids were evaluated for them."""
    totals: list[int] = []
    logits = run.feed(ids, sequence, progress=lambda _done, total: totals.append(total))
    return logits.tobytes(), totals[-1] // LAYERS


def rows(case: Case, start: int, stop: int | None = None) -> bytes:
    size = 300 * 4  # n_vocab of the makers
    return alone(*case)[start * size : None if stop is None else stop * size]


@pytest.mark.parametrize(
    ("held", "position", "again"),
    [
        (300, 299, 43),  # from 256 on: the last multiple of 128 in front of the last id
        (300, 256, 0),
        (300, 255, 255),  # the state in front of 256 is useless, and a call leaves one behind
        (257, 256, 0),
        (256, 255, 127),  # nothing lies in front of position 256 yet
        (128, 127, 127),
        (60, 59, 59),
        (60, 0, 0),
    ],
)
@pytest.mark.parametrize("chunk", [512, 7])
def test_rewound_from_a_prompt(case: Case, held: int, position: int, again: int, chunk: int) -> None:
    with engine(models.converted(*case), chunk=chunk) as run:
        feed(run, IDS[:held])
        native.rewind(run.context, 0, position)
        assert native.position(run.context) == position
        found, evaluated = feed(run, IDS[position:])
        assert (found, evaluated) == (rows(case, position), 300 - position + again)
        assert native.position(run.context) == 300


def test_ids_one_by_one_leave_no_state_behind(case: Case) -> None:
    """As a conversation does it: back to the end of the prompt, however long the answer was."""
    with engine(models.converted(*case)) as run:
        feed(run, IDS[:140])
        for id in ids_of(140, seed=7):
            feed(run, [id])
        native.rewind(run.context, 0, 139)
        assert feed(run, IDS[139:145]) == (rows(case, 139, 145), 6 + 11)
        for id in IDS[145:]:
            feed(run, [id])
        native.rewind(run.context, 0, 270)
        assert feed(run, IDS[270:]) == (rows(case, 270), 30 + 142)  # from 128: 256 was passed by single ids


def test_the_state_before_the_last_is_kept_too(case: Case) -> None:
    with engine(models.converted(*case), chunk=20) as run:
        feed(run, IDS[:140])
        feed(run, IDS[140:280])
        native.rewind(run.context, 0, 257)
        assert feed(run, IDS[257:270]) == (rows(case, 257, 270), 13 + 1)
        native.rewind(run.context, 0, 255)
        assert feed(run, IDS[255:]) == (rows(case, 255), 45 + 127)


def test_repeated_ids_of_a_batch_do_not_disturb_the_others(case: Case) -> None:
    with engine(models.converted(*case), max_batch=3, chunk=50) as run:
        run.feed_all({0: IDS[:200], 1: IDS[:150], 2: ids_of(90, seed=3)})
        native.rewind(run.context, 0, 180)
        native.rewind(run.context, 2, 40)
        other = ids_of(300, seed=3)
        found = run.feed_all({2: other[40:], 0: IDS[180:], 1: IDS[150:]})
        assert found[0].tobytes() == rows(case, 180) and found[1].tobytes() == rows(case, 150)
        assert found[2].tobytes() == alone(*case, 3)[40 * 1200 :]


def test_a_rewound_sequence_is_forked_with_its_states(case: Case) -> None:
    with engine(models.converted(*case), max_batch=3) as run:
        feed(run, IDS[:290], 2)
        native.rewind(run.context, 2, 280)
        native.fork(run.context, 2, 0)
        feed(run, ids_of(20, seed=5), 2)
        native.rewind(run.context, 2, 0)
        native.fork(run.context, 0, 1)
        for target in (1, 0):
            assert native.position(run.context, target) == 280
            assert feed(run, IDS[280:], target) == (rows(case, 280), 20 + 24)
        native.rewind(run.context, 1, 260)
        assert feed(run, IDS[260:], 1) == (rows(case, 260), 40 + 4)


def test_a_fork_has_the_older_states_too(case: Case) -> None:
    with engine(models.converted(*case), max_batch=2) as run:
        feed(run, IDS[:200], 1)
        feed(run, IDS[200:290], 1)
        native.fork(run.context, 1, 0)
        for position, again in ((270, 14), (250, 122)):
            native.rewind(run.context, 0, position)
            assert feed(run, IDS[position:], 0) == (rows(case, position), 300 - position + again)
        assert feed(run, IDS[290:], 1) == (rows(case, 290), 10)


@pytest.mark.parametrize("held", [0, 1, 100, 200])
def test_a_cancelled_evaluation_is_undone(case: Case, held: int) -> None:
    """In every chunk and layer: states of some layers are then ahead of others."""
    for stop in range(1, 7 * LAYERS, 4):
        with engine(models.converted(*case), chunk=16) as run:
            if held:
                feed(run, IDS[:held])
            seen = 0

            def progress(_done: int, _total: int, stop: int = stop) -> None:
                nonlocal seen
                seen += 1
                if seen == stop:
                    native.cancel(run.context)  # noqa: B023  of this round

            with pytest.raises(CancelledError):
                run.feed(ids_of(100, seed=8), progress=progress)
            assert native.position(run.context) == held
            again = held - held // 128 * 128 if held else 0
            assert feed(run, IDS[held:]) == (rows(case, held), 300 - held + again)


def test_a_cancelled_repetition_leaves_the_position(case: Case) -> None:
    with engine(models.converted(*case), chunk=16) as run:
        feed(run, IDS[:250])
        native.rewind(run.context, 0, 240)
        for _ in range(2):
            native.cancel(run.context)
            with pytest.raises(CancelledError):
                feed(run, [7])
            assert native.position(run.context) == 240
        native.rewind(run.context, 0, 230)
        assert feed(run, IDS[230:]) == (rows(case, 230), 70 + 102)


def test_a_context_that_is_just_large_enough(case: Case) -> None:
    with engine(models.converted(*case), context=300, max_batch=2) as run:
        run.feed_all({0: IDS, 1: IDS})
        native.rewind(run.context, 0, 150)
        with pytest.raises(ContextFullError):
            run.feed(IDS[149:])
        assert feed(run, IDS[150:]) == (rows(case, 150), 300)
        native.rewind(run.context, 0, 299)
        assert feed(run, IDS[299:]) == (rows(case, 299), 44)


def test_the_routing_of_repeated_rows_is_told_again(case: Case) -> None:
    with engine(models.converted(*case)) as run:
        feed(run, IDS[:140])
        native.rewind(run.context, 0, 138)
        positions = run.routing(IDS[138:145])[2].positions
    assert positions.tolist() == list(range(128, 145))


def test_the_python_face_repeats_a_prompt_and_gives_the_same_numbers(case: Case) -> None:
    prompt = IDS[:200]
    with colibri.load(models.converted(*case), threads=1, context=300) as model:
        first = model.generate(prompt, max_tokens=30, temperature=0).ids
        assert model.generate(prompt, max_tokens=30, temperature=0).ids == first
        assert model.generate([*prompt, *first[:10]], max_tokens=20, temperature=0).ids == first[10:]


SIZES = {  # f32 of the states of a layer; keys and values of a position
    "qwen3_next_odd": (9 * 12 * 32 + (2 * 252 + 15) // 16 * 16, 24 + 32),
    "lfm2_moe_odd": (15 * 16, 20 + 32),
}


def test_states_are_a_part_of_the_plan(case: Case) -> None:
    """Three of each sequence, in two layers: [9 heads][12][20 as 32] and two rows of 252 channels, or three
    rows of 60 channels, four of which, as 16 numbers, are an item; one layer of three has keys and values. An
    id takes 4 bytes."""
    state, width = SIZES[case[0]]
    with colibri.load(models.converted(*case), threads=1, context=128) as model:
        plan: Any = model.memory
        assert 0 <= plan.kv_cache - (3 * 2 * 4 * state + 128 * width * 4 + 4 * 128) < 1024


def test_a_convolution_of_one_tap_has_no_state(tmp_path: Path) -> None:
    """Nothing is kept but keys and values, so a rewind repeats nothing; two items of 64 channels."""
    source = lfm2(tmp_path / "hf", hidden=128, taps=1, storage="f32")
    path = convert(source, tmp_path / "m.colibri", "f32").path
    expected, _ = oracle.forward(oracle.load(source), IDS)
    with engine(path, chunk=300) as run:
        whole = run.feed(IDS)
        native.rewind(run.context, 0, 77)
        assert feed(run, IDS[77:]) == (whole[77:].tobytes(), 300 - 77)
    assert np.abs(whole - expected).max() < 1e-4


def test_profiles_show_the_layers_with_a_state(case: Case) -> None:
    with colibri.load(models.converted(*case), threads=2, context=300) as model:
        with colibri.measure(model) as profile:
            model.logits(IDS)
        took = dict(zip(profile.phases, profile.phase_ns[:LAYERS].T > 0, strict=True))
    assert took["delta"].tolist() == [True, False, True]
    assert took["rope"].tolist() == [False, True, False]
    assert took["qkv"].all() and took["attn_out"].all()
