"""A SentencePiece model file as a tokenizer.json.

Owns: the fields of the file, BPE and unigram with byte fallback, which pieces text can become, how ids are
decoded. Facts: sentencepiece_model.proto and SentencePiece 0.2.
Refuses: word and character models, spaces as suffixes, unused pieces inside merges, damaged files. Which ids
tokens outside the file have is tokenizer_files.py's.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colibri.convert.merges import merges
from colibri.convert.protobuf import BYTES, FIXED32, Value, as_float, as_integer, as_text, fields
from colibri.normalizer import SPACE, TYPE, read_charsmap

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_ALL_SPACES = 1 << 20  # at a text's beginning, where runs of spaces are one
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(slots=True)
class SentencePieceModel:
    """What of the file decides about ids; defaults are those of the protocol."""

    pieces: list[Piece] = field(default_factory=list)
    kind: str = "unigram"
    byte_fallback: bool = False
    suffix: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    collapse_spaces: bool = True
    escape_spaces: bool = True

    @property
    def unknown(self) -> int:
        return next(id for id, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)


def read_model(data: bytes) -> SentencePieceModel:
    """A ValueError says what is wrong with the file."""
    model = SentencePieceModel()
    for number, wire, value in fields(memoryview(data)):
        if number == 1 and isinstance(value, memoryview) and wire == BYTES:
            model.pieces.append(_piece(value))
        elif number == 2 and isinstance(value, memoryview) and wire == BYTES:
            _read_trainer(model, value)
        elif number == 3 and isinstance(value, memoryview) and wire == BYTES:
            _read_normalizer(model, value)
        elif number <= 3:
            raise ValueError(f"field {number} is no message")
    check(model)
    return model


def _piece(message: memoryview) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, wire, value in fields(message):
        if number == 1:
            text = as_text(value)
        elif number == 2 and wire == FIXED32:
            score = as_float(value)
        elif number == 3:
            kind = as_integer(value)
        elif number <= 3:
            raise ValueError("a score that is no 32-bit float")
    return Piece(text, score, kind)


def _read_trainer(model: SentencePieceModel, message: memoryview) -> None:
    for number, _, value in fields(message):
        if number == 3:
            kind = as_integer(value)
            model.kind = _KINDS.get(kind, f"number {kind}")
        elif number == 24:
            model.suffix = bool(as_integer(value))
        elif number == 35:
            model.byte_fallback = bool(as_integer(value))


def _read_normalizer(model: SentencePieceModel, message: memoryview) -> None:
    def flag(value: Value) -> bool:
        return bool(as_integer(value))

    for number, wire, value in fields(message):
        if number == 2 and wire == BYTES and isinstance(value, memoryview):
            model.charsmap = bytes(value)
        elif number == 3:
            model.dummy_prefix = flag(value)
        elif number == 4:
            model.collapse_spaces = flag(value)
        elif number == 5:
            model.escape_spaces = flag(value)


def check(model: SentencePieceModel) -> None:
    pieces = model.pieces
    if model.kind not in ("unigram", "BPE"):
        raise ValueError(f"a model of kind {model.kind}; unigram and BPE are supported")
    if model.suffix:
        raise ValueError("spaces that are suffixes of words (treat_whitespace_as_suffix), not supported")
    if sum(piece.kind == UNKNOWN for piece in pieces) != 1:
        raise ValueError(f"{len(pieces)} pieces without exactly one for unknown text")
    text, count = Counter(piece.text for piece in pieces).most_common(1)[0]
    if count > 1 or any(not piece.text for piece in pieces):
        raise ValueError(f"{count} pieces {text!r:.60}" if count > 1 else "an empty piece")
    for id, piece in enumerate(pieces):
        if not NORMAL <= piece.kind <= BYTE or not math.isfinite(piece.score):
            raise ValueError(f"piece {id} of kind {piece.kind} with score {piece.score}")
    n_bytes = sum(piece.kind == BYTE for piece in pieces)
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    if n_bytes != 256 * model.byte_fallback or any(p.kind == BYTE and p.text not in names for p in pieces):
        raise ValueError(f"{n_bytes} byte pieces with byte fallback {'on' if model.byte_fallback else 'off'}")
    if not _normal_scores(model):
        raise ValueError("no normal pieces")
    read_charsmap(model.charsmap)


def as_tokenizer(model: SentencePieceModel, every_stretch: bool) -> tuple[dict[str, Any], list[str]]:
    """tokenizer.json without tokens that the file does not know, and notes. A piece's place is its id.
    every_stretch: the dummy prefix stands before each stretch between added tokens, else before a text."""
    notes: list[str] = []
    body = (_bpe if model.kind == "BPE" else _unigram)(model, notes)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix or model.collapse_spaces:
        n_spaces = _ALL_SPACES if model.collapse_spaces else 1
        decoders.append({"type": "Strip", "content": " ", "start": n_spaces, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(id, p.text, p.kind != USER_DEFINED, prepared=p.kind == USER_DEFINED)
            for id, p in enumerate(model.pieces)
            if p.kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {
            "type": TYPE,
            "charsmap": base64.b64encode(model.charsmap).decode(),
            "dummy_prefix": model.dummy_prefix,
            "every_stretch": every_stretch,
            "collapse_spaces": model.collapse_spaces,
            "escape_spaces": model.escape_spaces,
        },
        "pre_tokenizer": _cut(model),
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders if model.escape_spaces else decoders[1:]},
        "model": body,
    }, notes


def added_token(
    id: int,
    content: str,
    special: bool,
    *,
    prepared: bool = False,
    lstrip: bool = False,
    rstrip: bool = False,
) -> dict[str, Any]:
    """prepared: found in the text as normalizer.py prepares it, and no border of it."""
    return {
        "id": id,
        "content": content,
        "single_word": False,
        "lstrip": lstrip,
        "rstrip": rstrip,
        "normalized": prepared,
        "special": special,
    }


def _bpe(model: SentencePieceModel, notes: list[str]) -> dict[str, Any]:
    """Normal pieces take part in merges, and unused ones, which SentencePiece takes apart again."""
    merged = {p.text: -p.score for p in model.pieces if p.kind in (NORMAL, UNUSED)}
    made = merges(merged, list)
    unused = {p.text for p in model.pieces if p.kind == UNUSED}
    taken_apart = next((a + b for a, b in made if a + b in unused), None)
    if taken_apart is not None:
        raise ValueError(f"the unused piece {taken_apart!r:.60}, which merges make; not supported")
    lonely = next(
        (text for text in merged if len(text) > 1 and any(character not in merged for character in text)),
        None,
    )
    if lonely is not None:
        raise ValueError(f"the piece {lonely!r:.60} of characters that are no pieces; not supported")
    runs = {a + b for a, b in made if len(set(a + b)) == 1}
    scores = Counter(merged[a + b] for a, b in made)
    equal = sum(scores[merged[a + b]] > 1 and a + b not in runs for a, b in made)
    if equal:
        notes.append(
            f"{equal} pieces share their score with another: where two of them overlap in a text, its ids "
            "may differ from SentencePiece's"
        )
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: id for id, piece in enumerate(model.pieces)},
        "merges": [list(pair) for pair in made],
    }


def _unigram(model: SentencePieceModel, notes: list[str]) -> dict[str, Any]:
    """Text becomes normal pieces only, but `tokenizers` knows no kinds. Where text could hold the name of
    another piece, that one gets a score that never wins. Else it keeps 0, so that the lowest score, which
    sets the penalty of unknown text, is SentencePiece's."""
    normal = _normal_scores(model)
    never = 0.0
    if any(p.kind in (BYTE, UNUSED) for p in model.pieces):
        lowest = min([-1.0, *normal.values()])
        never = lowest * (2 + max(len(p.text) for p in model.pieces))
        if any(character not in normal for text in normal for character in text):
            notes.append(
                "some characters stand in pieces but are none: around unknown text, ids may differ from "
                "SentencePiece's"
            )
    return {
        "type": "Unigram",
        "unk_id": model.unknown,
        "vocab": [[p.text, p.score if p.kind == NORMAL else never] for p in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _normal_scores(model: SentencePieceModel) -> dict[str, float]:
    return {p.text: p.score for p in model.pieces if p.kind == NORMAL}


def _cut(model: SentencePieceModel) -> dict[str, Any] | None:
    """With byte fallback, a name such as <0x41> in a text has to be taken apart, even if some of its
    characters are unknown and would cost more than the score that never wins. No piece holds an unknown
    character, so a cut around it changes nothing else."""
    if model.kind == "BPE" or not model.byte_fallback:
        return None
    normal = _normal_scores(model)
    names = "".join(p.text for p in model.pieces if p.kind in (BYTE, UNUSED))
    unknown = sorted({character for character in names if character not in normal})
    if not unknown:
        return None
    pattern = "|".join(re.escape(character) for character in unknown)
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
