"""The tokens of a GGUF file as a tokenizer.json, for each tokenizer.ggml.model.

Owns: byte-level BPE ("gpt2"), BPE of characters ("gemma4"), SentencePiece's BPE ("llama") and unigrams
("t5"), WordPiece ("bert"); which tokens are found in the text as it is.
Refuses: merges of what is no token. SentencePiece's own rules are sentencepiece_model.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colibri.convert import sentencepiece_model
from colibri.convert.gguf.pre_tokenizers import DEFAULT, Pre, pre_of
from colibri.convert.gguf.token_lists import KEY, TokenLists, numbers, texts, value
from colibri.convert.sentencepiece_model import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
    added_token,
)
from colibri.normalizer import SPACE

_LONGEST_WORD = 100  # of WordPiece: longer words are unknown
_LOUD = (
    "GGUF: {}; texts are cut into words by llama.cpp's default rule, which may not be the model's: answers "
    "may be worse. A newer GGUF file of the model names its rule"
)


def tokenizer_of(metadata: dict[str, Any], lists: TokenLists, notes: list[str]) -> dict[str, Any]:
    """tokenizer.json. A ValueError says what is wrong with the metadata."""
    make = _OF_MODEL[lists.model]
    tokenizer = make(metadata, lists, notes)
    tokenizer.update(version="1.0", truncation=None, padding=None, post_processor=None)
    _strip(metadata, tokenizer["added_tokens"])
    return tokenizer


def pre_tokenizer_of(metadata: dict[str, Any], model: str) -> Pre | None:
    """Only BPE has one."""
    if model not in ("gpt2", "gemma4"):
        return None
    name = value(metadata, KEY + "pre", str, "")
    return pre_of("gemma4" if model == "gemma4" else name or "default")


def _bpe(metadata: dict[str, Any], lists: TokenLists, notes: list[str]) -> dict[str, Any]:
    pre = pre_tokenizer_of(metadata, lists.model)
    assert pre is not None  # this model has one
    if pre is DEFAULT:
        named = "default" if metadata.get(KEY + "pre") else "missing"
        notes.append(_LOUD.format(f"{KEY}pre is {named}"))
    vocabulary = {text: id for id, text in enumerate(lists.tokens) if id not in lists.holes}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "added_tokens": _added(lists, (CONTROL, UNKNOWN, USER_DEFINED)),
        "normalizer": spaces if pre.spaces else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": splits if pre.spaces else [*splits, byte_level],
        },
        "decoder": _decoder(0, "ByteFallback") if pre.spaces else byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": pre.spaces,
            "ignore_merges": pre.whole_words,
            "vocab": vocabulary,
            "merges": _merges(metadata, vocabulary),
        },
    }


def _merges(metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs, best first; of equal ones the first. A space is part of a token only where it begins one."""
    found: dict[tuple[str, str], None] = {}
    for number, line in enumerate(texts(metadata, KEY + "merges")):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not right:
            raise ValueError(f"merge {number} of {KEY}merges, {line!r:.60}, expected two tokens and a space")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            unknown = next(one for one in (left, right, left + right) if one not in vocabulary)
            raise ValueError(
                f"merge {number} of {KEY}merges, {line!r:.60}, which needs the token {unknown!r:.60}; "
                f"{KEY}tokens does not have it"
            )
        found[left, right] = None
    return list(found)


