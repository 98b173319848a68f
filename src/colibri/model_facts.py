"""What a model file says about itself: its config, the rules in its generation.json, its tokenizer.

Owns: the reading of them into Python values. Refuses: files: the library has opened it, format.py reads
blobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from colibri import _native as native
from colibri.config import decode_config
from colibri.errors import ModelFileError
from colibri.format import read_json_blob
from colibri.sources import SourceRules, source_rules
from colibri.tokenizer import INSIDE, Tokenizer


class TextRules(NamedTuple):
    """How a model reads and writes texts; what it is loaded with, and what a conversion is checked with."""

    generation: dict[str, Any]  # generation.json
    source: SourceRules | None  # of a model with an encoder
    tokenizer: Tokenizer | None


def config_of(handle: native.ModelHandle) -> dict[str, Any]:
    """Every config field; a list with one value per layer where the field is per layer."""
    return decode_config(native.config_bytes(handle), Path("the open model"))


def text_rules(blobs: Mapping[str, bytes], config: Mapping[str, Any], at: str = INSIDE) -> TextRules:
    """Everything that is said about texts, checked; `at`: where errors say that the tokenizer is."""
    rules, data = generation_rules(blobs), blobs.get("tokenizer.json")
    ids = {name: rules[name] for name in ("bos_id", "eos_ids", "add_bos")}
    return TextRules(
        rules,
        source_rules(rules["encoder"], config["n_vocab"]) if config["n_encoder_layers"] else None,
        None if data is None else Tokenizer(data, n_vocab=config["n_vocab"], at=at, **ids),
    )


def generation_rules(blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """generation.json, checked, with every key present."""
    found = read_json_blob(blobs, "generation.json")
    empty: dict[str, Any] = {
        "bos_id": None,
        "eos_ids": [],
        "add_bos": False,
        "defaults": {},
        "special_tokens": {},
        "encoder": None,
    }
    rules = empty | found
    sound = (
        (rules["bos_id"] is None or type(rules["bos_id"]) is int)
        and isinstance(rules["eos_ids"], list)
        and all(type(id) is int for id in rules["eos_ids"])
        and isinstance(rules["add_bos"], bool)
        and isinstance(rules["defaults"], dict)
        and isinstance(rules["special_tokens"], dict)
    )
    if not sound:
        raise ModelFileError(
            "the embedded generation.json: expected "
            '{"bos_id": int or null, "eos_ids": [int], "add_bos": bool, '
            f'"defaults": {{}}, "special_tokens": {{}}}}, found {found!r:.200}; convert the model again'
        )
    return rules
