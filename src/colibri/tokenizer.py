"""Text to token ids and back, around the `tokenizers` package.

Owns: which added tokens are control tokens, that no text a user types can become one, one BOS at most, and
decoding token by token into complete characters.
Refuses: templates (chat.py), stop texts (generate.py), tokenizers whose decoder it cannot follow byte by
byte.

Control tokens are the added tokens that the file calls special, the begin and end tokens, and markers of the
shape <|...|>. Before tokenizer.json is handed to `tokenizers`, each of them is renamed to an unguessable
text. So ordinary text never holds one, whatever the model type, and encode(special=True) first replaces the
readable names. Added tokens that the file does not call special (such as <think>) stay what the file says
they are: ordinary text."""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from colibri import normalizer
from colibri.byte_letters import BYTE_OF
from colibri.errors import ArgumentError, ModelFileError, UnsupportedError

_MARKER = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DECODERS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")
INSIDE = "tokenizer.json inside the model file"
_NOTHING = re.compile(r"(?!)")


class Tokenizer:
    """One model's tokenizer. Calls from several threads are fine: after creation only a cache changes."""

    def __init__(
        self,
        tokenizer_json: bytes | str,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool = False,
        n_vocab: int | None = None,
        at: str = INSIDE,
    ) -> None:
        """at: where errors say that the text is from."""
        try:
            data = json.loads(tokenizer_json)
            self.size = _size(data)
            if n_vocab is not None and self.size > n_vocab:
                raise ModelFileError(
                    f"{at} has {self.size} tokens (ids up to {self.size - 1}), but the embedding "
                    f"has only {n_vocab} rows: tokenizer and weights come from different models; convert "
                    "the checkpoint again"
                )
            controls = _controls(data, {bos_id, *eos_ids})
            aliases = _rename(data, controls)
            prepare = _preparation(data)
            steps = _decoder_steps(data.get("decoder"), at)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{at} cannot be read: {error!r}") from error
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.add_bos = add_bos
        self.control_ids = dict(controls)  # readable text -> id
        self._names = {id: text for text, id in controls.items()}
        self._tokenizer = _build(data, aliases, controls, at)
        self._replacement = {text: aliases.get(text, text) for text in _added(data, aliases) | aliases.keys()}
        self._added = _any_of(self._replacement)
        # found in texts as they are, so their letters are not bytes
        self._texts = {token["id"] for token in data.get("added_tokens") or []}
        self._prepare = prepare
        self._steps = steps
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def encode(self, text: str, special: bool = False, *, mark: str = "") -> list[int]:
        """Ids of a text, without BOS.

        special: control tokens written in the text become control tokens; otherwise they are ordinary text.
        mark: a character that protects: a control token's name with it behind its first character is ordinary
        text, and the mark itself is removed (chat.py puts it into what users wrote)."""
        if not isinstance(text, str):
            raise ArgumentError(f"expected a text (str), found {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"the text is not valid Unicode: {error}") from None
        if special:
            text = self._alias(text, mark)
        if mark:
            text = text.replace(mark, "")
        if self._prepare is not None:
            text = self._prepare(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt to be continued: one BOS before it where the model wants one, and nothing special
        in it."""
        ids = self.encode(text)
        if self.bos_id is not None and (self.add_bos or not ids):
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids. special: control tokens appear under their names instead of vanishing."""
        decoder = self.decoder(start=True, special=special)
        return "".join([decoder.push(int(id)) for id in ids]) + decoder.finish()

    def decoder(self, *, start: bool, special: bool = False) -> Decoder:
        """Decodes one token at a time. start: the text begins here, so that the space which some tokenizers
        put before a text's first word is left out; false when the tokens continue a text."""
        return Decoder(self, start, special)

    def is_control(self, id: int) -> bool:
        return id in self._names

    def token(self, id: int) -> str | None:
        """The token's name in tokenizer.json; None for a padding row of the embedding."""
        name: str | None = self._names.get(id) or (self._tokenizer.id_to_token(id) if id >= 0 else None)
        return name

    def piece(self, id: int, first: bool, special: bool) -> bytes:
        """The bytes that a token adds to a text."""
        if id in self._names:
            return self._names[id].encode() if special else b""
        key = (id, first)
        if key not in self._pieces:
            token = self._tokenizer.id_to_token(id) if id >= 0 else None
            self._pieces[key] = b"" if token is None else _piece(token, self._steps, first, id in self._texts)
        return self._pieces[key]

    def strip_at_start(self) -> int:
        """How many spaces at a text's beginning belong to the tokenizer, not to the text."""
        return sum(
            step["start"] for step in self._steps if step["type"] == "Strip" and step["content"] == " "
        )

    def _alias(self, text: str, mark: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if mark and text.startswith(mark, match.end()):
                return match[0]  # a token of one character: the mark stands behind it
            return self._replacement[match[0]]

        return self._added.sub(replace, text)


class Decoder:
    """Tokens in, complete characters out. A character spread over tokens appears with its last one; what is
    left unfinished at the end becomes one U+FFFD, the same whether a text is streamed or decoded at once."""

    def __init__(self, tokenizer: Tokenizer, start: bool, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._first = start
        self._strip = tokenizer.strip_at_start() if start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes."""
        piece = self._tokenizer.piece(id, self._first, self._special)
        self._first = self._first and self._tokenizer.is_control(id)
        while self._strip and piece:
            if piece[:1] != b" ":
                self._strip = 0
            else:
                piece, self._strip = piece[1:], self._strip - 1
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """The mark for an unfinished character, if there is one."""
        return self._utf8.decode(b"", final=True)


def _size(data: dict[str, Any]) -> int:
    vocabulary = data["model"]["vocab"]
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    return int(1 + max([largest, *(token["id"] for token in data.get("added_tokens") or [])]))


def _controls(data: dict[str, Any], ids: set[int | None]) -> dict[str, int]:
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token["special"] or token["id"] in ids or _MARKER.fullmatch(token["content"])
    }


def _added(data: dict[str, Any], aliases: dict[str, str]) -> set[str]:
    """Contents of the added tokens that are not control tokens; they still win over a control token inside
    them."""
    return {token["content"] for token in data.get("added_tokens") or []} - set(aliases.values())


def _rename(data: dict[str, Any], controls: dict[str, int]) -> dict[str, str]:
    """Renames control tokens everywhere in tokenizer.json; {readable name: alias}."""
    secret = secrets.token_hex(8)
    aliases = {text: f"<control-{secret}-{id}>" for text, id in controls.items()}
    for token in data.get("added_tokens") or []:
        if token["content"] in aliases:
            token.update(content=aliases[token["content"]], normalized=False, special=True)
    model = data["model"]
    if isinstance(model["vocab"], list):  # Unigram: [piece, score]
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        renamed = aliases.keys() & model["vocab"].keys()
        model["vocab"] = {aliases.get(piece, piece): id for piece, id in model["vocab"].items()}
        if renamed and model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if renamed.isdisjoint(_merge_words(merge))]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    # BOS, cutting and filling are decided here, never by the file.
    data.update(post_processor=None, truncation=None, padding=None)
    return aliases


def _preparation(data: dict[str, Any]) -> Callable[[str], str] | None:
    """SentencePiece's own preparation of texts, which `tokenizers` then gets as they are."""
    settings = data.get("normalizer")
    if not isinstance(settings, dict) or settings.get("type") != normalizer.TYPE:
        return None
    data["normalizer"] = None
    return normalizer.preparation(settings, data.get("added_tokens") or [])


def _merge_words(merge: str | list[str]) -> tuple[str, ...]:
    """The two parts of a BPE merge and their product."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return (*parts, "".join(parts))


def _build(data: dict[str, Any], aliases: dict[str, str], controls: dict[str, int], at: str) -> Any:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    except Exception as error:  # the package raises plain Exception
        parts = {name: data.get(name) for name in ("normalizer", "pre_tokenizer", "model")}
        types = {name: part.get("type") for name, part in parts.items() if isinstance(part, dict)}
        shown = ", ".join(f"{name} {type}" for name, type in types.items())
        raise ModelFileError(f"{at} ({shown}) is refused by `tokenizers`: {error}") from error
    for text, alias in aliases.items():
        if tokenizer.token_to_id(alias) != controls[text]:
            raise ModelFileError(
                f"{at}: token {text!r} should have id {controls[text]}, "
                f"`tokenizers` gives it {tokenizer.token_to_id(alias)}"
            )
    return tokenizer


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the texts; the longest where several begin at one place."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else _NOTHING


def _decoder_steps(decoder: dict[str, Any] | None, at: str) -> list[dict[str, Any]]:
    """The decoder as a list of steps that can be followed one token at a time."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        kind = step["type"]
        plain = kind != "Replace" or "String" in step["pattern"]
        if kind not in _DECODERS or not plain or (kind == "Strip" and step["stop"]):
            raise UnsupportedError(
                f"{at} has the decoder {kind}, which cannot be followed "
                f"byte by byte; expected {', '.join(_DECODERS)} (Replace of plain text, Strip at the start)"
            )
    if not steps:
        raise UnsupportedError(f"{at} has no decoder; expected one of {', '.join(_DECODERS)}")
    return list(steps)


def _piece(token: str, steps: list[dict[str, Any]], first: bool, added: bool) -> bytes:
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace":
            drop = first and step.get("prepend_scheme", "always") != "never"
            token = token.replace(step["replacement"], "" if drop else " ")
        elif kind == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        elif kind == "ByteLevel" and not added and all(character in BYTE_OF for character in token):
            return bytes([BYTE_OF[character] for character in token])
    return token.encode("utf-8", "replace")
