"""Sequences of models with recurrent states: what a rewind, a fork, a failure and a full context do to them.

Owns: how many ids are evaluated again (told by progress), that results stay the same bits, what memory the
states take. Refuses: what test_bits.py shows for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import colibri
from colibri import _native as native
from colibri.errors import CancelledError, ContextFullError
from fixtures import models
from fixtures.native import Engine, engine
from test_bits import alone, ids_of

NAME, TYPE, LAYERS = "qwen3_next_odd", "f32", 3
IDS = ids_of(300)
CASE = (NAME, TYPE)


def feed(run: Engine, ids: Sequence[int], sequence: int = 0) -> tuple[bytes, int]:
    """Logits, and how many ids were evaluated for them."""
    totals: list[int] = []
    logits = run.feed(ids, sequence, progress=lambda _done, total: totals.append(total))
    return logits.tobytes(), totals[-1] // LAYERS


def rows(start: int, stop: int | None = None) -> bytes:
    size = 300 * 4  # n_vocab of the makers
    return alone(*CASE)[start * size : None if stop is None else stop * size]


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
def test_rewound_from_a_prompt(held: int, position: int, again: int, chunk: int) -> None:
    with engine(models.converted(*CASE), chunk=chunk) as run:
        feed(run, IDS[:held])
        native.rewind(run.context, 0, position)
        assert native.position(run.context) == position
        found, evaluated = feed(run, IDS[position:])
        assert (found, evaluated) == (rows(position), 300 - position + again)
        assert native.position(run.context) == 300


def test_ids_one_by_one_leave_no_state_behind() -> None:
    """As a conversation does it: back to the end of the prompt, however long the answer was."""
    with engine(models.converted(*CASE)) as run:
        feed(run, IDS[:140])
        for id in ids_of(140, seed=7):
            feed(run, [id])
        native.rewind(run.context, 0, 139)
        assert feed(run, IDS[139:145]) == (rows(139, 145), 6 + 11)
        for id in IDS[145:]:
            feed(run, [id])
        native.rewind(run.context, 0, 270)
        assert feed(run, IDS[270:]) == (rows(270), 30 + 142)  # from 128: 256 was passed by single ids


def test_the_state_before_the_last_is_kept_too() -> None:
    with engine(models.converted(*CASE), chunk=20) as run:
        feed(run, IDS[:140])
        feed(run, IDS[140:280])
        native.rewind(run.context, 0, 257)
        assert feed(run, IDS[257:270]) == (rows(257, 270), 13 + 1)
        native.rewind(run.context, 0, 255)
        assert feed(run, IDS[255:]) == (rows(255), 45 + 127)


def test_repeated_ids_of_a_batch_do_not_disturb_the_others() -> None:
    with engine(models.converted(*CASE), max_batch=3, chunk=50) as run:
        run.feed_all({0: IDS[:200], 1: IDS[:150], 2: ids_of(90, seed=3)})
        native.rewind(run.context, 0, 180)
        native.rewind(run.context, 2, 40)
        other = ids_of(300, seed=3)
        found = run.feed_all({2: other[40:], 0: IDS[180:], 1: IDS[150:]})
        assert found[0].tobytes() == rows(180) and found[1].tobytes() == rows(150)
        assert found[2].tobytes() == alone(*CASE, 3)[40 * 1200 :]


def test_a_rewound_sequence_is_forked_with_its_states() -> None:
    with engine(models.converted(*CASE), max_batch=3) as run:
        feed(run, IDS[:290], 2)
        native.rewind(run.context, 2, 280)
        native.fork(run.context, 2, 0)
        feed(run, ids_of(20, seed=5), 2)
        native.rewind(run.context, 2, 0)
        native.fork(run.context, 0, 1)
        for target in (1, 0):
            assert native.position(run.context, target) == 280
            assert feed(run, IDS[280:], target) == (rows(280), 20 + 24)
        native.rewind(run.context, 1, 260)
        assert feed(run, IDS[260:], 1) == (rows(260), 40 + 4)


def test_a_fork_has_the_older_states_too() -> None:
    with engine(models.converted(*CASE), max_batch=2) as run:
        feed(run, IDS[:200], 1)
        feed(run, IDS[200:290], 1)
        native.fork(run.context, 1, 0)
        for position, again in ((270, 14), (250, 122)):
            native.rewind(run.context, 0, position)
            assert feed(run, IDS[position:], 0) == (rows(position), 300 - position + again)
        assert feed(run, IDS[290:], 1) == (rows(290), 10)


@pytest.mark.parametrize("held", [0, 1, 100, 200])
def test_a_cancelled_evaluation_is_undone(held: int) -> None:
    """In every chunk and layer: states of some layers are then ahead of others."""
    for stop in range(1, 7 * LAYERS, 4):
        with engine(models.converted(*CASE), chunk=16) as run:
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
            assert feed(run, IDS[held:]) == (rows(held), 300 - held + again)


def test_a_cancelled_repetition_leaves_the_position() -> None:
    with engine(models.converted(*CASE), chunk=16) as run:
        feed(run, IDS[:250])
        native.rewind(run.context, 0, 240)
        for _ in range(2):
            native.cancel(run.context)
            with pytest.raises(CancelledError):
                feed(run, [7])
            assert native.position(run.context) == 240
        native.rewind(run.context, 0, 230)
        assert feed(run, IDS[230:]) == (rows(230), 70 + 102)


def test_a_context_that_is_just_large_enough() -> None:
    with engine(models.converted(*CASE), context=300, max_batch=2) as run:
        run.feed_all({0: IDS, 1: IDS})
        native.rewind(run.context, 0, 150)
        with pytest.raises(ContextFullError):
            run.feed(IDS[149:])
        assert feed(run, IDS[150:]) == (rows(150), 300)
        native.rewind(run.context, 0, 299)
        assert feed(run, IDS[299:]) == (rows(299), 44)


def test_the_routing_of_repeated_rows_is_told_again() -> None:
    with engine(models.converted(*CASE)) as run:
        feed(run, IDS[:140])
        native.rewind(run.context, 0, 138)
        positions = run.routing(IDS[138:145])[0].positions
    assert positions.tolist() == list(range(128, 145))


def test_the_python_face_repeats_a_prompt_and_gives_the_same_numbers() -> None:
    prompt = IDS[:200]
    with colibri.load(models.converted(*CASE), threads=1, context=300) as model:
        first = model.generate(prompt, max_tokens=30, temperature=0).ids
        assert model.generate(prompt, max_tokens=30, temperature=0).ids == first
        assert model.generate([*prompt, *first[:10]], max_tokens=20, temperature=0).ids == first[10:]


def test_states_are_a_part_of_the_plan() -> None:
    """Three of each sequence: [9 heads][12][20 as 32] f32 and two rows of 252 channels, in two layers; one
    layer of three has keys and values. An id takes 4 bytes."""
    state = 2 * 4 * (9 * 12 * 32 + (2 * 252 + 15) // 16 * 16)
    with colibri.load(models.converted(*CASE), threads=1, context=128) as model:
        blocks = 128 * (24 + 32) * 4
        plan: Any = model.memory
        assert 0 <= plan.kv_cache - (3 * state + blocks + 4 * 128) < 1024


def test_profiles_show_the_layers_with_a_state() -> None:
    with colibri.load(models.converted(*CASE), threads=2, context=300) as model:
        with colibri.measure(model) as profile:
            model.logits(IDS)
        took = dict(zip(profile.phases, profile.phase_ns[:LAYERS].T > 0, strict=True))
    assert took["delta"].tolist() == [True, False, True]
    assert took["rope"].tolist() == [False, True, False]
    assert took["qkv"].all() and took["attn_out"].all()
