"""Text as SentencePiece prepares it before it looks for pieces: a map of characters, then spaces.

Owns: the precompiled character map, a dummy space before a text, runs of spaces, spaces as U+2581. The
package `tokenizers` has a step for the map, but it applies rules to whole graphemes and takes the shortest
rule, so decomposed Japanese and Korean come out otherwise than the model was trained on.
Refuses: a map that is no trie. What is an added token is tokenizer.py's.
"""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

TYPE = "SentencePiece"  # of the normalizer in tokenizer.json; other readers refuse it, as they should
SPACE = "\u2581"
_LENGTH_OF_LEAD = (*[1] * 0xC0, *[2] * 0x20, *[3] * 0x10, *[4] * 0x10)  # of a character in UTF-8


class Charsmap(NamedTuple):
    """A double-array trie from UTF-8 to offsets of zero-ended replacements."""

    units: array[int]
    replacements: bytes


def read_charsmap(blob: bytes) -> Charsmap | None:
    """uint32 size, the trie, the replacements; None for an empty one. A ValueError says what is wrong."""
    if not blob:
        return None
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 8 or size < 4 or size % 4 or size > len(blob) - 5:
        raise ValueError(f"a character map of {len(blob)} bytes whose trie has {size}")
    if blob[-1]:
        raise ValueError("a character map whose last replacement does not end")
    units = array("I", blob[4 : 4 + size])
    if units.itemsize != 4:
        raise ValueError("this machine has no 32-bit integers")
    return Charsmap(units, blob[4 + size :])


def preparation(settings: dict[str, Any], added: list[dict[str, Any]]) -> Callable[[str], str]:
    """A function that prepares a text. settings: the normalizer of tokenizer.json, added: its added tokens.
    Those that are not called normalized cut a text into stretches, each of which is prepared by itself."""
    borders = _any_of(token for token in added if not token["normalized"])
    normalize = _normalizer(settings, _any_of(token for token in added if token["normalized"]))
    every_stretch = settings["every_stretch"]

    def prepare(text: str) -> str:
        parts, at = [], 0
        for match in borders.finditer(text):
            parts += [
                normalize(text[at : match.start()], every_stretch or at == 0),
                match[match.lastindex or 0],
            ]
            at = match.end()
        return "".join(parts) + normalize(text[at:], every_stretch or at == 0)

    return prepare


def _any_of(tokens: Iterable[dict[str, Any]]) -> re.Pattern[str]:
    """Finds any of the tokens, as a group, with the spaces that it swallows around it; of tokens that swallow
    alike, the longest where several begin at one place."""
    alike: dict[tuple[bool, bool], list[str]] = {}
    for token in sorted(tokens, key=lambda token: -len(token["content"])):
        alike.setdefault((token["lstrip"], token["rstrip"]), []).append(re.escape(token["content"]))
    patterns = (
        r"\s*" * left + f"({'|'.join(contents)})" + r"\s*" * right
        for (left, right), contents in alike.items()
    )
    return re.compile("|".join(patterns) or "(?!)")


def _normalizer(settings: dict[str, Any], kept: re.Pattern[str]) -> Callable[[str, bool], str]:
    """A function that prepares a stretch, with the dummy prefix if it may have one. kept: pieces that the
    map leaves as they are."""
    units_of = _mapped(read_charsmap(base64.b64decode(settings["charsmap"])))
    dummy_prefix, collapse = settings["dummy_prefix"], settings["collapse_spaces"]
    space = SPACE if settings["escape_spaces"] else " "

    def units(text: str) -> Iterator[str]:
        at = 0
        for match in kept.finditer(text):
            yield from units_of(text[at : match.start()])
            yield match[0]
            at = match.end()
        yield from units_of(text[at:])

    def normalize(text: str, prefix: bool) -> str:
        parts = list(units(text))
        if collapse:
            first = next((at for at, part in enumerate(parts) if part != " "), len(parts))
            parts = list(_collapsed(parts[first:]))
        if not parts:
            return ""
        prepared = (space if prefix and dummy_prefix else "") + "".join(parts).replace(" ", space)
        return prepared.rstrip(space) if collapse else prepared

    return normalize


def _collapsed(parts: list[str]) -> Iterator[str]:
    """Without spaces that follow a space. A part that becomes empty stays: it is text."""
    after_space = True
    for part in parts:
        kept = part.lstrip(" ") if after_space else part
        yield kept
        after_space = kept.endswith(" ") if kept else after_space


def _mapped(charsmap: Charsmap | None) -> Callable[[str], Iterator[str]]:
    """A function that gives what replaces each stretch of a text: the longest rule at each place wins."""
    if charsmap is None:
        return iter
    units, texts = charsmap

    @lru_cache(maxsize=4096)
    def replacement(at: int) -> str:
        return texts[at : texts.index(0, at)].decode("utf-8", "replace")

    def longest(data: bytes, start: int) -> tuple[int, int]:
        """Bytes that the rule takes, 0 if there is none, and where its replacement begins."""
        found = (0, 0)
        node = _offset(units[0])
        for at in range(start, len(data)):
            node ^= data[at]
            if node >= len(units):
                break
            unit = units[node]
            if unit & 0x800000FF != data[at]:
                break
            node ^= _offset(unit)
            if unit & 0x100 and node < len(units) and (value := units[node] & 0x7FFFFFFF) < len(texts):
                found = (at + 1 - start, value)
        return found

    def replaced(text: str) -> Iterator[str]:
        data, at = text.encode(), 0
        while at < len(data):
            taken, value = longest(data, at)
            if taken:
                yield replacement(value)
            else:
                taken = _LENGTH_OF_LEAD[data[at]]
                yield data[at : at + taken].decode("utf-8", "replace")
            at += taken

    return replaced


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
