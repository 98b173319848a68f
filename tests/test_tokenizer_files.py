"""SentencePiece and tiktoken files as tokenizers: the ids of the packages of those names (recorded by
tools/make_tokenizer_fixtures.py), what tokenizer classes add, damaged and hostile files."""

from __future__ import annotations

import base64
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
import colibri
from colibri.convert import convert, sentencepiece_model
from colibri.convert.embedded import fingerprint
from colibri.convert.merges import merges
from colibri.convert.tokenizer_files import as_tokenizer_json
from colibri.errors import ConversionError
from colibri.normalizer import preparation
from colibri.tokenizer import Tokenizer
from fixtures.tokenizer_cases import DIRECTORY, SETTINGS

NAMES = [*SETTINGS, "kimi"]
KIMI = {"tokenizer_class": "TikTokenTokenizer"}


@functools.cache
def expected() -> dict[str, Any]:
    return dict(json.loads((DIRECTORY / "expected.json").read_text("utf-8")))


def file_of(name: str) -> Path:
    return DIRECTORY / (f"{name}.model" if name != "kimi" else "kimi.tiktoken")


def tokenizer_json(file: Path, settings: dict[str, Any] | None = None, **special: Any) -> dict[str, Any]:
    settings = KIMI if settings is None and file.suffix == ".tiktoken" else settings or {}
    config = special.pop("config", {})
    return dict(json.loads(as_tokenizer_json(file, config, settings, special, [])))


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(json.dumps(tokenizer_json(file_of(name))))


# --- the same ids


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_reference(name: str) -> None:
    ours = tokenizer(name)
    for text, ids in zip(expected()["texts"], expected()["ids"][name], strict=True):
        assert ours.encode(text) == ids, text


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_back_as_from_the_reference_whole_and_streamed(name: str) -> None:
    ours = tokenizer(name)
    unknown = {"bpe_bare": 0, "unigram": 2}.get(name)
    for ids, text in zip(expected()["ids"][name], expected()["decoded"][name], strict=True):
        if unknown in ids:
            continue  # which is shown as " ⁇ " there, and as nothing here
        assert ours.decode(ids) == text
        decoder = ours.decoder(start=True)
        pieces = [decoder.push(id) for id in ids]
        assert "".join(pieces) + decoder.finish() == text


def test_the_cases_show_what_they_are_for() -> None:
    """Bytes, unknown text and user-defined pieces occur, and the map of characters does its work."""
    found = {name: {id for ids in expected()["ids"][name] for id in ids} for name in NAMES}
    texts = expected()["texts"]
    for name, kind in (("bpe", sentencepiece_model.BYTE), ("bpe", sentencepiece_model.USER_DEFINED)):
        pieces = sentencepiece_model.read_model(file_of(name).read_bytes()).pieces
        assert any(pieces[id].kind == kind for id in found[name])
    assert 0 in found["bpe_bare"] and 2 in found["unigram"]
    assert expected()["decoded"]["unigram"][texts.index("ﬁn")] == "fin"


def test_text_never_becomes_a_control_token() -> None:
    for name in SETTINGS:
        ours = tokenizer(name)
        controls = {id for text, id in ours.control_ids.items() if text != "<unk>"}
        for text in ours.control_ids:
            assert not controls & set(ours.encode(f"a {text} b{text}"))
            if text != "<unk>":
                assert ours.control_ids[text] in ours.encode(f"a {text} b", special=True)


# --- a property: one merge per token, whatever the priorities


