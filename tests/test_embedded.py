"""The files embedded in a model: end ids, BOS, sampling defaults, chat template, tokenizer, source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import colibri
import encoder_checkpoints
from colibri.convert import convert, explain
from colibri.errors import ColibriError, ConversionError
from colibri.format import read_blobs, read_json_blob
from colibri.tokenizer import Tokenizer


def blob(path: Path, name: str) -> dict[str, Any]:
    return read_json_blob(read_blobs(path), name)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [4, 2]}, {"eos_token_id": 2}, {}, [4, 2]),
        ({"eos_token_id": 4}, {"eos_token_id": [2, 3]}, {"eos_token": None}, [4, 2, 3]),
        ({}, {"eos_token_id": 3}, {"eos_token": {"content": "<|im_end|>"}}, [3, 4]),
        ({}, {"eos_token_id": 50279}, {"eos_token": "no such token"}, []),
        ({}, {"eos_token_id": None}, {"eos_token": None}, [2]),  # MixtralConfig's own default
    ],
)
def test_end_ids_are_a_union(
    tmp_path: Path,
    generation: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    expected: list[int],
) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", generation=generation, config_extra=config)
    checkpoints.edit_json(source / "tokenizer_config.json", tokenizer)
    report = convert(source, tmp_path / "m.colibri")
    assert blob(report.path, "generation.json")["eos_ids"] == expected
    assert any("50279" in note for note in report.notes) == (config["eos_token_id"] == 50279)


@pytest.mark.parametrize(
    ("adds_bos", "setting", "expected"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_bos_follows_the_setting_then_the_tokenizer(
    tmp_path: Path, adds_bos: bool, setting: bool | None, expected: bool
) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", adds_bos=adds_bos)
    if setting is not None:
        checkpoints.edit_json(source / "tokenizer_config.json", {"add_bos_token": setting})
    found = blob(convert(source, tmp_path / "m.colibri").path, "generation.json")
    assert (found["bos_id"], found["add_bos"]) == (1, expected)


def test_sampling_defaults_and_special_tokens(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 100}
    source = checkpoints.qwen3(tmp_path / "hf", generation=generation)
    found = blob(convert(source, tmp_path / "m.colibri").path, "generation.json")
    assert found["defaults"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found["special_tokens"] == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for changes, expected in (
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
    ):
        (source / "generation_config.json").write_text(json.dumps(changes))
        assert blob(convert(source, tmp_path / "m.colibri").path, "generation.json")["defaults"] == expected


def test_chat_template_from_each_place(tmp_path: Path) -> None:
    source, out = checkpoints.mixtral(tmp_path / "hf"), tmp_path / "m.colibri"
    settings = source / "tokenizer_config.json"

    def template() -> bytes | None:
        return read_blobs(convert(source, out).path).get("chat_template.jinja")

    assert template() == checkpoints.TEMPLATE.encode()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    checkpoints.edit_json(settings, {"chat_template": named})
    assert template() == b"D"
    checkpoints.edit_json(settings, {}, remove=["chat_template"])
    assert template() is None
    (source / "chat_template.jinja").write_text("file ä", "utf-8")
    assert template() == "file ä".encode()


def test_source_and_tokenizer_are_embedded(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "name of it")
    path = convert(source, tmp_path / "m.colibri").path
    assert read_blobs(path)["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    found = blob(path, "source.json")
    assert {key: found[key] for key in ("name", "model_type", "type")} == {
        "name": "name of it", "model_type": "mixtral", "type": "q8"
    }  # fmt: skip
    assert len(found["sha256"]) == 64 and str(tmp_path) not in json.dumps(found)


def test_defaults_that_generation_would_refuse_are_left_out_and_told(tmp_path: Path) -> None:
    odd = {"temperature": -1, "top_k": 2.5, "top_p": 0, "min_p": "x", "repetition_penalty": True}
    source = checkpoints.mixtral(tmp_path / "hf", generation={"do_sample": True, **odd})
    report = convert(source, tmp_path / "m.colibri")
    assert blob(report.path, "generation.json")["defaults"] == {"temperature": 1.0}
    told = [note for note in report.notes if note.startswith("a default of generation_config.json is left")]
    assert len(told) == len(odd) and all(any(f"{name}: expected" in note for note in told) for name in odd)
    with colibri.load(report.path, threads=1, context=32) as model:
        assert model.generate("a", max_tokens=1).ids is not None


# --- tokenizers that nothing could load


def added(**changes: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return plain | {"id": 5, "content": "<odd>"} | changes


UNREADABLE: dict[str, dict[str, Any]] = {
    "no decoder": {"decoder": None},
    "empty decoder": {"decoder": {"type": "Sequence", "decoders": []}},
    "unknown decoder": {"decoder": {"type": "CTC"}},
    "decoder that looks back": {"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 1}},
    "pattern in a decoder": {"decoder": {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}},
    "unknown pre_tokenizer": {"pre_tokenizer": {"type": "Mystery"}},
    "unknown normalizer": {"normalizer": {"type": "Mystery"}},
    "unknown model": {"model": {"type": "Mystery", "vocab": {"a": 0}}},
    "merge of no tokens": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}},
    "two tokens of one id": {"added_tokens": [added()]},
    "added token without flags": {"added_tokens": [{"id": 5, "content": "<odd>"}]},
    "added tokens by name": {"added_tokens": {"<odd>": 5}},
}


@pytest.mark.parametrize("family", ["mixtral", "nllb_moe"])
@pytest.mark.parametrize(
    "key", ["added_tokens", "model", "decoder", "normalizer", "pre_tokenizer", "post_processor"]
)
def test_parts_of_any_other_shape_end_in_our_errors(family: str, key: str, tmp_path: Path) -> None:
    maker = encoder_checkpoints.nllb_moe if family == "nllb_moe" else checkpoints.mixtral
    source = maker(tmp_path / "hf")
    template = {"type": "TemplateProcessing", "special_tokens": {}}
    odd: list[Any] = [-1, "x", [1], {"a": 1}, [{"a": 1}], True, template | {"single": [1]}]
    for value in [*odd, template | {"single": "x"}, {"type": "Sequence", "processors": 3}]:
        checkpoints.edit_json(source / "tokenizer.json", {key: value})
        try:
            convert(source, tmp_path / "m.colibri")
        except ConversionError as error:
            assert str(source / "tokenizer.json") in str(error)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_loaded_is_not_converted(name: str, tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    file = source / "tokenizer.json"
    checkpoints.edit_json(file, UNREADABLE[name])
    with pytest.raises(ColibriError):
        Tokenizer(file.read_bytes(), n_vocab=300)
    for attempt in (lambda: convert(source, tmp_path / "m.colibri"), lambda: explain(source)):
        with pytest.raises(ConversionError, match="tokenizer.json") as caught:
            attempt()
        assert str(file) in str(caught.value) and "inside the model file" not in str(caught.value)
    assert not (tmp_path / "m.colibri").exists()
    assert not any((tmp_path).glob("*.part"))
