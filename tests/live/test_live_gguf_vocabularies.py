"""Real vocabularies in GGUF beside the ids that their own tokenizers gave, and drawn texts beside llama.cpp.

Role:    run by .ci/run live, which fetches the source package of llama-cpp-python: its folder
         vendor/llama.cpp/models has vocabularies without weights, with texts (.inp) and ids (.out).
Owns:    that every id is the same, that texts come back, that all tokens which end a text are known. Where
         the package llama_cpp is installed (a long build, so not by .ci/run), also ids of drawn texts.
Refuses: what the small vocabularies of the everyday tests show.

COLIBRI_LLAMA_CPP names the package (llama_cpp_python-*.tar.gz), its folder, or a folder with the files."""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colibri.convert.gguf.container import open_gguf
from colibri.convert.gguf.vocabulary import small_files
from colibri.tokenizer import Tokenizer
from fixtures.tokenizer_cases import WORDS

VARIABLE = "COLIBRI_LLAMA_CPP"
PREFIX = "ggml-vocab-"
NAMES = (
    "aquila baichuan bert-bge command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 gpt-neox llama-bpe "
    "llama-spm mpt nomic-bert-moe phi-3 qwen2 qwen35 refact starcoder"
)
WITHOUT_IDS = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")
# Ends by name; of Qwen's </s>, which merges make of text, llama.cpp says it too.
ENDS = {
    "llama-bpe": ["<|end_of_text|>", "<|eot_id|>"],
    "llama-spm": ["</s>"],
    "phi-3": ["<|endoftext|>", "</s>", "<|end|>"],
    "qwen2": ["<|endoftext|>", "<|im_end|>"],
    "gemma-4": ["<eos>", "<|tool_response>", "<turn|>"],
    "deepseek-llm": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
}
# Departures from llama.cpp (docs/GGUF.md): what it does to such texts, the models' own tokenizers do not.
UNLIKE = {
    "bert-bge": "accents, Hangul and control characters",
    "deepseek-llm": "white space beyond ASCII",
}
# What byte-level tokens call bytes: the printable ones by themselves, then the others in order.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_NAMES = {byte: chr(byte) for byte in PRINTABLE}
BYTE_NAMES |= {byte: chr(256 + n) for n, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
TEXTS = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=14).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join),
    st.text(max_size=30),
    st.text(alphabet="aAzZ'sS019 \t\n.,()_<>\u00e9\u4e2d", max_size=40),
)


class Vocabulary(NamedTuple):
    name: str
    file: Path
    ours: Tokenizer
    seconds: float  # of one core, for the conversion


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no source package of llama-cpp-python")
    path = Path(named)
    archives = [path] if path.is_file() else sorted(path.glob("llama_cpp_python-*.tar.gz"))
    if archives:
        path = tmp_path_factory.mktemp("vocabularies")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                data = archive.extractfile(member) if Path(member.name).name.startswith(PREFIX) else None
                if data is not None:
                    (path / Path(member.name).name).write_bytes(data.read())
    found = sorted(path.rglob(PREFIX + "*.gguf"))
    if not found:
        pytest.skip(f"{VARIABLE} = {named} holds no {PREFIX}*.gguf")
    return found[0].parent


@pytest.fixture(scope="module", params=NAMES.split())
def vocabulary(folder: Path, request: pytest.FixtureRequest) -> Vocabulary:
    file = folder / f"{PREFIX}{request.param}.gguf"
    metadata: dict[str, Any] = open_gguf(file).metadata
    began = time.process_time()
    files = small_files(metadata, file, len(metadata["tokenizer.ggml.tokens"]), [])
    taken = time.process_time() - began
    ends = json.loads(files["generation_config.json"])["eos_token_id"]
    return Vocabulary(request.param, file, Tokenizer(files["tokenizer.json"], eos_ids=ends), taken)


def test_ids_are_those_of_the_models_own_tokenizer(vocabulary: Vocabulary) -> None:
    name, file, ours, _ = vocabulary
    if name in WITHOUT_IDS:
        pytest.skip("the package has no ids for it")
    texts = file.with_name(file.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_name(file.name + ".out").read_text("utf-8").split("\n")
    assert len(texts) > 40 and len(lines) >= len(texts)
    for text, line in zip(texts, lines, strict=False):
        ids = [int(id) for id in line.split()]
        assert ours.encode(text) == ids, text
        if name != "bert-bge":  # which knows neither case nor white space
            assert ours.decode(ids) == text


def test_conversion_takes_seconds(vocabulary: Vocabulary) -> None:
    assert vocabulary.seconds < 3 * max(1, vocabulary.ours.size / 150_000)


def test_every_token_that_ends_a_text(vocabulary: Vocabulary) -> None:
    found = [vocabulary.ours.token(id) for id in vocabulary.ours.eos_ids]
    assert found and (vocabulary.name not in ENDS or found == ENDS[vocabulary.name])


def test_drawn_texts_as_llama_cpp_reads_them(vocabulary: Vocabulary) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama_cpp is not installed")
    if vocabulary.name in UNLIKE:
        pytest.skip(f"llama.cpp differs from the model's tokenizer: {UNLIKE[vocabulary.name]}")
    theirs = llama_cpp.Llama(str(vocabulary.file), vocab_only=True, verbose=False)
    metadata = open_gguf(vocabulary.file).metadata
    # The models' own tokenizers leave out what a vocabulary lacks (F1 of StarCoder's) before they merge.
    known = {*metadata["tokenizer.ggml.tokens"]} if metadata["tokenizer.ggml.model"] == "gpt2" else None
    lacking = {byte for byte, name in BYTE_NAMES.items() if known and name not in known}

    @given(TEXTS)
    @settings(max_examples=500, deadline=None)
    def compare(text: str) -> None:
        assume(lacking.isdisjoint(text.encode()))
        if text:
            ids = theirs.tokenize(text.encode(), add_bos=False, special=False)
            assert vocabulary.ours.encode(text) == ids

    compare()
