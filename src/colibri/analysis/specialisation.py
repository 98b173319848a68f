"""Whether experts are for something: kinds of tokens, or what a text is about (information.py says how).

    by class:  does the choice tell letters from digits, spaces, punctuation …? Units are token ids: a router
               that treats every id in its own way, without regard to its class, shows nothing.
    by domain: does it tell the labels of texts apart? Units are texts.

Owns: classes of tokens, units of both questions. Refuses: texts of tokens (tokens.py).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

import numpy as np

from colibri.analysis.array_file import Array
from colibri.analysis.choices import Choices, counts_by
from colibri.analysis.information import Information, label_information

CLASSES = (
    "word start",  # letters behind a space
    "letters",
    "digits",
    "punctuation",
    "symbols",
    "spaces",
    "mixed",
    "control",  # control tokens, such as the beginning of a text
    "bytes",  # part of a character
)
_KINDS = {"L": "letters", "M": "letters", "N": "digits", "P": "punctuation", "S": "symbols", "Z": "spaces"}


def token_class(text: str, control: bool = False) -> str:
    """The class of a token by its text, which is "" or holds U+FFFD if the token is a part of a character.
    A space in front of a word or a sign belongs to it."""
    if control:
        return "control"
    if not text or "\ufffd" in text:
        return "bytes"
    inside = text.strip()
    if not inside:
        return "spaces"
    kinds = {_KINDS.get(unicodedata.category(letter)[0], "symbols") for letter in inside}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    return "word start" if kind == "letters" and text[0].isspace() else kind


def by_class(choices: Choices, ids: Array, classes: Mapping[int, str]) -> Information:
    """What a layer's choices say of the class of the token that is read. ids: [n_rows] of the trace;
    classes: of every id, names of CLASSES. The table's rows are CLASSES."""
    seen, unit = np.unique(ids[choices.rows], return_inverse=True)
    counts = counts_by(unit, len(seen), choices.experts, choices.n_experts)
    labels = np.array([CLASSES.index(classes[id]) for id in seen.tolist()], np.int64)
    return label_information(counts, labels, len(CLASSES))


def by_domain(choices: Choices, sequences: Array, labels: Array, n_labels: int) -> Information:
    """What a layer's choices say of what a text is about. sequences: [n_rows] of the trace; labels:
    [n_sequences]; -1: none."""
    counts = counts_by(sequences[choices.rows], len(labels), choices.experts, choices.n_experts)
    return label_information(counts, labels, n_labels)


def preferences(found: Information) -> Array:
    """[n_labels, n_experts] how many times as often an expert is chosen for a label as for all: p(e | c) /
    p(e), the lift; NaN where there is neither."""
    table = found.table
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((table / table.sum(1, keepdims=True)) / (table.sum(0) / table.sum()))
