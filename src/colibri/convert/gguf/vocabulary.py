"""The vocabulary of a GGUF file as the small files that a Hugging Face directory has beside its weights.

Owns: tokenizer.json, tokenizer_config.json and generation_config.json made of the metadata: special tokens,
the chat template and its variants, whether a BOS is added, all ids that end a text.
Refuses: tokenizers that are not known, by name; more tokens than the embedding has rows. What the files mean
is embedded.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colibri.convert.gguf.token_lists import KEY, TokenLists, read_lists, texts, value
from colibri.convert.gguf.tokenizer_models import MODELS, pre_tokenizer_of, tokenizer_of
from colibri.errors import ConversionError

_WITHOUT = ("no_vocab", "none")
_TEMPLATE = "tokenizer.chat_template"
# Names of the tokens in tokenizer_config.json, by the name in GGUF's key.
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "cls": "cls_token",
    "mask": "mask_token",
}


def has_tokenizer(metadata: dict[str, Any]) -> bool:
    return KEY + "model" in metadata and not _is_without(metadata)


def _is_without(metadata: dict[str, Any]) -> bool:
    """llama.cpp calls the kind of none so."""
    model = metadata.get(KEY + "model")
    return isinstance(model, str) and model in _WITHOUT


def small_files(metadata: dict[str, Any], file: Path, n_rows: int, notes: list[str]) -> dict[str, bytes]:
    """The files by name, none where the file says that it has no tokenizer. n_rows: rows of the embedding;
    file: what messages name."""
    if _is_without(metadata) or not any(key.startswith("tokenizer.") for key in metadata):
        return {}
    try:
        model = value(metadata, KEY + "model", str)
        if model not in MODELS:
            found = f"no {KEY}model" if model is None else f"{KEY}model = {model!r:.60}"
            raise ValueError(f"{found}, expected a kind of tokenizer that is read: {', '.join(MODELS)}")
        lists = read_lists(metadata, model, notes)
        if len(lists.tokens) > n_rows:
            raise ValueError(
                f"{len(lists.tokens)} tokens in {KEY}tokens, but its embedding has only {n_rows} rows: the "
                "tokenizer does not belong to these weights"
            )
        tokenizer = tokenizer_of(metadata, lists, notes)
        settings = _settings(metadata, lists, notes)
    except ValueError as error:
        raise ConversionError(
            f"{file} has {error}. If it is whole (compare its size with the source's), convert the model's "
            "Hugging Face directory instead."
        ) from error
    generation: dict[str, Any] = {"eos_token_id": lists.ends}
    if "bos" in lists.special:
        generation["bos_token_id"] = lists.special["bos"]
    if not lists.ends:
        notes.append("GGUF: no token ends a text; texts go on until the limit")
    made = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in made.items()}


def _settings(metadata: dict[str, Any], lists: TokenLists, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        key: text for name, key in _NAMES.items() if (text := lists.text_of(name)) is not None
    }
    pre = pre_tokenizer_of(metadata, lists.model)
    usual = lists.model in ("llama", "bert") or (pre is not None and pre.add_bos)
    add_bos = value(metadata, KEY + "add_bos_token", bool, usual)
    if pre is not None and pre.spaces and pre.add_bos:
        add_bos = True  # Gemma 4, which files got wrong
    if add_bos and "bos" not in lists.special:
        notes.append(f"GGUF: texts should begin with a BOS, but there is no {KEY}bos_token_id: they do not")
    settings["add_bos_token"] = bool(add_bos and "bos" in lists.special)
    settings["add_eos_token"] = bool(value(metadata, KEY + "add_eos_token", bool, lists.model == "t5"))
    template = _template(metadata)
    if template is not None:
        settings["chat_template"] = template
    return settings


def _template(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """One template, or all by name where there are several. The one without a name is called default."""
    main = value(metadata, _TEMPLATE, str)
    names = texts(metadata, _TEMPLATE + "s") if _TEMPLATE + "s" in metadata else []
    keys = [key for key in metadata if key.startswith(_TEMPLATE + ".")]
    variants = {name: value(metadata, f"{_TEMPLATE}.{name}", str) for name in names}
    variants.update((key[len(_TEMPLATE) + 1 :], value(metadata, key, str)) for key in keys)
    if main:
        variants["default"] = main
    found = [{"name": name, "template": text} for name, text in variants.items() if text]
    if main and len(found) == 1:
        return str(main)
    return found or None
