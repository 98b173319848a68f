"""Answers that must match: a JSON schema, a regular expression or a grammar, enforced while ids are chosen.

Owns: the way into the package llguidance, which says what may follow. Every model with a tokenizer can be
held to one; how a text comes about (alone, in a batch, streamed) makes no difference.
Refuses: drawing (drawing.py), which of them may be given together (sampling.py).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.errors import ArgumentError, UnsupportedError
from colibri.sampling import CONSTRAINTS, Sampling
from colibri.tokenizer import Tokenizer

# What llguidance makes of a vocabulary takes seconds for a large one, and serves all answers.
_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


class Constraint:
    """What one answer must match, and how far it has come."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], n_vocab: int, chosen: Sampling) -> None:
        llguidance = _llguidance()
        name = next(name for name in CONSTRAINTS if getattr(chosen, name) is not None)
        vocabulary = _vocabulary(llguidance, tokenizer, end_ids, n_vocab)
        try:
            grammar = _grammar(llguidance.LLMatcher, name, getattr(chosen, name))
        except ValueError as error:
            raise ArgumentError(f"{name}: {error}") from None
        self._matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        self._name = name
        self._mask = np.zeros((n_vocab + 31) // 32, np.int32)
        self._n_vocab = n_vocab
        self._check()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Of every id [n_vocab], whether it may come next."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little").view(np.bool_)

    def consume(self, id: int) -> None:
        """The id has come."""
        self._matcher.consume_token(id)
        self._check()

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ArgumentError(f"{self._name}: {self._matcher.get_error().strip()[:500]}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            f"{', '.join(CONSTRAINTS)} need the package llguidance, which is not installed: "
            "pip install 'colibri-moe[server]', or pip install llguidance"
        ) from None
    return llguidance


# Between the parts of JSON one space may stand: a small model that is held to a schema would else write
# blanks without end.
def _grammar(matcher: Any, name: str, value: Any) -> str:
    if name == "json_schema":
        schema = {"type": "object"} if value is True else value
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"json_schema: expected what JSON can say: {error}") from None
        return str(matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": " ?"}))
    return str(matcher.grammar_from_regex(value) if name == "regex" else matcher.grammar_from_lark(value))


def _vocabulary(llguidance: Any, tokenizer: Tokenizer, end_ids: Sequence[int], n_vocab: int) -> Any:
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        if not end_ids:
            raise UnsupportedError(
                f"{', '.join(CONSTRAINTS)}: the model has no end token, so an answer could not end"
            )
        words = _Words(tokenizer, end_ids[0], n_vocab)
        wrapper = llguidance.TokenizerWrapper(words)
        found = _VOCABULARIES[tokenizer] = llguidance.LLTokenizer(
            wrapper, n_vocab=n_vocab, eos_token=list(end_ids)
        )
    return found


class _Words:
    """A vocabulary as llguidance takes it."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int, n_vocab: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_id, tokenizer.bos_id
        self.special_token_ids = [id for id in range(n_vocab) if tokenizer.is_control(id)]
        self.tokens = [tokenizer.piece(id, first=False, special=True) for id in range(n_vocab)]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")  # llguidance asks once with bytes, to see
        return self._encode(text)
