"""Many texts at the same time: what each becomes does not depend on the others, what they share is read once,
and whoever leaves frees his place."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import AsyncEngine, Generation, Model
from colibri.errors import ArgumentError, CancelledError, ColibriError, ContextFullError, QueueFullError

PROMPTS = [
    "Once upon a time",
    "The dog",
    "One day, a girl named Lily went to the park. She saw a big red ball. The ball was",
    "def main():",
    "1 + 1 =",
    "Once upon a time, in a quiet valley, there lived a",
    "It was a very hot day and",
    "A",
]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with colibri.load("demo", max_batch=4, context=256, threads=2, memory="4GiB") as opened:
        yield opened


@pytest.fixture
def engine(model: Model) -> Iterator[AsyncEngine]:
    found = AsyncEngine(model, prefill_rows=7)
    yield found
    found.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(bounded())


GREEDY: dict[str, Any] = {"temperature": 0}  # the demo has a temperature of its own


def core(found: Generation) -> tuple[object, ...]:
    return found.text, found.ids, found.finish_reason, found.n_prompt, found.logprobs, found.seed


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 24, **GREEDY},
    {"max_tokens": 24, "temperature": 0.9, "seed": 5, "top_k": 40, "logprobs": 3},
    {"max_tokens": 24, "temperature": 1.0, "seed": 6, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"max_tokens": 24, **GREEDY, "repetition_penalty": 1.3, "stop": ["the", "."]},
]


def test_neighbours_change_nothing(model: Model, engine: AsyncEngine) -> None:
    """Case 30."""
    alone = [core(model.generate(p, **o)) for p in PROMPTS for o in OPTIONS]

    async def together() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(p, **o) for p in PROMPTS for o in OPTIONS))

    assert [core(found) for found in run(together())] == alone


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_pieces_of_prompts_change_nothing(model: Model, rows: int) -> None:
    expected = [core(model.generate(p, max_tokens=12, **GREEDY)) for p in PROMPTS]
    engine = AsyncEngine(model, prefill_rows=rows)

    async def together() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(p, max_tokens=12, **GREEDY) for p in PROMPTS))

    try:
        assert [core(found) for found in run(together())] == expected
    finally:
        engine.close()


def test_a_stream_gives_what_generate_gives(model: Model, engine: AsyncEngine) -> None:
    async def read() -> tuple[list[str], Generation]:
        stream = engine.stream("Once upon a time", max_tokens=20, **GREEDY)
        pieces = [piece async for piece in stream]
        return pieces, stream.result

    pieces, result = run(read())
    assert len(pieces) > 5 and "".join(pieces) == result.text
    assert core(result) == core(model.generate("Once upon a time", max_tokens=20, **GREEDY))


def test_a_beginning_in_common_is_read_once(model: Model) -> None:
    common = "One day, a girl named Lily went to the park. She saw a big red ball and a small dog. " * 3
    engine = AsyncEngine(model)

    async def together() -> list[Generation]:
        ends = ["The ball", "The dog", "Lily", "Her"]
        return await asyncio.gather(*(engine.generate(common + end, max_tokens=2, **GREEDY) for end in ends))

    model._sequences.forget()
    before = model._sequences.rows
    try:
        found = run(together())
    finally:
        engine.close()
    n = len(model.tokenizer.encode(common))
    assert model._sequences.rows - before < n + 40, "the beginning was evaluated more than once"
    assert sorted(one.n_reused for one in found)[1] >= n - 2
    for one, end in zip(found, ["The ball", "The dog", "Lily", "Her"], strict=True):
        model._sequences.forget()
        assert core(model.generate(common + end, max_tokens=2, **GREEDY)) == core(one)


def test_who_leaves_frees_his_place(model: Model, engine: AsyncEngine) -> None:
    """Case 26: after a few tokens, and while waiting."""

    async def leave() -> None:
        streams = [engine.stream(p, max_tokens=200, temperature=1, seed=1) for p in PROMPTS]
        await streams[0].__anext__()
        for stream in streams:
            await stream.aclose()
        began = time.monotonic()
        await engine.drain()
        assert time.monotonic() - began < 5
        assert (await engine.generate("The dog", max_tokens=3, **GREEDY)).n_generated == 3
        await engine.drain()

    run(leave())
    assert engine.load()[:3] == (0, 0, 0)
    assert not model._sequences._taken


def test_a_task_that_is_cancelled_ends_its_work(engine: AsyncEngine) -> None:
    async def leave() -> None:
        task = asyncio.create_task(engine.generate([5] * 10, max_tokens=240, **GREEDY))
        while not engine.load().running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.drain()

    run(leave())


def test_a_stream_that_nobody_holds_ends(engine: AsyncEngine) -> None:
    async def leave() -> None:
        engine.stream("Once", max_tokens=240, **GREEDY)
        await engine.drain()

    run(leave())


def test_a_long_prompt_is_left_within_a_step(engine: AsyncEngine, model: Model) -> None:
    """All that an evaluation is for have left: it ends between two layers."""

    async def leave() -> None:
        stream = engine.stream([5] * 250, max_tokens=2, **GREEDY)
        await asyncio.sleep(0)
        await stream.aclose()
        await engine.drain()

    run(leave())
    assert model.generate("The dog", max_tokens=2, **GREEDY).n_generated == 2


def test_faults_reach_the_one_who_made_them(model: Model, engine: AsyncEngine) -> None:
    async def together() -> list[Any]:
        work = [
            engine.generate("The dog", max_tokens=5, **GREEDY),
            engine.generate(
                "Once", max_tokens=5, **GREEDY, logit_bias=dict.fromkeys(range(model.n_vocab), -100)
            ),
            engine.generate("It was", max_tokens=5, **GREEDY),
        ]
        return await asyncio.gather(*work, return_exceptions=True)

    first, wrong, last = run(together())
    assert core(first) == core(model.generate("The dog", max_tokens=5, **GREEDY))
    assert isinstance(wrong, ColibriError) and "masked" in str(wrong)
    assert core(last) == core(model.generate("It was", max_tokens=5, **GREEDY))
    with pytest.raises(ContextFullError):
        run(engine.generate([5] * 300))
    with pytest.raises(ArgumentError, match="top_p"):
        run(engine.generate("a", top_p=3.0))


def test_an_evaluation_that_fails_fails_only_what_caused_it(
    model: Model, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = model._sequences.advance

    def advance(inputs: Any, ids: Any, began: int) -> None:
        if any(len(whole) == 9 and whole[0] == 77 for whole in ids):
            raise colibri.NumericError("a logit is NaN")
        real(inputs, ids, began)

    monkeypatch.setattr(model._sequences, "advance", advance)

    async def together() -> list[Any]:
        work = [
            engine.generate([77] * 6, max_tokens=9, **GREEDY),
            engine.generate("The dog", max_tokens=12, **GREEDY),
        ]
        return await asyncio.gather(*work, return_exceptions=True)

    wrong, right = run(together())
    assert isinstance(wrong, colibri.NumericError)
    monkeypatch.undo()
    assert core(right) == core(model.generate("The dog", max_tokens=12, **GREEDY))


def test_a_full_queue_says_so(model: Model) -> None:
    engine = AsyncEngine(model, max_waiting=1)

    async def fill() -> None:
        streams = []
        with pytest.raises(QueueFullError, match="max_waiting"):
            for _ in range(20):
                streams.append(engine.stream("Once", max_tokens=200, **GREEDY))
        for stream in streams:
            await stream.aclose()

    try:
        run(fill())
    finally:
        engine.close()


def test_clients_take_turns(model: Model) -> None:
    """One who sends many requests does not keep another waiting behind all of them."""
    engine = AsyncEngine(model)
    order: list[str] = []

    async def ask(client: str) -> None:
        await engine.generate("Once upon a time", max_tokens=8, client=client, **GREEDY)
        order.append(client)

    async def together() -> None:
        await asyncio.gather(*(ask("many") for _ in range(24)), ask("one"))

    try:
        run(together())
    finally:
        engine.close()
    assert order.index("one") < 12, order


def test_closing_ends_everything(model: Model) -> None:
    engine = AsyncEngine(model)

    async def close() -> list[Any]:
        work = [asyncio.create_task(engine.generate(p, max_tokens=200, **GREEDY)) for p in PROMPTS]
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        return await asyncio.gather(*work, return_exceptions=True)

    found = run(close())
    assert all(isinstance(one, CancelledError | Generation) for one in found), found
    assert any(isinstance(one, CancelledError) for one in found)
    with pytest.raises(CancelledError, match="closed"):
        run(engine.generate("a"))
    assert model.generate("The dog", max_tokens=2, **GREEDY).n_generated == 2


def test_the_model_may_be_used_beside_it(model: Model, engine: AsyncEngine) -> None:
    expected = core(model.generate("A", max_tokens=10, **GREEDY))
    found: list[tuple[object, ...]] = []

    def beside() -> None:
        for _ in range(5):
            try:
                found.append(core(model.generate("A", max_tokens=10, **GREEDY)))
            except ArgumentError as error:
                assert "AsyncEngine" in str(error)

    async def together() -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        await asyncio.gather(*(engine.generate(p, max_tokens=30, **GREEDY) for p in PROMPTS[:3]))
        while thread.is_alive():
            await asyncio.sleep(0.01)

    run(together())
    assert found and set(map(str, found)) == {str(expected)}


def test_two_event_loops_share_an_engine(engine: AsyncEngine) -> None:
    results: list[Generation] = []
    threads = [
        threading.Thread(target=lambda: results.append(run(engine.generate("Once", max_tokens=9, **GREEDY))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(core(found)) for found in results}) == 1 and len(results) == 3


@pytest.mark.parametrize("wrong", [{"max_waiting": 0}, {"prefill_rows": 0}, {"prefill_rows": 5000}])
def test_wrong_limits(model: Model, wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        AsyncEngine(model, **wrong)


def test_log_probabilities_are_those_of_the_softmax(model: Model) -> None:
    """Case 22."""
    found = model.generate("Once upon a time", max_tokens=12, temperature=0.7, seed=3, logprobs=5)
    ids = model.tokenizer.encode_prompt("Once upon a time")
    logits = model.logits([*ids, *found.ids])[len(ids) - 1 :].astype(np.float64)
    assert found.logprobs is not None and len(found.logprobs) == len(found.ids)
    for row, id, one in zip(logits, found.ids, found.logprobs, strict=False):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert one.id == id and abs(one.logprob - expected[id]) < 1e-9 and one.logprob <= 0
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert [at for at, _ in one.top] == list(np.argsort(-expected, kind="stable")[:5])
        assert dict(one.top).get(id, one.logprob) == one.logprob


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_log_probabilities_of_a_prompt(model: Model, engine: AsyncEngine, max_tokens: int) -> None:
    text = "One day, a girl named Lily went to the park. She saw a big red ball. " * 3
    options: dict[str, Any] = {"max_tokens": max_tokens, **GREEDY, "prompt_logprobs": 2}
    found = model.generate(text, **options)

    async def together() -> list[Generation]:
        work = [engine.generate(text, **options), engine.generate("The dog", max_tokens=9, **GREEDY)]
        return await asyncio.gather(*work, engine.generate(text, **options))

    beside, other, again = run(together())
    assert found == found.__class__(**{**_fields(beside), **_times(found)}) and again.ids == found.ids
    assert core(other) == core(model.generate("The dog", max_tokens=9, **GREEDY))
    ids = model.tokenizer.encode_prompt(text)
    logits = model.logits(ids).astype(np.float64)
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(ids) - 1
    for row, id, one in zip(logits, ids[1:], found.prompt_logprobs, strict=False):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert one.id == id and abs(one.logprob - expected[id]) < 1e-9 and len(one.top) == 2
    assert found.ids == model.generate(text, max_tokens=max_tokens, **GREEDY).ids


def _fields(found: Generation) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Generation.__slots__}


def _times(found: Generation) -> dict[str, Any]:
    return {name: getattr(found, name) for name in ("prefill_seconds", "decode_seconds")}


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"logit_bias": {11: -100.0}}, lambda ids: 11 not in ids),
        ({"logit_bias": {11: 100.0}}, lambda ids: set(ids) == {11}),
        ({"frequency_penalty": 2.0, "logit_bias": {11: 30.0}}, lambda ids: set(ids) != {11}),
    ],
)
def test_biases_and_penalties(
    model: Model, options: dict[str, Any], check: Callable[[list[int]], bool]
) -> None:
    assert check(model.generate("Once upon a time", max_tokens=40, **GREEDY, **options).ids)
