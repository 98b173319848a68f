"""Small vocabularies of each kind as GGUF metadata, for the tests of colibri.convert.gguf.vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from colibri.byte_letters import LETTER_OF
from colibri.convert.gguf.vocabulary import small_files
from colibri.convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from colibri.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "a b", "ab c", "< /", "</ s", "</s >")


def metadata(model: str, tokens: list[tuple[str, int, float]], **keys: Any) -> dict[str, Any]:
    """tokens: text, type, score. keys: more of tokenizer.ggml; None takes one away."""
    made: dict[str, Any] = {
        KEY + "model": model,
        KEY + "tokens": [text for text, _, _ in tokens],
        KEY + "token_type": np.array([kind for _, kind, _ in tokens], np.int32),
        KEY + "scores": np.array([score for _, _, score in tokens], np.float32),
    }
    made.update((key if "." in key else KEY + key, value) for key, value in keys.items())
    return {key: value for key, value in made.items() if value is not None}


def byte_level(*further: tuple[str, int], merges: tuple[str, ...] = MERGES, **keys: Any) -> dict[str, Any]:
    """256 bytes, what the merges make, then further tokens with their types."""
    texts = [LETTER_OF[byte] for byte in range(256)] + [line.replace(" ", "") for line in merges]
    tokens = [(text, NORMAL, 0.0) for text in texts] + [(text, kind, 0.0) for text, kind in further]
    keys.setdefault("pre", "gpt-2")
    return metadata("gpt2", tokens, merges=list(merges), **keys)


def pieces(*further: tuple[str, int], model: str = "llama", **keys: Any) -> dict[str, Any]:
    """SentencePiece's BPE with bytes, or unigrams without."""
    words = ("\u2581", "a", "b", "c", "ab", "\u2581ab", "\u2581a", "<", ">", "s", "/")
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    if model == "llama":
        tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, -1.0 - at) for at, text in enumerate(words)]
    tokens += [(text, kind, 0.0) for text, kind in further]
    keys.setdefault("unknown_token_id", 0)
    return metadata(model, tokens, **keys)


def characters(**keys: Any) -> dict[str, Any]:
    """Gemma 4's kind: merges of characters, bytes for the rest."""
    texts = ["\u2581", "a", "b", "\n", "ab", "\u2581a", "\u2581ab", "\n\n"]
    tokens = [("<pad>", CONTROL, 0.0), ("<eos>", CONTROL, 0.0), ("<bos>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, 0.0) for text in texts]
    merges = ["a b", "\u2581 ab", "\u2581 a", "\n \n"]
    return metadata("gemma4", tokens, merges=merges, bos_token_id=2, eos_token_id=1, **keys)


def words(**keys: Any) -> dict[str, Any]:
    """WordPiece as GGUF writes it."""
    tokens = [("[PAD]", CONTROL, 0.0), ("[UNK]", CONTROL, 0.0), ("[CLS]", CONTROL, 0.0)]
    tokens += [
        (text, NORMAL, 0.0) for text in ("\u2581play", "ing", "\u2581,", "\u2581ecole", "s", "\u2581Play")
    ]
    return metadata("bert", tokens, scores=None, unknown_token_id=1, cls_token_id=2, **keys)


def files(data: dict[str, Any], n_rows: int | None = None, notes: list[str] | None = None) -> dict[str, Any]:
    made = small_files(
        data, Path("m.gguf"), n_rows or len(data[KEY + "tokens"]), notes if notes is not None else []
    )
    return {name: json.loads(content) for name, content in made.items()}


def tokenizer(data: dict[str, Any]) -> Tokenizer:
    made = files(data)
    generation, settings = made["generation_config.json"], made["tokenizer_config.json"]
    return Tokenizer(
        json.dumps(made["tokenizer.json"]),
        bos_id=generation.get("bos_token_id"),
        eos_ids=generation["eos_token_id"],
        add_bos=settings["add_bos_token"],
        n_vocab=len(data[KEY + "tokens"]),
    )


def texts_of(data: dict[str, Any], text: str) -> list[str | None]:
    made = tokenizer(data)
    return [made.token(id) for id in made.encode(text)]


__all__ = [
    "CONTROL",
    "KEY",
    "MERGES",
    "NORMAL",
    "UNKNOWN",
    "USER_DEFINED",
    "byte_level",
    "characters",
    "files",
    "metadata",
    "pieces",
    "texts_of",
    "tokenizer",
    "words",
]
