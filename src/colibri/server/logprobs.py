"""Log-probabilities of tokens as the two interfaces of OpenAI give them.

Owns: tokens as texts and bytes. Refuses: the numbers (drawing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colibri.generate import Logprobs
from colibri.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[Logprobs], before: int = 0) -> dict[str, Any]:
    """Of the tokens of an answer. before: how many of its tokens came earlier."""
    return {
        "content": [
            {
                **_token(tokenizer, one.id, one.logprob, first=before + at == 0),
                "top_logprobs": [_token(tokenizer, *top, first=before + at == 0) for top in one.top],
            }
            for at, one in enumerate(found)
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer, found: Sequence[tuple[int, Logprobs | None]], offset: int = 0
) -> dict[str, Any]:
    """Of tokens of a text; of the first of a prompt, which nothing predicts, there are none. offset:
    characters in front of them."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for id, one in found:
        text = _text(tokenizer, id)
        top = None if one is None else {_text(tokenizer, at): value for at, value in one.top}
        shown["tokens"].append(text)
        shown["token_logprobs"].append(None if one is None else one.logprob)
        shown["top_logprobs"].append(top)
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown


def _token(tokenizer: Tokenizer, id: int, logprob: float, first: bool = False) -> dict[str, Any]:
    piece = tokenizer.piece(id, first, special=True)
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece(id, first=False, special=True).decode("utf-8", "replace")