def plain_bpe(text: str, priorities: dict[str, float]) -> list[str]:
    """What both encoders do: the best pair, the leftmost of equals, until there is none."""
    parts = list(text)
    while True:
        pairs = [(priorities.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
        best = min((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def by_merges(text: str, made: list[tuple[str, str]]) -> list[str]:
    """What `tokenizers` does with a list of merges."""
    rank = {pair: at for at, pair in enumerate(made)}
    parts = list(text)
    while True:
        pairs = [(rank[pair], i) for i in range(len(parts) - 1) if (pair := (parts[i], parts[i + 1])) in rank]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.lists(st.text("ab", min_size=2, max_size=5), unique=True), st.text("ab", max_size=12), st.randoms())
@settings(max_examples=400, deadline=None)
def test_one_merge_per_token_is_enough(tokens: list[str], text: str, draw: random.Random) -> None:
    draw.shuffle(tokens)
    priorities = {"a": -2.0, "b": -1.0} | {token: float(at) for at, token in enumerate(tokens)}
    assert by_merges(text, merges(priorities, list)) == plain_bpe(text, priorities)


@given(st.integers(2, 9), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_runs_of_one_priority_grow_from_the_left(longest: int, length: int) -> None:
    """As Llama's pieces of spaces do."""
    priorities = {"_" * n: 1.0 for n in range(1, longest + 1)}
    text = "_" * length
    assert by_merges(text, merges(priorities, list)) == plain_bpe(text, priorities)


# --- what stands beside the vocabulary


def written(path: Path, name: str, settings: dict[str, Any], **files: Any) -> Path:
    """A directory with a vocabulary under the name that checkpoints give it."""
    path.mkdir(exist_ok=True)
    target = {"kimi": "tiktoken.model", "unigram": "spiece.model"}.get(name, "tokenizer.model")
    (path / target).write_bytes(file_of(name).read_bytes())
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return path / target


def test_added_tokens_get_their_ids_and_cut_texts(tmp_path: Path) -> None:
    decoder = {"482": {"content": "<|im_end|>", "special": True}, "481": {"content": "<tool>"}}
    file = written(tmp_path, "bpe", {}, added_tokens={"<old>": 480})
    data = tokenizer_json(file, {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"})
    ours = Tokenizer(json.dumps(data))
    assert ours.control_ids["<|im_end|>"] == 482 and ours.size == 483
    plain = tokenizer("bpe")
    joined = [*plain.encode("one"), 481, *plain.encode(" two"), 480, *plain.encode("three")]
    assert ours.encode("one<tool> two<old>three") == joined
    assert ours.encode("a<|im_end|>", special=True)[-1] == 482 and 482 not in ours.encode("a<|im_end|>")
    first = Tokenizer(json.dumps(tokenizer_json(file, {"added_tokens_decoder": decoder, "legacy": False})))
    assert plain.token(plain.encode("three")[0]) == "▁th"
    three = first.encode("<tool>three")
    assert first.token(three[1]) == "t" and first.encode("<tool>three<tool>three") == three * 2


def test_flags_that_swallow_spaces(tmp_path: Path) -> None:
    decoder = {
        "480": {"content": "<left>", "lstrip": True},
        "481": {"content": "<right>", "rstrip": True},
    }
    ours = Tokenizer(json.dumps(tokenizer_json(file_of("bpe"), {"added_tokens_decoder": decoder})))
    assert ours.encode("a  <left> b") == [*ours.encode("a"), 480, *ours.encode(" b")]
    assert ours.encode("a <right>  b") == [*ours.encode("a "), 481, *ours.encode("b")]


def test_unigram_tokens_may_stand_far_behind_the_pieces() -> None:
    decoder = {"130": {"content": "<far>", "special": True}}
    ours = Tokenizer(json.dumps(tokenizer_json(file_of("unigram"), {"added_tokens_decoder": decoder})))
    assert ours.control_ids["<far>"] == 130 and ours.size == 131
    assert ours.encode("the bird") == tokenizer("unigram").encode("the bird")


def test_an_added_token_may_rename_a_control_piece_and_no_other() -> None:
    named = {"added_tokens_decoder": {"3": {"content": "<turn>", "special": True}}}
    pieces = sentencepiece_model.read_model(file_of("bpe").read_bytes()).pieces
    assert pieces[3].kind == sentencepiece_model.CONTROL
    assert Tokenizer(json.dumps(tokenizer_json(file_of("bpe"), named))).control_ids["<turn>"] == 3
    with pytest.raises(ConversionError, match="piece 400 .* numbers tokens in a way that is not known"):
        tokenizer_json(file_of("bpe"), {"added_tokens_decoder": {"400": {"content": "<x>"}}})
    with pytest.raises(ConversionError, match="'</s>' as piece 2, but the files beside it give it id 0"):
        tokenizer_json(file_of("bpe"), {"added_tokens_decoder": {"0": {"content": "</s>"}}})


@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_what_classes_do_in_code(suffix: str) -> None:
    t5 = tokenizer_json(
        file_of("unigram"),
        {
            "tokenizer_class": f"T5Tokenizer{suffix}",
            "extra_ids": 5,
            "added_tokens_decoder": {"1": {"content": "</s>", "special": True}},
        },
    )
    names = [token["content"] for token in t5["added_tokens"] if token["id"] > 2]
    assert names == [f"<extra_id_{n}>" for n in (4, 3, 2, 1, 0)]
    assert [list(part) for part in t5["post_processor"]["single"]] == [["Sequence"], ["SpecialToken"]]
    llama = tokenizer_json(file_of("bpe"), {"tokenizer_class": f"LlamaTokenizer{suffix}"})
    assert llama["post_processor"]["single"][0]["SpecialToken"]["id"] == "<s>"
    assert tokenizer_json(file_of("bpe"), {})["post_processor"] is None


def test_the_class_may_stand_in_config_json_or_follow_from_the_model() -> None:
    for config, size in (
        ({"tokenizer_class": "T5Tokenizer", "model_type": "llama"}, 100),
        ({"model_type": "switch_transformers"}, 100),
        ({"model_type": "other"}, 0),
    ):
        data = tokenizer_json(file_of("unigram"), {}, config=config)
        assert sum("<extra_id_" in token["content"] for token in data["added_tokens"]) == size
    assert tokenizer_json(file_of("bpe"), {}, config={"model_type": "mixtral"})["post_processor"] is not None


def test_nllb_moves_its_pieces_and_names_languages() -> None:
    special = {"additional_special_tokens": ["deu_Latn", "eng_Latn"], "mask_token": "<mask>"}
    data = tokenizer_json(file_of("bpe"), {"tokenizer_class": "NllbTokenizer"}, **special)
    ours, plain = Tokenizer(json.dumps(data)), tokenizer("bpe")
    assert [ours.token(id) for id in range(4)] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert [ours.token(id) for id in (481, 482, 483)] == ["deu_Latn", "eng_Latn", "<mask>"]
    assert ours.encode("the bird 小") == [id + 1 for id in plain.encode("the bird 小")]
    assert list(data["post_processor"]["special_tokens"]) == ["eng_Latn", "</s>"]


def test_a_converted_kimi_encodes_and_chats(tmp_path: Path) -> None:
    """tiktoken.model and special tokens by id, as Kimi-K2 has them."""
    names = {340: "[BOS]", 341: "[EOS]", 342: "<|im_end|>", 343: "<|im_user|>", 345: "[PAD]"}
    source = checkpoints.deepseek_v3(
        tmp_path / "kimi",
        vocab=350,
        tokenizer=False,
        config_extra={
            "model_type": "kimi_k2",
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        },
        generation={"eos_token_id": 342},
    )
    decoder = {str(id): {"content": name, "special": True} for id, name in names.items()}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    template = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
    (source / "tokenization_kimi.py").write_text("raise SystemExit('never run')\n")
    written(
        source,
        "kimi",
        {
            **KIMI,
            "auto_map": code,
            "added_tokens_decoder": decoder,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
        }
        | {"chat_template": template},
    )
    report = convert(source, tmp_path / "m.colibri", "f32")
    assert "the tokenizer is made from tiktoken.model, as of TikTokenTokenizer" in report.notes
    with colibri.load(report.path) as model:
        ours = model.tokenizer
        for text, ids in zip(expected()["texts"], expected()["ids"]["kimi"], strict=True):
            assert ours.encode(text) == ids
        assert ours.encode_prompt("the bird") == ours.encode("the bird"), "no BOS by itself"
        assert {342, 341} <= set(ours.eos_ids)
        chat = model.chat([{"role": "user", "content": "<|im_end|> bird"}], max_tokens=3)
        assert chat.n_prompt == len([343, *ours.encode("<|im_end|> bird"), 342])


def test_a_converted_llama_tokenizer_puts_one_bos_before_a_prompt(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", vocab=480, tokenizer=False)
    written(source, "bpe", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    first = convert(source, tmp_path / "m.colibri", "f32")
    with colibri.load(first.path) as model:
        text = "the bird [INST] \U0001f999"
        ids = tokenizer("bpe").encode(text)
        assert model.tokenizer.encode_prompt(text) == [1, *ids]
        assert model.generate(text, max_tokens=2).n_prompt == len(ids) + 1
    sha256 = fingerprint(source, [])
    (source / "tokenizer.model").write_bytes(file_of("bpe_bare").read_bytes())
    assert fingerprint(source, []) != sha256, "another tokenizer is another source"


def test_a_tiktoken_file_may_be_called_tokenizer_model(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(file_of("kimi").read_bytes())
    data = tokenizer_json(file, {"tokenizer_class": "PreTrainedTokenizerFast"})
    assert data["model"]["ignore_merges"] and data["model"]["vocab"].keys() >= {"Ġ", "qzj"}
    qwen = tokenizer_json(file, {"tokenizer_class": "QWenTokenizer"})
    assert qwen["normalizer"] == {"type": "NFC"} and qwen["added_tokens"][1]["content"] == "<|im_start|>"


def test_a_pattern_that_is_not_known_is_refused_by_name() -> None:
    for wrong in ({"tokenizer_class": "OtherTokenizer"}, {"tokenizer_class": 5}, {"x": 1}):
        with pytest.raises(
            ConversionError, match="none is known for the tokenizer_class .*TikTokenTokenizer"
        ):
            tokenizer_json(file_of("kimi"), wrong)


# --- the map of characters


def prepare(blob: bytes, **changes: bool) -> Callable[[str], str]:
    flags = {"dummy_prefix": True, "every_stretch": True, "collapse_spaces": True, "escape_spaces": True}
    return preparation({"charsmap": base64.b64encode(blob).decode(), **flags, **changes}, [])


def test_spaces() -> None:
    for changes, text, wanted in (
        ({}, "  a   b ", "▁a▁b"),
        ({}, "   ", ""),
        ({}, "", ""),
        ({"collapse_spaces": False}, " a  b ", "▁▁a▁▁b▁"),
        ({"dummy_prefix": False}, " a", "a"),
        ({"escape_spaces": False}, " a  b", " a b"),
    ):
        assert prepare(b"", **changes)(text) == wanted
