"""The texts of a trace's tokens: from the tokenizer inside the model file, which a trace does not repeat.

Owns: the text that each token adds, the class of each id. Refuses: another model than the trace's (by
rewriting.check_trace).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri.analysis.array_file import Array
from colibri.analysis.specialisation import token_class
from colibri.errors import UnsupportedError
from colibri.format import Container, read_blobs
from colibri.model_facts import text_rules
from colibri.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokens:
    """Names and classes of ids: of every id that a trace holds."""

    tokenizer: Tokenizer
    classes: dict[int, str]

    def texts(self, ids: Array) -> list[str]:
        """What each of the ids of one text adds to it: complete characters, so a token that only begins one
        adds ""; control tokens under their names."""
        decoder = self.tokenizer.decoder(start=True, special=True)
        return [decoder.push(int(id)) for id in ids]

    def name(self, id: int) -> str:
        """The token's name in tokenizer.json."""
        return self.tokenizer.token(id) or f"id {id}"


def tokens_of(container: Container, ids: Array) -> Tokens:
    """ids: of a trace. The tokenizer is that of the model file."""
    tokenizer = text_rules(read_blobs(container.path), container.config).tokenizer
    if tokenizer is None:
        raise UnsupportedError(f"{container.path} has no tokenizer: a report has ids in the place of texts")
    classes = {}
    for id in np.unique(ids).tolist():
        text = tokenizer.piece(id, False, True).decode("utf-8", "replace")
        classes[id] = token_class(text, tokenizer.is_control(id))
    return Tokens(tokenizer, classes)
