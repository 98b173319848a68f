"""Finds a checkpoint's tokenizer and makes a tokenizer.json of it, if it is a SentencePiece or tiktoken file.

Owns: which file counts, what tokenizer classes do in code: extra tokens, ids that are moved, BOS and EOS.
Facts: the classes of Transformers 4.57 and 5.24.
Refuses: damaged files, and files of the checkpoint that give one token two ids. Its Python code is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colibri.convert import sentencepiece_model, tiktoken_file
from colibri.convert.added_tokens import SPECIAL, Added, added_tokens, texts
from colibri.convert.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, Piece, added_token
from colibri.errors import ConversionError, ModelIOError

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TIKTOKEN = ("tiktoken.model", "tokenizer.tiktoken")
_LARGEST = 64 << 20
# Classes that put BOS before a text unless add_bos_token says otherwise.
_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
# What Transformers takes by model_type where no file names a class.
_OF_MODEL = {
    "switch_transformers": "T5Tokenizer",
    "nllb-moe": "NllbTokenizer",
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer"),
}


def tokenizer_file(path: Path) -> Path | None:
    """The file that decides about the tokens: tokenizer.json wherever there is one."""
    names = ("tokenizer.json", *SENTENCEPIECE, *TIKTOKEN, *sorted(p.name for p in path.glob("*.tiktoken")))
    return next((path / name for name in names if (path / name).is_file()), None)


def as_tokenizer_json(
    file: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    special_map: dict[str, Any],
    notes: list[str],
) -> bytes:
    """A SentencePiece or tiktoken file and the settings beside it as the bytes of a tokenizer.json.
    config: config.json; settings: tokenizer_config.json; special_map: special_tokens_map.json."""
    data = _read(file)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = str(kind or _OF_MODEL.get(str(config.get("model_type")), ""))
    added = added_tokens(file.parent, settings, special_map)
    try:
        if _is_tiktoken(data):
            tokenizer = _of_tiktoken(data, kind, added)
        else:
            kind = kind.removesuffix("Fast")
            tokenizer = _of_sentencepiece(data, kind, settings, special_map, added, notes)
    except UnicodeDecodeError as error:
        raise ConversionError(f"{file} is damaged: a text that is not UTF-8. Download it again.") from error
    except ValueError as error:
        raise ConversionError(
            f"{file}: {error}. If the file is whole, make a tokenizer.json with Transformers where the "
            "checkpoint's code may run: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)."
        ) from error
    notes.append(f"the tokenizer is made from {file.name}, as of {kind or 'a class that adds no tokens'}")
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > _LARGEST:
            raise ConversionError(f"{file} is larger than {_LARGEST >> 20} MiB; that is no {file.name}.")
        return file.read_bytes()
    except OSError as error:
        raise ModelIOError(f"Cannot read {file}: {error.strerror or error}.") from error


def _is_tiktoken(data: bytes) -> bool:
    """Both kinds are called tokenizer.model. A SentencePiece file begins with the tag of its first piece."""
    return data[:1].isalnum() or data[:1] in (b"+", b"/")


# --- the two kinds


def _of_tiktoken(data: bytes, kind: str, added: list[Added]) -> dict[str, Any]:
    rule = tiktoken_file.rule_of(kind)
    ranks = tiktoken_file.read_ranks(data)
    first = max(ranks.values()) + 1
    added = added or [Added(first + at, name, True) for at, name in enumerate(rule.special)]
    if added and added[0].id < first:
        raise ValueError(
            f"{first} ranks, but the files beside it give id {added[0].id} to {added[0].content!r:.60}"
        )
    tokenizer = tiktoken_file.as_tokenizer(ranks, rule)
    _add(tokenizer, added)
    return tokenizer


def _of_sentencepiece(
    data: bytes,
    kind: str,
    settings: dict[str, Any],
    special_map: dict[str, Any],
    added: list[Added],
    notes: list[str],
) -> dict[str, Any]:
    model = sentencepiece_model.read_model(data)
    before, behind = "", ""  # tokens that the class puts around a text
    if kind in _WITH_BOS:
        before = next(texts([settings, special_map], ("bos_token",)), "<s>")
    elif kind == "T5Tokenizer":
        behind = "</s>"
        added = _or_behind(added, _sentinels(len(model.pieces), settings))
    elif kind == "NllbTokenizer":
        before, behind = str(settings.get("src_lang") or "eng_Latn"), "</s>"
        _move_as_fairseq(model.pieces)
        added = _or_behind(added, _languages(len(model.pieces), [settings, special_map]))
    ids = {piece.text: id for id, piece in enumerate(model.pieces)}
    for token in added:
        _refuse_other_ids(token, ids, model.pieces, kind)
    named = {text: ids[text] for text in texts([settings, special_map], SPECIAL) if text in ids}
    known = {token.content for token in added}
    added = added + [Added(id, text, True) for text, id in named.items() if text not in known]
    tokenizer, more = sentencepiece_model.as_tokenizer(model, settings.get("legacy") is not False)
    notes += more
    _add(tokenizer, added)
    ids.update((token.content, token.id) for token in added)
    tokenizer["post_processor"] = _template(*((text, ids.get(text)) for text in (before, behind)))
    return tokenizer


def _or_behind(added: list[Added], by_class: list[Added]) -> list[Added]:
    """The class's own tokens come where the files name none behind the pieces."""
    named = any(token.id >= by_class[0].id for token in added) if by_class else True
    return added if named else added + by_class


