"""The tokens of a GGUF file as its metadata lists them: texts, types, scores, which ids mean what.

Owns: the keys under tokenizer.ggml, their types and lengths, which tokens end a text, which of them text can
never become, padding at the end of the list. Facts: ggml's gguf.md, llama.cpp's reading of these keys.
Refuses: lists that are absent, of other types or of other lengths, tokens that occur twice, ids that no token
has. How text becomes ids is for tokenizer_models.py to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colibri.convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

KEY = "tokenizer.ggml."
_NONE = (-1, (1 << 32) - 1)  # what some writers put for "there is none"
_PADDING = re.compile(r"\[PAD\d+\]")
_SPECIAL = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Special tokens by the part of their key before "_token_id"; the first ones steer generation.
_STEERING = ("bos", "eos", "eot", "eom", "unknown")
_FURTHER = ("seperator", "padding", "cls", "mask")
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
# Tokens for filling gaps in code. A model that writes one of the last three kinds has ended its text.
_FILLING = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
    "<|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_ENDING = ("fim_pad", "fim_rep", "fim_sep")
# Where a tokenizer.ggml.model has these tokens if no key says so.
_USUAL = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "cls": 101, "mask": 103, "padding": 0},
}


@dataclass(slots=True)
class TokenLists:
    """One entry per id, without padding at the end. special: ids by the name in their key; ends: ids that end
    a text, that of eos first; holes: ids that stand for no text."""

    model: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    special: dict[str, int]
    ends: list[int] = field(default_factory=list)
    holes: set[int] = field(default_factory=set)

    def text_of(self, name: str) -> str | None:
        id = self.special.get(name)
        return None if id is None or id in self.holes else self.tokens[id]


def value(metadata: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A single value, as the type it has to have."""
    found = metadata.get(key, default)
    if found is not default and (not isinstance(found, kind) or isinstance(found, bool) != (kind is bool)):
        raise ValueError(f"{key} = {found!r:.60}, expected {_NAMES[kind]}, found {type(found).__name__}")
    return found


_NAMES = {bool: "true or false", int: "a whole number", str: "a text"}


def texts(metadata: dict[str, Any], key: str) -> list[str]:
    found = metadata.get(key)
    if found is None:
        raise ValueError(f"no {key}; expected a list of texts")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{key} of another kind, expected a list of texts, found {_kind(found)}")
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text in {key} that is not UTF-8") from None
    return found


def numbers(metadata: dict[str, Any], key: str, kinds: str, n_tokens: int | None = None) -> Any:
    """An array of numbers, as many as there are tokens; None if there is none. kinds: numpy's letters for
    its type."""
    found = metadata.get(key)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in kinds:
        raise ValueError(f"{key} of another kind, expected an array of numbers, found {_kind(found)}")
    if n_tokens is not None and len(found) != n_tokens:
        raise ValueError(f"{len(found)} entries in {key}, but {n_tokens} in {KEY}tokens")
    return found


def _kind(found: Any) -> str:
    return (
        f"{type(found).__name__} of {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
    )


def read_lists(metadata: dict[str, Any], model: str, notes: list[str]) -> TokenLists:
    """A ValueError says what is wrong with them."""
    tokens = texts(metadata, KEY + "tokens")
    if not tokens:
        raise ValueError(f"an empty {KEY}tokens")
    types = numbers(metadata, KEY + "token_type", "iu", len(tokens))
    scores = numbers(metadata, KEY + "scores", "iuf", len(tokens))
    if types is None:
        kinds = [BYTE if model != "gpt2" and _BYTE.fullmatch(text) else NORMAL for text in tokens]
    else:
        kinds = [kind if NORMAL <= kind <= BYTE else UNUSED for kind in types.tolist()]
    special = _special(metadata, model, tokens, None if types is None else kinds, notes)
    tokens, kinds = _without_padding(tokens, kinds, special)
    lists = TokenLists(
        model, tokens, kinds, None if scores is None else scores[: len(tokens)].tolist(), special
    )
    lists.holes = {
        id
        for id, text in enumerate(tokens)
        if not text or (kinds[id] != NORMAL and _PADDING.fullmatch(text) and id not in special.values())
    }
    _name_holes(lists)
    _refuse_twice(tokens)
    _set_ends(lists, metadata.get(KEY + "merges"))
    _protect(lists, types is None)
    return lists


