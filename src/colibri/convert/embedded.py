"""The files embedded in a model: tokenizer.json, chat_template.jinja, generation.json, source.json.

Owns: which files there are, ids that the embedding has no rows for, the source's fingerprint.
Refuses: a missing tokenizer, a tokenizer with more tokens than the embedding has rows. Tokenizing is
tokenizer.py's, what stands in generation.json is generation.py's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri.chat import template_error
from colibri.convert.checkpoint import Checkpoint
from colibri.convert.generation import generation, special_tokens
from colibri.convert.tokenizer_files import SENTENCEPIECE, TIKTOKEN, as_tokenizer_json, tokenizer_file
from colibri.errors import ConversionError, ModelIOError

# Small files whose whole content ends up in the model or decides about it.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    *SENTENCEPIECE,
    *TIKTOKEN,
)
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Embedded:
    """Blobs by name; n_vocab_used is the number of ids that the tokenizer knows; notes are for the user."""

    blobs: dict[str, bytes]
    n_vocab_used: int
    notes: list[str] = field(default_factory=list)


def read_embedded(
    checkpoint: Checkpoint,
    n_vocab: int,
    bos_default: int | None,
    eos_default: tuple[int, ...],
    require_tokenizer: bool,
) -> Embedded:
    """Everything but source.json."""
    notes: list[str] = []
    settings, special_map = (
        checkpoint.settings("tokenizer_config.json"),
        checkpoint.settings("special_tokens_map.json"),
    )
    blobs: dict[str, bytes] = {}
    tokenizer = _tokenizer(checkpoint, require_tokenizer, settings, special_map, notes)
    ids: dict[str, int] = {}
    n_used = n_vocab
    if tokenizer is None:
        notes.append("no tokenizer: the file can only be evaluated by token ids")
    else:
        blobs["tokenizer.json"], ids = tokenizer
        n_used = _check_vocabulary(checkpoint, ids, settings, n_vocab, notes)
    template = _chat_template(checkpoint, settings)
    if template is not None:
        blobs["chat_template.jinja"] = template.encode()
        if error := template_error(template):
            notes.append(f"the chat template cannot be read ({error}): chats will fail, texts will not")
    special = special_tokens(settings, special_map)
    rules = generation(
        checkpoint,
        settings,
        special,
        ids,
        n_vocab,
        notes,
        (bos_default, eos_default),
        blobs.get("tokenizer.json"),
    )
    blobs["generation.json"] = _dump(rules)
    return Embedded(blobs, n_used, notes)


def source_json(checkpoint: Checkpoint, model_type: str, type: str, version: str) -> bytes:
    name = checkpoint.path.resolve().name
    sha256 = fingerprint(checkpoint.path, checkpoint.files)
    return _dump(
        {"name": name, "sha256": sha256, "converter": version, "model_type": model_type, "type": type}
    )


def fingerprint(path: Path, weights: Iterable[Path]) -> str:
    """SHA-256 over name, size and content of the small files, and over name, size, first and last MiB of each
    weight file: enough to tell checkpoints apart in milliseconds, no proof that every byte is the same.
    """
    digest = hashlib.sha256()
    try:
        others = sorted(file.name for file in path.glob("*.tiktoken") if file.name not in SMALL_FILES)
        for name in (*SMALL_FILES, *others):
            file = path / name
            if file.is_file():
                data = file.read_bytes()
                digest.update(f"{name}\0{len(data)}\0".encode() + data)
        for file in weights:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                digest.update(f"{file.name}\0{size}\0".encode() + stream.read(_SAMPLE))
                stream.seek(max(0, size - _SAMPLE))
                digest.update(stream.read(_SAMPLE))
    except OSError as error:
        raise ModelIOError(f"Cannot read {error.filename or path}: {error.strerror or error}.") from error
    return digest.hexdigest()


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def _tokenizer(
    checkpoint: Checkpoint,
    required: bool,
    settings: dict[str, Any],
    special_map: dict[str, Any],
    notes: list[str],
) -> tuple[bytes, dict[str, int]] | None:
    """The bytes of tokenizer.json, the checkpoint's own or made from its tokenizer file; its ids by token."""
    path = checkpoint.path
    ready = checkpoint.small_file("tokenizer.json")
    file = path / "tokenizer.json" if ready is not None else tokenizer_file(path)
    if file is None:
        if not required:
            return None
        if checkpoint.gguf is not None:
            raise ConversionError(
                f"{path} has no tokenizer (no tokenizer.ggml.model): texts cannot be read. Get a GGUF file "
                "with one; from Python, convert(..., require_tokenizer=False) makes a model for ids alone."
            )
        found = "only vocab.json" if (path / "vocab.json").is_file() else "none"
        raise ConversionError(
            f"{path} needs a tokenizer: tokenizer.json, {', '.join(SENTENCEPIECE)} or {TIKTOKEN[0]}; it has "
            f"{found}. Make a tokenizer.json with Transformers: "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)."
        )
    if ready is not None:
        parsed, data = checkpoint.settings("tokenizer.json"), ready
    else:
        data = as_tokenizer_json(file, checkpoint.config, settings, special_map, notes)
        parsed = json.loads(data)
    model = parsed.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids.update((token, number) for token, number in vocab.items() if isinstance(number, int))
    elif isinstance(vocab, list):  # Unigram: pairs of token and score, in id order
        ids.update(
            (str(pair[0]), number) for number, pair in enumerate(vocab) if isinstance(pair, list) and pair
        )
    added = parsed.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            ids[str(token.get("content"))] = token["id"]
    if not ids:
        raise ConversionError(f"{file} has no vocabulary. Download it again.")
    return data, ids


def _check_vocabulary(
    checkpoint: Checkpoint, ids: dict[str, int], settings: dict[str, Any], n_vocab: int, notes: list[str]
) -> int:
    """Ids beyond the embedding are an error wherever they are written; rows beyond the tokenizer are
    padding."""
    path = checkpoint.path
    added = checkpoint.settings("added_tokens.json").items()
    extra = {token: number for token, number in added if isinstance(number, int)}
    decoder = settings.get("added_tokens_decoder")
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else token
        extra[str(content)] = int(number) if re.fullmatch("[0-9]{1,9}", number) else -1
    own = tokenizer_file(path) if checkpoint.small_files is None else None
    made_from = own.name if own is not None else "tokenizer.json"
    for known, file in ((ids, made_from), (extra, "added_tokens.json or tokenizer_config.json")):
        token, largest = max(known.items(), key=lambda item: item[1], default=("", -1))
        if largest >= n_vocab:
            raise ConversionError(
                f"{path}: {file} has {largest + 1} token ids (the last is {token!r}), but the embedding has "
                f"{n_vocab} rows. The tokenizer does not belong to these weights."
            )
    absent = sorted(token for token in extra if token not in ids)
    if absent:
        notes.append(f"tokens that {made_from} does not have are left out: {', '.join(absent[:5])}")
    used = max(ids.values()) + 1
    if used < n_vocab:
        notes.append(f"{n_vocab - used} embedding rows beyond the tokenizer's {used} ids are never sampled")
    return used


def _chat_template(checkpoint: Checkpoint, settings: dict[str, Any]) -> str | None:
    name = "chat_template.jinja"
    found = checkpoint.small_file(name)
    if found is not None:
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise ConversionError(f"Cannot read {checkpoint.path / name}: {error}.") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    return template if isinstance(template, str) and template else None
