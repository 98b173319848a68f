"""What experts say, as the engine shows it: the oracle's numbers for every family, and no bit changes by it.

Owns: the observer of experts' outputs, in C and in Model.observe. Refuses: what routers say (test_parity.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
import oracle
from colibri import _library
from colibri import _native as native
from colibri.errors import ArgumentError
from fixtures import models
from fixtures.native import Engine, engine
from fixtures.variants import VARIANTS

# One of each family, by what has most of it to say.
MIXTURES = {v.family: name for name, v in VARIANTS.items() if "router_experts" in models.fixture(name)}
Said = dict[tuple[int, int, int], tuple[float, Any]]  # layer, expert, position: weight, output


def watch(run: Engine, rows: int = 512) -> tuple[Said, native.ExpertObserver]:
    """What will have been said, and the observer to give to an evaluation of at most so many rows."""
    said: Said = {}

    def see(found: native.ExpertOutputs) -> None:
        assert list(found.positions) == sorted(found.positions)
        for at, position in enumerate(found.positions.tolist()):
            key = (found.layer, found.expert, position)
            assert key not in said and found.sequences[at] == 0
            said[key] = (float(found.weights[at]), found.outputs[at].copy())

    n_embd = native.info(run.model).n_embd
    return said, native.ExpertObserver(see, np.full((rows, n_embd), np.nan, np.float32))


def read(path: Path, ids: Any, pieces: int = 1, **opening: Any) -> tuple[Said, Any]:
    """What experts say of ids, given in some pieces, and the logits; they are those without a look."""
    with engine(path, **opening) as run:
        said, observer = watch(run, opening.get("chunk", 512))
        parts = np.array_split(np.asarray(ids), pieces)
        logits = np.concatenate([run.feed(part, expert=observer) for part in parts])
        native.rewind(run.context, 0, 0)
        assert np.concatenate([run.feed(part) for part in parts]).tobytes() == logits.tobytes()
    return said, logits


def same(a: Said, b: Said) -> bool:
    return a.keys() == b.keys() and all(a[at][1].tobytes() == b[at][1].tobytes() for at in a)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_say_what_the_oracle_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = MIXTURES[family]
    checkpoint, ids = models.model(name), models.fixture(name)["ids"][:40]
    spoken: dict[str, Any] = {}

    def ffn(model: Any, names: Any, x: Any, scale: Any = 1.0) -> Any:
        spoken[names[2]] = plain(model, names, x, scale)
        return spoken[names[2]]

    plain = oracle.gated_ffn
    monkeypatch.setattr(oracle, "gated_ffn", ffn)
    routings = oracle.forward(checkpoint, ids)[1]
    said, _ = read(models.converted(name, "f32"), ids, chunk=7)
    n = 0
    for routing in routings:
        for expert in range(checkpoint.config.n_experts):
            rows, slots = np.nonzero(routing.experts == expert)
            down = oracle.expert_names(checkpoint.config, routing.layer, expert)[2]
            for at, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
                weight, output = said[routing.layer, expert, row]
                expected = spoken[down][at]
                n += 1
                assert abs(weight - routing.weights[row, slot]) < 1e-5
                if checkpoint.config.on_input:
                    assert np.abs(weight * output - expected).max() < 1e-4
                else:
                    assert np.abs(output - expected).max() < 1e-4
    assert n == len(said) == routings[0].experts.size * len(routings)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("type", ["q8", "q4"])
def test_outputs_are_the_same_bits_however_rows_come(family: str, type: str) -> None:
    """In one chunk, in chunks of 5, one by one, streamed through one slot."""
    name = MIXTURES[family]
    path, ids = models.converted(name, type), models.fixture(name)["ids"][:24]
    whole, logits = read(path, ids)
    for now, other in (
        read(path, ids, chunk=5),
        read(path, ids, pieces=24, threads=1),
        read(path, ids, slots=1, chunk=9),
    ):
        assert same(now, whole) and other.tobytes() == logits.tobytes()
    exact, _ = read(models.converted(name, "f32"), ids)
    keys = [key for key in whole.keys() & exact.keys() if key[0] == min(whole)[0]]  # of the first layer
    found, expected = (np.array([said[key][1] for key in keys]) for said in (whole, exact))
    # what was rounded are weights and activations
    assert np.linalg.norm(found - expected) < {"q8": 0.05, "q4": 0.35}[type] * np.linalg.norm(expected)


def test_an_encoder_shows_its_experts_too() -> None:
    path = Path(__file__).parent.parent / "examples" / "plain_verse" / "plain.colibri"
    seen: dict[int, int] = {}

    def see(found: native.ExpertOutputs) -> None:
        seen[found.layer] = seen.get(found.layer, 0) + len(found.positions)

    with colibri.load(path, context=64) as model:
        source, used = model.prompt_ids("My son, hear the words."), model.config["n_experts_used"]
        with model.observe(expert=see):
            model.logits(model.start_ids(), source="My son, hear the words.")
    assert seen == {1: used * len(source), 3: used * len(model.start_ids())}


def test_the_model_shows_routers_then_experts(model: colibri.Model) -> None:
    order: list[tuple[str, int, int]] = []
    with model.observe(
        routing=lambda view: order.append(("router", view.layer, -1)),
        expert=lambda found: order.append(("expert", found.layer, found.expert)),
    ):
        answer = model.generate("Once upon", max_tokens=8, temperature=0)
        with pytest.raises(ArgumentError, match="observed already"), model.observe():
            pass
    n = len(order)
    assert model.generate("Once upon", max_tokens=8, temperature=0).ids == answer.ids
    assert len(order) == n, "nobody looks any more"
    assert [kind for kind, _, _ in order[:2]] == ["router", "expert"]
    for (_, layer, expert), (kind, other, number) in zip(order, order[1:], strict=False):
        if kind == "expert":
            assert other == layer and number > expert


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("slots", [0, 2])
def test_what_the_observer_raises_leaves_the_sequence_as_it_was(
    make_model: Callable[..., Path], error: BaseException, slots: int
) -> None:
    with engine(make_model(), slots=slots) as run:
        before = run.feed([1, 2, 3])

        def fail(found: native.ExpertOutputs) -> None:
            if found.layer == 1:
                raise error

        outputs = np.empty((512, native.info(run.model).n_embd), np.float32)
        with pytest.raises(type(error)):
            run.feed([4, 5], expert=native.ExpertObserver(fail, outputs))
        assert native.last_error(run.context)[0] == -7
        assert native.position(run.context) == 3
        native.rewind(run.context, 0, 0)
        assert run.feed([1, 2, 3]).tobytes() == before.tobytes()


def test_an_observer_of_experts_without_memory_is_refused(make_model: Callable[..., Path]) -> None:
    ffi, library = _library.load()
    with engine(make_model()) as run:
        callback = ffi.callback("int32_t(void *, const colibri_expert *)", lambda *_: 0)
        ids = np.array([1], np.int32)
        item = ffi.new("colibri_input *", {"n_ids": 1, "ids": native._ids(ids)})
        observer = ffi.new("colibri_observer *", {"expert": callback})
        assert library.colibri_evaluate(run.context, item, 1, observer) < 0
        assert "expected memory for outputs" in native.last_error(run.context)[1]
