"""What a model with an encoder says about its texts: the key "encoder" of generation.json.

Owns: which ids stand around a source text, what a target begins with, ids of languages. Refuses: a checkpoint
that does not say what a target begins with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from colibri.convert.checkpoint import Checkpoint
from colibri.errors import ConversionError

# Control tokens that name a language: of FLORES-200, as in eng_Latn.
_LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


def with_encoder(
    checkpoint: Checkpoint, blobs: Mapping[str, bytes], start_id: int | None, n_vocab: int
) -> bytes:
    """generation.json with that key; blobs: it without, and tokenizer.json, if there is one."""
    settings: dict[str, Any] = checkpoint.config | checkpoint.settings("generation_config.json")
    start = settings.get("decoder_start_token_id")
    start = start_id if start is None else start
    if type(start) is not int or not 0 <= start < n_vocab:
        raise ConversionError(
            f"{checkpoint.path}: decoder_start_token_id = {start!r}; expected the id below vocab_size = "
            f"{n_vocab} that a target begins with, in config.json or generation_config.json. Add the one "
            "that the model was trained with."
        )
    forced = settings.get("forced_bos_token_id")
    if forced is not None and (type(forced) is not int or not 0 <= forced < n_vocab):
        raise ConversionError(
            f"{checkpoint.path}: forced_bos_token_id = {forced!r:.60}; expected null or an id below "
            f"vocab_size = {n_vocab}, in config.json or generation_config.json."
        )
    rules = json.loads(blobs["generation.json"])
    tokenizer = json.loads(blobs.get("tokenizer.json", b"{}"))
    try:
        around = _around(tokenizer.get("post_processor"))
        languages = {
            token["content"]: token["id"]
            for token in tokenizer.get("added_tokens") or []
            if _LANGUAGE.fullmatch(token["content"])
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise ConversionError(
            f"{checkpoint.path / 'tokenizer.json'} has a post_processor or added_tokens that cannot be read: "
            f"{error!r}. Download it again."
        ) from error
    before, after = around if around is not None else ([], rules["eos_ids"][:1])
    rules["encoder"] = {
        "start_ids": [start] + ([] if forced is None else [forced]),
        "before": before,
        "after": after,
        "languages": dict(sorted(languages.items())),
    }
    return json.dumps(rules, ensure_ascii=False, indent=1).encode()


def _around(processor: Any) -> tuple[list[int], list[int]] | None:
    """Ids that tokenizer.json puts before and behind a single text; None if it does not say."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        found = [_around(part) for part in processor.get("processors") or []]
        return next((one for one in found if one is not None), None)
    if processor.get("type") != "TemplateProcessing":
        return None
    sides: tuple[list[int], list[int]] = ([], [])
    side = 0
    for piece in processor.get("single") or []:
        if "Sequence" in piece:
            side = 1
            continue
        name = piece.get("SpecialToken", {}).get("id")
        sides[side].extend(processor.get("special_tokens", {}).get(name, {}).get("ids") or [])
    return sides
