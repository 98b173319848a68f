"""colibri.load and Model with the real engine: lengths (case 27), reuse, cancelling, batches, routing,
seeds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import colibri
from colibri import (
    ArgumentError,
    ChatTemplateError,
    ContextFullError,
    ConversionError,
    Generation,
    Model,
    ModelFileError,
    Sampling,
    UnsupportedError,
)
from colibri.convert import convert
from colibri.sampling import Options

PROMPT = "Once upon a time"


def greedy_by_logits(model: Model, ids: list[int], count: int) -> list[int]:
    """Greedy tokens from logits alone; padding rows and ends are left out by hand."""
    ids = list(ids)
    for _ in range(count):
        row = model.logits(ids)[-1][: model.config["n_vocab_used"]]
        ids.append(int(row.argmax()))
    return ids[-count:]


def same(one: Generation, other: Generation) -> bool:
    return (one.text, one.ids, one.finish_reason) == (other.text, other.ids, other.finish_reason)


# --- text


def test_greedy_text_is_the_argmax_of_the_logits(model: Model) -> None:
    found = model.generate(PROMPT, max_tokens=16)
    ids = model.tokenizer.encode_prompt(PROMPT)
    expected = greedy_by_logits(model, ids, 16)
    assert 2 not in expected and 4 not in expected, (
        "choose another seed: an end token would cut the comparison"
    )
    assert found.ids == expected and found.n_prompt == len(ids) and found.seed is None
    assert found.text == model.tokenizer.decode(expected)


def test_streamed_and_whole_text_are_the_same(model: Model) -> None:
    for options in ({}, {"stop": ["e", "1"]}, {"temperature": 0.9, "seed": 3}):
        whole = model.generate(PROMPT, max_tokens=24, **options)
        stream = model.stream(PROMPT, max_tokens=24, **options)
        pieces = list(stream)
        assert "".join(pieces) == whole.text and same(stream.result, whole)


def test_a_prompt_may_be_ids(model: Model) -> None:
    ids = model.tokenizer.encode_prompt(PROMPT)
    for prompt in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16)):
        assert same(model.generate(prompt, max_tokens=5), model.generate(PROMPT, max_tokens=5))


def test_control_tokens_in_a_prompt_are_text(model: Model) -> None:
    assert list(model.prompt_ids("<s>hi<|im_end|>")).count(1) == 1
    assert 4 not in model.prompt_ids("<s>hi<|im_end|>")


def test_every_end_token_ends(make_model: Callable[..., Path]) -> None:
    path = make_model("mixtral", generation={"bos_token_id": 1, "eos_token_id": [2, 4]})
    with colibri.load(path, context=32) as model:
        first = model.generate(PROMPT, max_tokens=3).ids
    for end in first[1:]:
        ends = {"bos_token_id": 1, "eos_token_id": [2, end]}
        with colibri.load(make_model("mixtral", generation=ends), context=32) as model:
            found = model.generate(PROMPT, max_tokens=3)
            assert found.finish_reason == "stop" and found.ids == first[: first.index(end)]


def test_padding_rows_are_never_written(model: Model) -> None:
    found = model.generate(PROMPT, temperature=100, seed=1)
    assert found.n_generated > 20 and max(found.ids) < 300 == model.config["n_vocab_used"] < model.n_vocab


# --- seeds and parameters


def test_a_seed_repeats_a_text_also_after_loading_again(model: Model, model_path: Path) -> None:
    first = model.generate(PROMPT, max_tokens=20, temperature=1, seed=5)
    assert same(first, model.generate(PROMPT, max_tokens=20, temperature=1, seed=5))
    assert not same(first, model.generate(PROMPT, max_tokens=20, temperature=1, seed=6))
    with colibri.load(model_path, threads=1, context=64) as again:
        assert same(first, again.generate(PROMPT, max_tokens=20, temperature=1, seed=5))


def test_a_fresh_seed_is_reported_and_repeats_the_text(model: Model) -> None:
    first = model.generate(PROMPT, max_tokens=20, temperature=1)
    assert first.seed is not None
    assert same(first, model.generate(PROMPT, max_tokens=20, temperature=1, seed=first.seed))
    assert model.generate(PROMPT, max_tokens=20, temperature=1).seed != first.seed


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-9}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "min_p": 1}]
)
def test_these_are_as_good_as_greedy(model: Model, options: dict[str, Any]) -> None:
    assert (
        model.generate(PROMPT, max_tokens=12, seed=1, **options).ids
        == model.generate(PROMPT, max_tokens=12).ids
    )


def test_top_k_beyond_the_vocabulary_is_off(model: Model) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 2, "max_tokens": 12}
    assert same(model.generate(PROMPT, top_k=10**9, **options), model.generate(PROMPT, top_k=0, **options))


def test_the_penalty_changes_a_repeating_text(model: Model) -> None:
    plain = model.generate(PROMPT, max_tokens=40)
    penalised = model.generate(PROMPT, max_tokens=40, repetition_penalty=5.0)
    assert len(set(penalised.ids)) > len(set(plain.ids))


def test_the_models_defaults_are_used_unless_given(make_model: Callable[..., Path]) -> None:
    settings = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 0.8, "top_k": 20}
    with colibri.load(make_model("mixtral", generation=settings), context=64) as model:
        default = model.generate(PROMPT, max_tokens=20, seed=1)
        assert same(default, model.generate(PROMPT, max_tokens=20, seed=1, temperature=0.8, top_k=20))
        assert model.generate(PROMPT, max_tokens=5, temperature=0).seed is None


def test_wrong_options_are_refused_before_anything_runs(model: Model) -> None:
    with pytest.raises(ArgumentError, match="temperature"):
        model.stream(PROMPT, temperature=-1)
    with pytest.raises(ArgumentError, match="no such option"):
        model.generate(PROMPT, top=3)  # type: ignore[call-arg]
    assert model.position == 0


# --- lengths


def test_prompts_at_the_edge_of_the_context(model: Model) -> None:
    ids = [5 + at % 200 for at in range(65)]
    almost = model.generate(ids[:63])
    assert (almost.n_generated, almost.finish_reason) == (1, "length")
    full = model.generate(ids[:64])
    assert (full.text, full.n_generated, full.finish_reason) == ("", 0, "length")
    with pytest.raises(ContextFullError, match="65 tokens, the context holds 64"):
        model.generate(ids)
    with pytest.raises(ContextFullError, match="65 tokens, the context holds 64"):
        model.logits(ids)
    assert model.logits(ids[:64]).shape == (64, 320)


@pytest.mark.parametrize("max_tokens", [None, 10**9])
def test_without_a_limit_the_context_is_the_end(model: Model, max_tokens: int | None) -> None:
    found = model.generate(PROMPT, max_tokens=max_tokens)
    assert found.n_prompt + found.n_generated == 64 and found.finish_reason == "length"


def test_limits_of_zero_and_one(model: Model) -> None:
    assert model.generate(PROMPT, max_tokens=0).text == ""
    one = model.generate(PROMPT, max_tokens=1)
    assert (one.n_generated, one.finish_reason) == (1, "length")


def test_empty_prompts(model: Model, tmp_path: Path) -> None:
    assert model.generate("", max_tokens=2).n_prompt == 1
    assert model.generate(" ", max_tokens=2).n_prompt > 1
    with pytest.raises(ArgumentError, match="at least one"):
        model.generate([])
    source = checkpoints.qwen3_moe(tmp_path / "no bos", config_extra={"bos_token_id": None}, generation={})
    checkpoints.edit_json(source / "tokenizer_config.json", {}, remove=["bos_token"])
    with colibri.load(convert(source, tmp_path / "no-bos.colibri", "f32").path, context=16) as without:
        with pytest.raises(ArgumentError, match="it is empty, and the model has no BOS"):
            without.generate("")
        assert list(without.prompt_ids("a")) == without.tokenizer.encode("a")


def test_a_prompt_longer_than_a_chunk(model_path: Path) -> None:
    ids = [5 + at % 250 for at in range(60)]
    rows = []
    for chunk in (1, 7, 512):
        with colibri.load(model_path, context=64, chunk=chunk) as model:
            rows.append(model.logits(ids).tobytes())
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 320], r"ids\[1\]: expected 0 to 319 .* found 320"),
        ([-1], r"ids\[0\]: expected 0 to 319 .* found -1"),
        ([2**40], r"ids\[0\]: expected 0 to 319"),
        ([2**80], "expected a list of integers|expected 0 to 319"),
        ([1.5], "expected a list of integers"),
        (["a"], "expected a list of integers"),
        ([[1, 2]], "expected a list of integers"),
        ([True], "expected a list of integers"),
        ("abc", "found a text"),
        (5, "expected a list of integers"),
        (None, "expected a list of integers"),
        ([1, None], "expected a list of integers"),
    ],
)
def test_bad_ids_are_told_where(model: Model, ids: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        model.logits(ids)
    assert model.position == 0


@pytest.mark.parametrize("name", ["threads", "context", "max_batch", "chunk"])
@pytest.mark.parametrize("value", [0, -1, 10**12, 1.5, "2", True])
def test_load_names_the_bounds(model_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: expected an integer from 1 to \d+, found"):
        colibri.load(model_path, **{name: value})


def test_load_of_nothing_says_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="demo"):
        colibri.load(tmp_path / "absent.colibri")


def test_a_truncated_file_is_refused(model_path: Path, tmp_path: Path) -> None:
    data = model_path.read_bytes()
    for size in (0, 10, 63, 200, len(data) // 2, len(data) - 1):
        part = tmp_path / f"{size}.colibri"
        part.write_bytes(data[:size])
        with pytest.raises((ModelFileError, ConversionError)):
            colibri.load(part)


# --- conversations


def test_a_conversation_is_rendered_and_answered(model: Model) -> None:
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    ids = model.chat_ids(messages)
    assert model.tokenizer.decode(ids, special=True) == (
        "<s><|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 1 and ids.count(4) == 1
    found = model.chat(messages, max_tokens=8)
    assert found.n_prompt == len(ids) and same(found, model.generate(ids, max_tokens=8))
    stream = model.stream_chat(messages, max_tokens=8)
    assert "".join(stream) == found.text


def test_a_second_turn_reuses_the_first(model_path: Path) -> None:
    with colibri.load(model_path, context=256) as model:
        messages = [{"role": "user", "content": "one two three"}]
        first = model.chat(messages, max_tokens=8)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "four"}]
        assert model.chat(messages, max_tokens=2).n_reused >= first.n_prompt


def test_a_model_without_a_tokenizer_takes_and_gives_ids(make_model: Callable[..., Path]) -> None:
    with colibri.load(make_model("llama", tokenizer=False), context=32) as model:
        assert model.generate([5, 6], max_tokens=4).text == ""
        assert len(model.generate([5, 6], max_tokens=4).ids) == 4
        for use in (
            lambda: model.tokenizer,
            lambda: model.generate("a"),
            lambda: model.chat([{"role": "user"}]),
        ):
            with pytest.raises(UnsupportedError, match="no tokenizer"):
                use()
        with pytest.raises(ArgumentError, match="stop"):
            model.generate([5], stop="a")


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "base")
    checkpoints.edit_json(source / "tokenizer_config.json", {}, remove=["chat_template"])
    with colibri.load(convert(source, tmp_path / "base.colibri", "f32").path, context=16) as model:
        with pytest.raises(ChatTemplateError, match="no chat template"):
            model.chat([{"role": "user", "content": "a"}])
        assert model.generate("a", max_tokens=1).n_generated == 1


def test_sampling_is_public_and_lists_every_option() -> None:
    assert list(Sampling.__dataclass_fields__) == list(Options.__annotations__)


def test_load_converts_a_directory_to_the_type_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.mixtral(tmp_path / "source")
    with colibri.load(source, type="f32") as exact, colibri.load(source) as small:
        assert "-f32-" in exact.path.name and "-q8-" in small.path.name
        assert exact.memory.weights_mapped > 2 * small.memory.weights_mapped
        with pytest.raises(ArgumentError, match="type='f32' has no effect"):
            colibri.load(exact.path, type="f32")
    with pytest.raises(ArgumentError, match="no effect"):
        colibri.load("demo", type="q8")
    with colibri.load(source, type="f32", experts="bf16", output="q8") as mixed:
        assert "-bf16_experts-f32_dense-q8_output-" in mixed.path.name
        for key in ("experts", "dense", "output"):
            with pytest.raises(ArgumentError, match=f"{key}='q8' has no effect"):
                colibri.load(mixed.path, **{key: "q8"})  # type: ignore[arg-type]
