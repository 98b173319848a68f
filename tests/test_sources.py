"""Texts in, texts out for models with an encoder: the Python API and the commands.

Owns: ids around a source, languages, where a target begins, reuse of what was read, stopping, commands that
      must know of encoders. Refuses: numbers (test_encoders.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.analysis import cost
from colibri.convert import convert
from colibri.errors import ArgumentError, ContextFullError, ConversionError, ModelFileError, UnsupportedError
from colibri.format import Writer, read_blobs, read_container
from colibri.sources import source_rules
from encoder_checkpoints import END, MAKERS, VARIANTS
from test_cli import Result
from test_cli import call as call
from test_encoders import checkpoint, converted, fixture

TEXT = "A mixture of experts."
ENDLESS = {"eos_token_id": 319, "decoder_start_token_id": 0}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose only end token is a padding row: it writes until it is stopped."""
    directory = tmp_path_factory.mktemp("endless")
    source = MAKERS["switch_transformers"](
        directory / "hf", seed=6, generation=ENDLESS, config_extra={"eos_token_id": 319}
    )
    return convert(source, directory / "m.colibri", "f32").path


@pytest.fixture
def model(endless: Path) -> Iterator[colibri.Model]:
    with colibri.load(endless, threads=2, context=128, max_batch=2) as opened:
        yield opened


@pytest.fixture
def translator() -> Iterator[colibri.Model]:
    with colibri.load(converted("nllb_untied"), threads=2, context=128) as opened:
        yield opened


def test_a_source_text_has_the_ids_that_its_tokenizer_puts_around_it(
    model: colibri.Model, translator: colibri.Model
) -> None:
    plain = model.tokenizer.encode(TEXT)
    assert model.prompt_ids(TEXT).tolist() == [*plain, END]
    assert translator.prompt_ids(TEXT).tolist() == [300, *plain, END]
    assert translator.prompt_ids(TEXT, "fra_Latn").tolist() == [301, *plain, END]
    assert translator.prompt_ids([7, 8]).tolist() == [7, 8]  # ids stay as they are
    assert model.prompt_ids("").tolist() == [END]


def test_the_target_begins_as_the_checkpoint_says(tmp_path: Path, translator: colibri.Model) -> None:
    """tgt_lang comes behind the start id, as forced_bos_token_id does; it is not part of the answer."""
    ids = translator.prompt_ids(TEXT)
    found = translator.generate(TEXT, tgt_lang="fra_Latn", max_tokens=5)
    assert translator.start_ids("fra_Latn") == [END, 301]
    logits = translator.logits([*translator.start_ids("fra_Latn"), *found.ids], source=ids)
    assert found.ids == np.argmax(logits[1:], axis=1)[: len(found.ids)].tolist()
    forced = {"decoder_start_token_id": END, "forced_bos_token_id": 301}
    directory = MAKERS["nllb_moe"](
        tmp_path / "hf", **{**VARIANTS["nllb_untied"].options, "seed": 6}, generation=forced
    )
    with colibri.load(convert(directory, tmp_path / "m.colibri", "f32").path, context=128) as other:
        assert other.generate(TEXT, max_tokens=5).ids == found.ids
        assert other.generate(TEXT, tgt_lang="eng_Latn", max_tokens=5).n_prompt == len(ids) + 2


def test_greedy_text_is_that_of_generate() -> None:
    variant = VARIANTS["switch"]
    with colibri.load(converted("switch"), context=128) as opened:
        found = opened.generate(variant.source, max_tokens=64)
        wanted = fixture("switch")["greedy"].tolist()
        wanted = wanted[: wanted.index(END)] if END in wanted else wanted
        assert found.ids == wanted
        assert found.text == opened.tokenizer.decode(wanted)


