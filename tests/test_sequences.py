"""What the sequences of a Model hold and how work on them ends: reuse, batches, routing, cancelling,
threads."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri import ArgumentError, CancelledError, Generation, Model
from colibri import _native as native

PROMPT = "Once upon a time"


def same(one: Generation, other: Generation) -> bool:
    return (one.text, one.ids, one.finish_reason) == (other.text, other.ids, other.finish_reason)


# --- reuse


def test_a_common_beginning_is_evaluated_once(model: Model, model_path: Path) -> None:
    first = model.generate(PROMPT + " there", max_tokens=8)
    second = model.generate(PROMPT + " was", max_tokens=8)
    assert first.n_reused == 0 < second.n_reused < second.n_prompt
    with colibri.load(model_path, context=64) as fresh:
        assert same(fresh.generate(PROMPT + " was", max_tokens=8), second)
    longer = model.generate([*model.prompt_ids(PROMPT + " was"), *second.ids], max_tokens=2)
    assert longer.n_reused == longer.n_prompt - 1


def test_streams_may_alternate(model: Model) -> None:
    alone = [model.generate(prompt, max_tokens=6).text for prompt in ("one", "two three")]
    streams = [model.stream(prompt, max_tokens=6) for prompt in ("one", "two three")]
    texts = ["", ""]
    left = [0, 1]
    while left:
        for at in list(left):
            piece = next(streams[at], None)
            if piece is None:
                left.remove(at)
            else:
                texts[at] += piece
    assert texts == alone


def test_conversations_keep_their_sequences(model_path: Path) -> None:
    with colibri.load(model_path, context=64, max_batch=2) as model:
        for prompt in ("A B C D", "one two"):
            assert model.generate(prompt, max_tokens=2).n_reused == 0
        for prompt in ("A B C D E", "one two three"):
            found = model.generate(prompt, max_tokens=2)
            assert found.n_reused > 3, "each prompt finds the sequence that begins like it"


# --- numbers


def test_a_batch_has_the_bits_of_each_alone(model_path: Path) -> None:
    sequences = [[1, 10, 20, 30], [7], list(range(5, 40)), [9, 9]]
    with colibri.load(model_path, context=64, max_batch=4, threads=3) as model:
        together = model.batch_logits(sequences)
        for ids, rows in zip(sequences, together, strict=True):
            assert rows.shape == (len(ids), 320) and rows.dtype == np.float32
            assert rows.tobytes() == model.logits(ids).tobytes()
        with pytest.raises(ArgumentError, match="1 to 4 .*found 5"):
            model.batch_logits([[1]] * 5)


def test_routing_has_every_id_of_every_mixture_layer(make_model: Callable[..., Path]) -> None:
    path = make_model("qwen3_moe", n_layers=4, mlp_only_layers=[1], n_experts=8, n_experts_used=3)
    ids = list(range(10, 40))
    for chunk in (7, 512):
        with colibri.load(path, context=64, chunk=chunk) as model:
            routing = model.routing(ids)
            assert list(routing) == [0, 2, 3] == list(model.router_logits(ids))
            assert model.config["n_experts"] == [8, 0, 8, 8]
            for layer in routing.values():
                order = np.argsort(-layer.logits, axis=1, kind="stable")[:, :3]
                assert np.array_equal(order, layer.experts)
                exact = np.exp(layer.logits - layer.logits.max(1, keepdims=True))
                chosen = np.take_along_axis(exact, order, 1)
                assert np.allclose(layer.weights, chosen / chosen.sum(1, keepdims=True), atol=1e-5)


def test_the_ledger_adds_up(model: Model, model_path: Path) -> None:
    memory = model.memory
    parts = memory.expert_cache + memory.kv_cache + memory.activations + memory.sampling
    parts += memory.threads + memory.control
    assert memory.context_bytes == parts and memory.weights_mapped == model_path.stat().st_size
    assert memory.total_bytes == memory.process + memory.weights_mapped + memory.model + parts


# --- cancelling and life


def cancel_soon(model: Model) -> threading.Thread:
    def cancel() -> None:
        time.sleep(0.05)
        model.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    return thread


@pytest.mark.parametrize("n_prompt", [1, 100_000])
def test_cancel_from_another_thread_ends_a_generation(make_model: Callable[..., Path], n_prompt: int) -> None:
    """While tokens are written, and while a long prompt is evaluated. The only end token is a padding row."""
    path = make_model("mixtral", extra_rows=20, only_end=319)
    with colibri.load(path, context=200_000) as model:
        expected = model.generate(PROMPT, max_tokens=5)
        thread = cancel_soon(model)
        began = time.monotonic()
        with pytest.raises(CancelledError):
            model.generate([7] * n_prompt)
        assert time.monotonic() - began < 5
        thread.join()
        assert same(model.generate(PROMPT, max_tokens=5), expected), "the model works on after a cancel"


def test_cancel_with_nothing_running_changes_nothing(model: Model) -> None:
    expected = model.generate(PROMPT, max_tokens=5)
    for _ in range(3):
        model.cancel()
        assert same(model.generate(PROMPT, max_tokens=5), expected)


def test_a_cancel_that_came_too_late_harms_nothing(model: Model) -> None:
    """The library's flag may be left over from work that ended at the same moment."""
    expected = model.generate(PROMPT, max_tokens=5)
    native.cancel(model._sequences.context)
    assert same(model.generate(PROMPT, max_tokens=5), expected)


def test_cancel_ends_a_waiting_stream(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=20)
    next(stream)
    model.cancel()
    with pytest.raises(CancelledError):
        next(stream)


def test_an_exception_in_progress_ends_the_evaluation_and_comes_out(model: Model) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        model.generate(PROMPT, max_tokens=5, progress=progress)
    assert len(seen) == 1 and model.position == 0
    model.generate(PROMPT, max_tokens=5)


def test_progress_counts_to_its_end(model: Model) -> None:
    seen: list[tuple[int, int]] = []
    model.generate(PROMPT, max_tokens=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_threads_take_turns(model: Model) -> None:
    prompts = [f"{word} upon" for word in ("Once", "The", "She", "A")]
    expected = [model.generate(prompt, max_tokens=10).text for prompt in prompts]
    found = [""] * len(prompts)

    def run(at: int) -> None:
        found[at] = model.generate(prompts[at], max_tokens=10).text

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_closed_model_says_so(model_path: Path) -> None:
    with colibri.load(model_path, context=16) as model:
        stream = model.stream("A", max_tokens=3)
        next(stream)
    for use in (
        lambda: model.generate("A"),
        lambda: model.stream("A"),
        lambda: model.logits([1]),
        lambda: model.position,
        lambda: next(stream),
    ):
        with pytest.raises(ArgumentError, match="closed"):
            use()
    model.close()
    model.cancel()
    assert "closed" in repr(model)
