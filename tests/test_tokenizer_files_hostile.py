"""Tokenizer files that are damaged or made to do harm: a short ConversionError, soon, or a tokenizer."""

from __future__ import annotations

import base64
import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.convert import sentencepiece_model, tiktoken_file
from colibri.errors import ConversionError, ModelFileError
from colibri.normalizer import read_charsmap
from colibri.tokenizer import Tokenizer
from test_tokenizer_files import KIMI, NAMES, file_of, prepare, tokenizer_json


def refused(file: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConversionError, match=match) as caught:
        tokenizer_json(file, settings)
    assert len(str(caught.value)) < 700
    assert f"{file} has" not in str(caught.value)  # before a text that may be a sentence


def message(*parts: tuple[int, bytes | int | float]) -> bytes:
    """A protocol buffer's message."""
    out = b""
    for number, value in parts:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def model_file(pieces: list[tuple[str, float, int]], *, kind: int = 2, **parts: bytes) -> bytes:
    trainer = message((3, kind)) + parts.get("trainer", b"")
    listed = [(1, message((1, text.encode()), (2, score), (3, type))) for text, score, type in pieces]
    return message(*listed, (2, trainer), (3, parts.get("normalizer", b"")))


UNK = ("<unk>", 0.0, 2)
AB = [("a", -1.0, 1), ("b", -2.0, 1)]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "0 pieces without exactly one"),
        (b"\0\0", "field number 0"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes, 0 are left"),
        (b"\x0a" + b"\xff" * 12, "more than 64 bits"),
        (b"\x0a\x80", "ends inside a number"),
        (b"\x0b\x00", "wire type 3"),
        (b"\x08\x01", "field 1 is no message"),
        (message((1, message((1, 5)))), "number in the place of a text"),
        (message((1, message((1, b"\xff\xfe")))), "not UTF-8"),
        (message((1, message((1, b"a"), (2, 5)))), "no 32-bit float"),
        (model_file([UNK, *AB], kind=3), "kind word"),
        (model_file([UNK, *AB], kind=99), "kind number 99"),
        (model_file([UNK, *AB], trainer=message((24, 1))), "treat_whitespace_as_suffix"),
        (model_file(AB), "without exactly one for unknown text"),
        (model_file([UNK, *AB, ("a", -3.0, 1)]), "2 pieces 'a'"),
        (model_file([UNK, *AB, ("", -3.0, 1)]), "an empty piece"),
        (model_file([UNK, ("a", float("nan"), 1)]), "score nan"),
        (model_file([UNK, ("a", -1.0, 9)]), "kind 9"),
        (model_file([UNK, *AB], trainer=message((35, 1))), "0 byte pieces with byte fallback on"),
        (model_file([UNK, ("<0x41>", 0.0, 6)]), "1 byte pieces with byte fallback off"),
        (model_file([UNK, *AB, ("ab", -3.0, 5)]), "unused piece 'ab', which merges make"),
        (model_file([UNK, *AB, ("ax", -3.0, 1)]), "'ax' of characters that are no pieces"),
        (model_file([UNK, *AB, ("a" * 20_000, -3.0, 1)]), "up to 20,000 symbols"),
        (model_file([UNK], kind=1), "no normal pieces"),
        (model_file([UNK, *AB], normalizer=message((2, b"\x01\0\0\0xxxx"))), "a character map of 8 bytes"),
        (model_file([UNK, *AB], normalizer=message((2, b"\xff\xff\xff\xff" + bytes(9)))), "whose trie has"),
        (model_file([UNK, *AB], normalizer=message((2, b"\x04\0\0\0xxxxab"))), "does not end"),
    ],
)
def test_a_hostile_sentencepiece_file(tmp_path: Path, data: bytes, match: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(data)
    refused(file, {}, match)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"YQ== 0\n", "1 tokens, but none for 255 of the 256 bytes"),
        (b"YQ== 0\nYQ== 1\n", "line 2 repeats"),
        (b"YQ== x\n", "line 1"),
        (b"Y!Q= 0\n", "line 1"),
        (b"YQ== 99999999999999999999\n", "line 1"),
        (b"YQ==\n" + b"A" * 100_000, "line 1, b'YQ=='"),
        (b"A" * 100_000 + b" 1", "none for 256"),
    ],
)
def test_a_hostile_tiktoken_file(tmp_path: Path, data: bytes, match: str) -> None:
    file = tmp_path / "tiktoken.model"
    file.write_bytes(data)
    refused(file, KIMI, match)


def test_ranks_that_are_shared_or_taken(tmp_path: Path) -> None:
    bytes_ = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % (byte // 2) for byte in range(256))
    file = tmp_path / "tiktoken.model"
    file.write_bytes(bytes_)
    refused(file, KIMI, "a rank that several tokens have")
    refused(
        file_of("kimi"), {**KIMI, "added_tokens_decoder": {"3": {"content": "<x>"}}}, "340 ranks, but .* id 3"
    )


@pytest.mark.parametrize(
    ("decoder", "match"),
    [
        ([], None),
        ([1], "no object"),
        ({"x": {"content": "<x>"}}, "'x' is no token id"),
        ({"99999999999": {"content": "<x>"}}, "no token id"),
        ({"480": {"content": 5}}, "no text for id '480'"),
        ({"480": {}}, "no text"),
        ({"480": "<x>", "0480": "<y>"}, "id 480 to both"),
    ],
)
def test_hostile_added_tokens(decoder: Any, match: str | None) -> None:
    settings = {"added_tokens_decoder": decoder}
    if match is None:
        tokenizer_json(file_of("bpe"), settings)
    else:
        refused(file_of("bpe"), settings, match)


def short_or_sound(file: Path) -> None:
    """A damaged file is a tokenizer or a short error, soon."""
    began = time.monotonic()
    try:
        data = tokenizer_json(file, KIMI)
        Tokenizer(json.dumps(data)).encode("the bird\u00a0 e\u0301小ｶﾞ <think>")
    except (ConversionError, ModelFileError) as error:
        assert len(str(error)) < 1000
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", NAMES)
def test_files_cut_short(name: str, tmp_path: Path) -> None:
    data = file_of(name).read_bytes()
    file = tmp_path / "tokenizer.model"
    for length in range(0, len(data), 1 + len(data) // 60):
        file.write_bytes(data[:length])
        short_or_sound(file)


@pytest.mark.parametrize("name", NAMES)
def test_files_with_wrong_bytes(name: str, tmp_path: Path) -> None:
    data, draw = file_of(name).read_bytes(), random.Random(7)
    file = tmp_path / "tokenizer.model"
    for _ in range(60):
        wrong = bytearray(data)
        for _ in range(draw.choice((1, 3, 20))):
            wrong[draw.randrange(len(wrong))] = draw.randrange(256)
        file.write_bytes(bytes(wrong))
        short_or_sound(file)


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes(data: bytes) -> None:
    for read in (sentencepiece_model.read_model, tiktoken_file.read_ranks):
        try:
            read(data)
        except ValueError as error:
            assert len(str(error)) < 300


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    with file.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    refused(file, {}, "larger than 64 MiB")


@given(st.binary(min_size=4, max_size=64), st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_map_of_characters_is_refused_or_harmless(units: bytes, text: str) -> None:
    units = units[: len(units) // 4 * 4]
    blob = len(units).to_bytes(4, "little") + units + b"ab\0c\0"
    assert read_charsmap(blob) is not None
    prepare(blob)(text)