def test_streams_stop_repeat_and_are_counted(model: colibri.Model) -> None:
    whole = model.generate(TEXT, max_tokens=30, temperature=1.0, seed=5)
    assert whole.finish_reason == "length" and len(whole.ids) == 30
    assert "".join(model.stream(TEXT, max_tokens=30, temperature=1.0, seed=5)) == whole.text
    assert model.generate(TEXT, max_tokens=30, temperature=1.0, seed=6).ids != whole.ids
    stop = whole.text[5:8]
    cut = model.generate(TEXT, max_tokens=30, temperature=1.0, seed=5, stop=stop)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert whole.n_prompt == len(model.prompt_ids(TEXT)) + 1
    other = model.generate("Once", max_tokens=4)
    again = model.generate(TEXT, max_tokens=30, temperature=1.0, seed=5)
    assert other.n_reused == 0 and again.ids == whole.ids
    assert again.n_reused == len(model.prompt_ids(TEXT))  # its source is still held by the other sequence
    seen: list[tuple[int, int]] = []
    model.generate("Once upon", max_tokens=2, progress=lambda done, total: seen.append((done, total)))
    rows = len(model.prompt_ids("Once upon"))
    assert seen == [(rows * (layer + 1), rows * 4) for layer in range(4)]


def test_two_streams_take_turns(model: colibri.Model) -> None:
    """Three sources for two sequences: each stream finds or makes its sequence again."""
    texts = [TEXT, "Once upon a time", "She counted"]
    alone = [model.generate(text, max_tokens=12).ids for text in texts]
    streams = [model.stream(text, max_tokens=12) for text in texts]
    for _ in range(12):
        for stream in streams:
            next(stream, None)
    for stream, ids in zip(streams, alone, strict=True):
        for _ in stream:
            pass
        assert stream.result.ids == ids


def test_logits_and_routing_of_a_target(model: colibri.Model) -> None:
    ids, source = [0, 7, 9, 11], model.prompt_ids(TEXT)
    both = model.batch_logits([ids, ids[:2]], [TEXT, [5, 6, 7]])
    assert both[0].tobytes() == model.logits(ids, source=source).tobytes()
    assert both[1].tobytes() == model.logits(ids[:2], source=[5, 6, 7]).tobytes()
    found = model.routing(ids, source=TEXT)
    rows = {layer: len(routing.experts) for layer, routing in found.items()}
    assert rows == {1: len(source), 3: len(source), 5: 4}
    assert model.router_logits(ids, source=TEXT)[5].tobytes() == found[5].logits.tobytes()
    with pytest.raises(ArgumentError, match="source: the model has an encoder, found none"):
        model.logits(ids)
    with pytest.raises(ArgumentError, match="sources: expected 2"):
        model.batch_logits([ids, ids], [TEXT])


def test_what_is_refused(model: colibri.Model, translator: colibri.Model, model_path: Path) -> None:
    with pytest.raises(ArgumentError, match="tgt_lang: the model writes in 2 languages"):
        translator.generate(TEXT)
    with pytest.raises(ArgumentError, match="tgt_lang: 'deu_Latn' is not a language"):
        translator.generate(TEXT, tgt_lang="deu_Latn")
    with pytest.raises(ArgumentError, match="src_lang: 'en' is not a language"):
        translator.generate(TEXT, src_lang="en", tgt_lang="fra_Latn")
    with pytest.raises(ArgumentError, match="src_lang='eng_Latn' has no effect"):
        model.generate(TEXT, src_lang="eng_Latn")
    with pytest.raises(ArgumentError, match="src_lang='eng_Latn' has no effect"):
        translator.generate([5, 6], src_lang="eng_Latn", tgt_lang="fra_Latn")
    with pytest.raises(UnsupportedError, match="no conversations"):
        model.chat([{"role": "user", "content": TEXT}])
    with pytest.raises(ContextFullError, match="source has 129 tokens"):
        model.generate([5] * 129)
    assert len(model.generate([5] * 128, max_tokens=3).ids) == 3  # a target has positions of its own
    with colibri.load(model_path) as decoder:
        with pytest.raises(ArgumentError, match="tgt_lang='fra_Latn' has no effect"):
            decoder.generate(TEXT, tgt_lang="fra_Latn")
        with pytest.raises(ArgumentError, match="source: the model has no encoder"):
            decoder.logits([5], source=TEXT)
        with pytest.raises(UnsupportedError, match="start_ids: the model has no encoder"):
            decoder.start_ids()


