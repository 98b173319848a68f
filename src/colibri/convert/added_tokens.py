"""Tokens that the JSON files beside a vocabulary name: added_tokens.json, tokenizer_config.json,
special_tokens_map.json.

Owns: their ids and marks, the texts under keys of special tokens.
Refuses: what is no token id, and files that give one id to two tokens. Which file is the vocabulary is for
tokenizer_files.py to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from colibri.convert.checkpoint import read_json
from colibri.errors import ConversionError

SPECIAL = ("_token", "_special_tokens")  # how keys end that name special tokens


class Added(NamedTuple):
    """A token that a JSON file beside the vocabulary names."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


def added_tokens(path: Path, settings: dict[str, Any], special_map: dict[str, Any]) -> list[Added]:
    """added_tokens.json (ids by content), then added_tokens_decoder of tokenizer_config.json."""
    file = path / "added_tokens.json"
    special = set(texts([settings, special_map], SPECIAL))
    found: dict[str, Added] = {}
    for content, id in (read_json(file) if file.is_file() else {}).items():
        found[content] = Added(_id(file, id), content, content in special)
    file = path / "tokenizer_config.json"
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ConversionError(
            f"{file}: added_tokens_decoder is no object of tokens by id. Download it again."
        )
    for key, token in decoder.items():
        flags = token if isinstance(token, dict) else {"content": token}
        text = flags.get("content")
        if not isinstance(text, str) or not text:
            raise ConversionError(f"{file}: added_tokens_decoder has no text for id {key!r:.20}.")
        id = _id(file, int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key)
        marks = (bool(flags.get(name)) for name in ("lstrip", "rstrip"))
        found[text] = Added(id, text, bool(flags.get("special", text in special)), *marks)
    _refuse_shared_ids(path, found.values())
    return sorted(found.values())


def _id(file: Path, id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**31:
        raise ConversionError(f"{file}: {id!r:.40} is no token id.")
    return id


def _refuse_shared_ids(path: Path, tokens: Iterable[Added]) -> None:
    by_id: dict[int, str] = {}
    for token in tokens:
        other = by_id.setdefault(token.id, token.content)
        if other != token.content:
            raise ConversionError(
                f"{path}: added_tokens.json or tokenizer_config.json give id {token.id} to both "
                f"{other!r:.60} and {token.content!r:.60}. Download them again."
            )


def texts(sources: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[str]:
    """Texts under keys that end so, in the order of the sources."""
    for source in sources:
        for key, value in source.items():
            for one in value if isinstance(value, list) else [value]:
                text = one.get("content") if isinstance(one, dict) else one
                if key.endswith(keys) and isinstance(text, str) and text:
                    yield text