def _sentencepiece(metadata: dict[str, Any], lists: TokenLists, notes: list[str]) -> dict[str, Any]:
    """User-defined tokens are found in the text as it is and cut it, as llama.cpp does; those that are
    written with U+2581 are found where spaces have become that."""
    bpe = lists.model == "llama"
    if lists.scores is None:
        raise ValueError(f"no {KEY}scores; expected a number for each token")
    charsmap = _charsmap(metadata)
    flag: Callable[[str, bool], bool] = lambda key, default: bool(value(metadata, KEY + key, bool, default))  # noqa: E731
    model = SentencePieceModel(
        pieces=[Piece(*one) for one in zip(lists.tokens, lists.scores, _kinds(lists), strict=True)],
        kind="BPE" if bpe else "unigram",
        byte_fallback=BYTE in lists.kinds,
        charsmap=b"" if bpe else charsmap,
        dummy_prefix=flag("add_space_prefix", bpe),
        collapse_spaces=not bpe and flag("remove_extra_whitespaces", False),
    )
    sentencepiece_model.check(model)
    tokenizer, more = sentencepiece_model.as_tokenizer(model, every_stretch=True)
    notes += more
    for token in tokenizer["added_tokens"]:
        token["normalized"] = token["normalized"] and SPACE in token["content"]
    return tokenizer


def _charsmap(metadata: dict[str, Any]) -> bytes:
    key = KEY + "precompiled_charsmap"
    found = metadata.get(key)
    if found is None:
        return b""
    found = numbers(metadata, key, "iu")
    if found.dtype.itemsize != 1:
        raise ValueError(f"{key} of {found.dtype}, expected an array of bytes")
    return bytes(found.tobytes())


def _kinds(lists: TokenLists) -> list[int]:
    """With one token for unknown text, as SentencePiece has it. Files also give that type to padding."""
    kinds = [CONTROL if kind == UNKNOWN else kind for kind in lists.kinds]
    unknown = lists.special.get("unknown")
    if unknown is None and UNKNOWN in lists.kinds:
        unknown = lists.kinds.index(UNKNOWN)
    if unknown is None:
        raise ValueError(f"no {KEY}unknown_token_id and no token of the type for unknown text")
    kinds[unknown] = UNKNOWN
    return kinds


def _wordpiece(metadata: dict[str, Any], lists: TokenLists, notes: list[str]) -> dict[str, Any]:
    """GGUF writes the beginning of a word as U+2581 and a word's further pieces without a mark."""
    lowercase = bool(value(metadata, KEY + "normalizer.lowercase", bool, True))
    accents = bool(value(metadata, KEY + "normalizer.strip_accents", bool, lowercase))
    if "unknown" not in lists.special:
        raise ValueError(f"no {KEY}unknown_token_id and no [UNK] as token 100")
    return {
        "added_tokens": _added(lists, (CONTROL, UNKNOWN, USER_DEFINED)),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "BertPreTokenizer"},
                {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False},
            ],
        },
        "decoder": _decoder(1),
        "model": {
            "type": "WordPiece",
            "unk_token": lists.text_of("unknown"),
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": {text: id for id, text in enumerate(lists.tokens) if id not in lists.holes},
        },
    }


def _decoder(strip: int, *further: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        *({"type": name} for name in further),
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": strip, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added(lists: TokenLists, kinds: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        added_token(id, lists.tokens[id], kind != USER_DEFINED)
        for id, kind in enumerate(lists.kinds)
        if kind in kinds
    ]


def _strip(metadata: dict[str, Any], added: list[dict[str, Any]]) -> None:
    """Which tokens swallow white space beside them is no key of GGUF; llama.cpp knows it by these names."""
    name = str(metadata.get("general.name", "")).lower()
    architecture = str(metadata.get("general.architecture", ""))
    pre = str(metadata.get(KEY + "pre", ""))
    if any(one in pre for one in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        one in architecture for one in ("nomic-bert-moe", "jina-bert-v3")
    ):
        for token in added:
            token["lstrip"] = token["content"] == "<mask>"
    elif "phi-3" in name or "phi3" in name:
        for token in added:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    elif "modern-bert" in name:
        for token in added:
            token["lstrip"] = token["content"] == "[MASK]"


_OF_MODEL: dict[str, Callable[[dict[str, Any], TokenLists, list[str]], dict[str, Any]]] = {
    "gpt2": _bpe,
    "gemma4": _bpe,
    "llama": _sentencepiece,
    "t5": _sentencepiece,
    "bert": _wordpiece,
}
MODELS = tuple(_OF_MODEL)