def test_generation_json_of_an_encoder_is_checked(tmp_path: Path) -> None:
    good = {"start_ids": [0], "before": [], "after": [2], "languages": {"eng_Latn": 3}}
    assert source_rules(good, 10).start("eng_Latn") == [0, 3]
    bad: list[Any] = [
        None,
        [],
        {},
        good | {"start_ids": []},
        good | {"after": [10]},
        good | {"languages": [3]},
    ]
    for found in [*bad, good | {"languages": {"eng_Latn": "3"}}, good | {"before": [True]}]:
        with pytest.raises(ModelFileError, match="start_ids"):
            source_rules(found, 10)
    container = read_container(converted("switch"))
    blobs = {**read_blobs(converted("switch")), "generation.json": b"{}"}
    with Writer(tmp_path / "m.colibri", dict(container.config), "f32", blobs) as writer:
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
    with pytest.raises(ModelFileError, match="model with an encoder"):
        colibri.load(tmp_path / "m.colibri")


def test_where_a_target_begins_must_be_known(tmp_path: Path) -> None:
    directory = MAKERS["switch_transformers"](tmp_path / "hf", config_extra={"pad_token_id": None})
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    del config["decoder_start_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="decoder_start_token_id = None"):
        convert(directory, tmp_path / "m.colibri")


# ------------------------------------------------------------------ commands


def test_run_reads_a_source_and_writes_a_target(endless: Path, call: Callable[..., Result]) -> None:
    with colibri.load(endless, context=128) as opened:
        wanted = opened.generate(TEXT, max_tokens=9).text
    found = call("run", endless, TEXT, "--max-tokens", 9, "--context", 128, "--stats")
    assert found.status == 0 and found.out == wanted + ("" if wanted.endswith("\n") else "\n")
    assert "answer    9 tokens" in found.err
    piped = call("run", endless, "--max-tokens", 9, "--context", 128, stdin=TEXT.encode())
    assert piped.out == found.out


def test_run_knows_languages(call: Callable[..., Result]) -> None:
    path = converted("nllb_untied")
    with colibri.load(path, context=128) as opened:
        wanted = opened.generate(TEXT, src_lang="fra_Latn", tgt_lang="eng_Latn", max_tokens=9).text
    languages = ("--src-lang", "fra_Latn", "--tgt-lang", "eng_Latn")
    found = call("run", path, TEXT, *languages, "--max-tokens", 9, "--context", 128)
    assert found.status == 0 and found.out == wanted + ("" if wanted.endswith("\n") else "\n")
    refused = call("run", path, TEXT, "--context", 128)
    assert refused.status == 2 and "--tgt-lang: the model writes in 2" in refused.err
    assert call("run", path, "--chat", *languages).status == 2
    assert call("run", path, "--chat", "hello", "--context", 128).status == 1


def test_inspect_profile_and_bench_know_encoders(endless: Path, call: Callable[..., Result]) -> None:
    found = call("inspect", endless, "--verify")
    assert found.status == 0 and "n_encoder_layers" in found.out and "verified" in found.out
    sizes = ("--prompt", 20, "--decode", 6, "--json")
    profile = json.loads(call("profile", endless, *sizes, "--threads", 2).out)
    assert profile["model"]["n_layers"] == 7
    assert profile["prefill"]["tokens"] == 20 and profile["decode"]["tokens"] == 6
    bench = json.loads(call("bench", endless, *sizes, "--threads", "1").out)
    assert bench["prompt_tokens"] == 20


def test_cost_counts_what_is_read() -> None:
    """Decoding reads no layer of the encoder and no matrix that makes keys and values of a source."""
    found = cost.cost(converted("switch"))
    hidden, heads, n_ff = 64, 4 * 12, 96
    square, ffn = 2 * hidden * heads, 4 * hidden * n_ff
    encoder = 4 * (4 * square + ffn) + 2 * 2 * hidden * 5
    assert found.layers_flops == encoder + 3 * 2 * square
    assert found.kv_bytes_per_position == 3 * 4 * (12 + 16) * 4
    entries = {entry.name: entry.bytes for entry in read_container(converted("switch")).entries}
    dense = sum(
        size
        for name, size in entries.items()
        if (name.startswith(("layers.4.", "layers.5.", "layers.6.")) and ".experts." not in name)
        or name in ("output_norm", "attn_bias")
    )
    dense -= sum(size for name, size in entries.items() if name.endswith((".cross_attn_k", ".cross_attn_v")))
    assert found.dense_bytes == dense


def test_a_directory_is_converted_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path))
    with colibri.load(checkpoint("switch"), context=64, type="f32") as opened:
        assert opened.path.read_bytes() == converted("switch").read_bytes()
