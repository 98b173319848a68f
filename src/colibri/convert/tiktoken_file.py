"""A tiktoken file (one token in base64 and its rank per line) as a tokenizer.json.

Owns: the lines, and the patterns that cut texts into words, by the checkpoint's tokenizer class: a file has
neither pattern nor special tokens, they stand in code, which is never run.
Refuses: classes whose pattern is not known here, by name; files without the 256 bytes.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

from colibri.byte_letters import LETTER_OF
from colibri.convert.merges import merges

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORDS = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    r"|\p{N}{1,3}|" + _REST
)


class Rule(NamedTuple):
    pattern: str
    nfc: bool = False
    special: tuple[str, ...] = ()  # behind the ranks, where no file of the checkpoint names any


_OF_CLASS = {
    "TikTokenTokenizer": Rule(_KIMI),  # Kimi and Moonlight
    "ChatGLM4Tokenizer": Rule(_WORDS),
    "QWenTokenizer": Rule(
        _WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),
        nfc=True,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))),
    ),
    # Transformers' own reading of a tiktoken file without code, which is Llama 3's
    "PreTrainedTokenizerFast": Rule(_WORDS),
    "TokenizersBackend": Rule(_WORDS),
}


def rule_of(tokenizer_class: str) -> Rule:
    """A ValueError names a class that is not known."""
    rule = _OF_CLASS.get(tokenizer_class)
    if rule is None:
        raise ValueError(
            f"no pattern that cuts texts into words: none is known for the tokenizer_class "
            f"{tokenizer_class!r:.60} of tokenizer_config.json, only for {', '.join(_OF_CLASS)}"
        )
    return rule


def read_ranks(data: bytes) -> dict[bytes, int]:
    """A ValueError says what is wrong with the file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        text, space, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error:
            token = b""
        if not token or not space or not rank.isdigit() or len(rank) > 9:
            raise ValueError(f"line {number}, {bytes(line[:40])!r}, which is no token in base64 and its rank")
        if token in ranks:
            raise ValueError(f"line {number} repeats the token of rank {ranks[token]}")
        ranks[token] = int(rank)
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ValueError(f"{len(ranks)} tokens, but none for {len(absent)} of the 256 bytes")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("a rank that several tokens have")
    return ranks


def as_tokenizer(ranks: dict[bytes, int], rule: Rule) -> dict[str, Any]:
    """tokenizer.json without added tokens. A word that is a token is never taken apart, as in tiktoken."""
    name = {token: "".join([LETTER_OF[byte] for byte in token]) for token in ranks}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": rule.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {name[token]: rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": [[name[a], name[b]] for a, b in merges(ranks, _bytes)],
        },
    }


def _bytes(token: bytes) -> list[bytes]:
    return [token[at : at + 1] for at in range(len(token))]
