"""What generation.json of a model file says: which ids end a text, whether a BOS is added, sampling defaults.

Owns: which of a checkpoint's files counts where several speak. Refuses: a post_processor of another
shape than `tokenizers` writes; what else has no meaning is left out, with a note.
"""

from __future__ import annotations

import json
from typing import Any

from colibri.convert.checkpoint import Checkpoint
from colibri.errors import ArgumentError, ConversionError
from colibri.sampling import MODEL_DEFAULTS, Sampling


def special_tokens(*sources: dict[str, Any]) -> dict[str, Any]:
    """Texts of bos_token, eos_token ... that chat templates may name; the first source that has one wins."""
    special: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                special.setdefault(key, text)
    return special


def generation(
    checkpoint: Checkpoint,
    settings: dict[str, Any],
    special: dict[str, Any],
    ids: dict[str, int],
    n_vocab: int,
    notes: list[str],
    defaults: tuple[int | None, tuple[int, ...]],
    tokenizer: bytes | None,
) -> dict[str, Any]:
    config = checkpoint.settings("generation_config.json")
    main = checkpoint.config
    bos_of_tokenizer = ids.get(special.get("bos_token", ""))
    eos_of_tokenizer = ids.get(special.get("eos_token", ""))
    sources = (config.get("eos_token_id"), main.get("eos_token_id"), eos_of_tokenizer)
    eos: list[int] = []
    for value in sources if any(source is not None for source in sources) else (list(defaults[1]),):
        eos += [number for number in (value if isinstance(value, list) else [value]) if number is not None]
    outside = [number for number in eos if not _is_id(number, n_vocab)]
    if outside:
        notes.append(f"eos_token_id: what is no id below {n_vocab} is left out: {outside}")
    eos = [number for number in eos if _is_id(number, n_vocab)]
    candidates = (
        bos_of_tokenizer,
        config.get("bos_token_id"),
        main.get("bos_token_id"),
        defaults[0],
    )
    bos = next((number for number in candidates if _is_id(number, n_vocab)), None)
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):
        try:
            add_bos = tokenizer is not None and _adds(json.loads(tokenizer).get("post_processor"), bos)
        except (AttributeError, LookupError, TypeError) as error:
            raise ConversionError(
                f"{checkpoint.path / 'tokenizer.json'} has a post_processor that cannot be read: {error!r}. "
                "Download it again."
            ) from error
    return {
        "bos_id": bos,
        "eos_ids": list(dict.fromkeys(eos)),
        "add_bos": bool(add_bos and bos is not None),
        "defaults": _sampling_defaults(config, notes),
        "special_tokens": special,
    }


def _is_id(number: Any, n_vocab: int) -> bool:
    return type(number) is int and 0 <= number < n_vocab


def _adds(processor: Any, bos: int | None) -> bool:
    """Whether a post-processor of tokenizer.json puts `bos` before a single text."""
    if not isinstance(processor, dict) or bos is None:
        return False
    if processor.get("type") == "Sequence":
        return any(_adds(part, bos) for part in processor.get("processors") or [])
    if processor.get("type") == "TemplateProcessing":
        first = (processor.get("single") or [{}])[0].get("SpecialToken", {}).get("id")
        return bos in (processor.get("special_tokens", {}).get(first, {}).get("ids") or [])
    return processor.get("type") in ("BertProcessing", "RobertaProcessing") and (
        (processor.get("cls") or ["", None])[1] == bos
    )


def _sampling_defaults(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """What the checkpoint's authors recommend; do_sample false means greedy, true without a temperature
    means 1. What generate() would refuse is left out."""
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    found: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        value = config.get(name)
        try:
            Sampling(**{name: value})
        except ArgumentError as error:
            notes.append(f"a default of generation_config.json is left out: {error}")
            continue
        if value is not None:
            found[name] = value
    if config.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return found
