"""What an open model file says about itself: its config, and the rules in its generation.json.

Owns: the reading of both into Python values. Refuses: files: the library has opened it, format.py reads
blobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri import _native as native
from colibri.config import decode_config
from colibri.errors import ModelFileError
from colibri.format import read_json_blob


def config_of(handle: native.ModelHandle) -> dict[str, Any]:
    """Every config field; a list with one value per layer where the field is per layer."""
    return decode_config(native.config_bytes(handle), Path("the open model"))


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