def _special(
    metadata: dict[str, Any], model: str, tokens: list[str], kinds: list[int] | None, notes: list[str]
) -> dict[str, int]:
    found: dict[str, int] = {}
    last = f"{KEY}tokens ends with id {len(tokens) - 1}"
    for name in (*_STEERING, *_FURTHER, *_FILLING):
        key = f"{KEY}{name}_token_id"
        id = value(metadata, key, int)
        if id is not None and id not in _NONE and not 0 <= id < len(tokens):
            if name in _STEERING:
                raise ValueError(f"{key} = {id}, but {last}")
            notes.append(f"{key} = {id} is left out: {last}")
        elif id is not None and id not in _NONE:
            found[name] = id
        elif (usual := _USUAL.get(model, {}).get(name, len(tokens))) < len(tokens) and (
            kinds[usual] in (CONTROL, UNKNOWN) if kinds else _SPECIAL.fullmatch(tokens[usual])
        ):
            found[name] = usual  # a token that no text becomes
    if model == "bert" and "cls" in found:
        found.setdefault("bos", found["cls"])
    return found


def _without_padding(
    tokens: list[str], kinds: list[int], special: dict[str, int]
) -> tuple[list[str], list[int]]:
    """Rows of the embedding that no text uses get names in GGUF. Without them they are never sampled."""
    end, least = len(tokens), max(special.values(), default=0) + 1
    while end > least and (kinds[end - 1] == UNUSED or _PADDING.fullmatch(tokens[end - 1])):
        end -= 1
    return tokens[:end], kinds[:end]


def _name_holes(lists: TokenLists) -> None:
    """Two empty tokens are no token twice. Text never holds such a name: it is no token of a kind that text
    becomes."""
    for id in lists.holes:
        lists.kinds[id] = UNUSED
        if not lists.tokens[id]:
            lists.tokens[id] = f"[EMPTY_{id}]"


def _refuse_twice(tokens: list[str]) -> None:
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for id, text in enumerate(tokens):
            if first.setdefault(text, id) != id:
                raise ValueError(f"the token {text!r:.60} twice, as ids {first[text]} and {id}")


def _set_ends(lists: TokenLists, merges: Any) -> None:
    """eos, eot and eom, whatever they are called, then tokens of names that end a turn or a text. The start
    of a turn is no such name, and a token that merges make of a text is text (Qwen's </s>)."""
    ids = {text: id for id, text in enumerate(lists.tokens) if text.endswith((">", "]", "["))}
    for name, candidates in _FILLING.items():
        first = min((ids[text] for text in candidates.split() if text in ids), default=None)
        if first is not None:
            lists.special.setdefault(name, first)
    named = {ids[text] for text in _ENDS.split() if text in ids}
    named.update(lists.special[name] for name in _ENDING if name in lists.special)
    if isinstance(merges, list) and any(lists.kinds[id] == NORMAL for id in named):
        made = {str(line).replace(" ", "", 1) for line in merges}
        named = {id for id in named if lists.kinds[id] != NORMAL or lists.tokens[id] not in made}
    texts_of = {lists.tokens[id] for id in named}
    if texts_of & {"<|call|>", "<|calls|>"} and texts_of & {"<|return|>", "<|flush|>"}:
        named.discard(ids.get("<|end|>", -1))  # it ends a message, and another one follows
    if texts_of & {"<|tool_response>", "<|plamo:eos|>"}:
        named.discard(ids.get("</s>", -1))  # an ordinary piece of text there
    stated = [lists.special[name] for name in ("eos", "eot", "eom") if name in lists.special]
    lists.ends = list(dict.fromkeys([*stated, *sorted(named)]))


def _protect(lists: TokenLists, untyped: bool) -> None:
    """No text may become a token that steers generation, whatever type the file gives it."""
    names = ("eos", "eot", "eom", *_FILLING, *(("bos", *_FURTHER) if untyped else ()))
    for id in {*lists.ends, *(lists.special[name] for name in names if name in lists.special)}:
        if lists.kinds[id] in (NORMAL, USER_DEFINED, UNUSED):
            lists.kinds[id] = CONTROL
    if untyped and "unknown" in lists.special:
        lists.kinds[lists.special["unknown"]] = UNKNOWN