def _sentinels(first: int, settings: dict[str, Any]) -> list[Added]:
    """T5's, the last one first."""
    count = settings.get("extra_ids", 100)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10_000:
        raise ValueError(f"extra_ids = {count!r:.40} beside it in tokenizer_config.json")
    return [Added(first + at, f"<extra_id_{count - 1 - at}>", True) for at in range(count)]


def _move_as_fairseq(pieces: list[Piece]) -> None:
    """Four tokens in fairseq's order, then SentencePiece's pieces from the fourth on."""
    kinds = {"<s>": CONTROL, "<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}
    pieces[:3] = [Piece(text, 0.0, kind) for text, kind in kinds.items()]


def _languages(first: int, sources: list[dict[str, Any]]) -> list[Added]:
    """NLLB's language codes, in the order in which its files list them, then the mask."""
    names = [*texts(sources, ("additional_special_tokens",)), *texts(sources, ("mask_token",))]
    return [Added(first + at, name, True) for at, name in enumerate(dict.fromkeys(names))]


def _refuse_other_ids(token: Added, ids: dict[str, int], pieces: list[Piece], kind: str) -> None:
    """A token may take the place of a piece that stands for no text, and of no other."""
    own = ids.get(token.content, token.id)
    there = pieces[token.id] if token.id < len(pieces) else None
    if own != token.id:
        has = f"{token.content!r:.60} as piece {own}, but the files beside it give it id {token.id}"
    elif there is not None and there.text != token.content and there.kind in (NORMAL, BYTE):
        has = f"piece {token.id} {there.text!r:.60}, which the files beside it call {token.content!r:.60}"
    else:
        return
    raise ValueError(f"{has}: the tokenizer_class {kind!r} numbers tokens in a way that is not known")


def _add(tokenizer: dict[str, Any], added: Iterable[Added]) -> None:
    """Puts tokens in, in the place of those that have their ids. Ids that nothing has get names with spaces
    in a unigram's list, which has to be whole: no prepared text holds one."""
    tokens = {token["id"]: token for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    for id, content, special, lstrip, rstrip in added:
        tokens[id] = added_token(id, content, special, lstrip=lstrip, rstrip=rstrip)
    if isinstance(vocabulary, dict):
        names = {id: text for text, id in vocabulary.items()} | {id: t["content"] for id, t in tokens.items()}
        tokenizer["model"]["vocab"] = {text: id for id, text in sorted(names.items())}
    else:
        score = vocabulary[tokenizer["model"]["unk_id"]][1]
        end = max([len(vocabulary) - 1, *tokens]) + 1
        vocabulary += [[f"<no token {id}>", score] for id in range(len(vocabulary), end)]
        for id, token in tokens.items():
            vocabulary[id][0] = token["content"]
    tokenizer["added_tokens"] = [tokens[id] for id in sorted(tokens)]


def _template(before: tuple[str, int | None], behind: tuple[str, int | None]) -> dict[str, Any] | None:
    """The post-processor that puts tokens around a text; None if there are none."""
    around = {text: id for text, id in (before, behind) if id is not None}
    if not around:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before[0] in around:
        single.insert(0, {"SpecialToken": {"id": before[0], "type_id": 0}})
    if behind[0] in around:
        single.append({"SpecialToken": {"id": behind[0], "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in around.items()},
    }
