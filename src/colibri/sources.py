"""What a model with an encoder reads, and how it begins to write: ids around a source text, the first ids of
a target, languages.

Owns: the key "encoder" of generation.json. Refuses: languages that the model does not have, and languages for
models without any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from colibri.errors import ArgumentError, ModelFileError


@dataclass(frozen=True, slots=True)
class SourceRules:
    """Ids that a target begins with; those before and behind a source text; ids of languages by name."""

    start_ids: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    languages: dict[str, int]

    def source(self, ids: list[int], src_lang: str | None) -> list[int]:
        """A text's ids as the encoder reads them. None: the language that the tokenizer was saved with."""
        before = list(self.before)
        if src_lang is not None:
            known = set(self.languages.values())
            before = [self._id("src_lang", src_lang), *(id for id in before if id not in known)]
        return [*before, *ids, *self.after]

    def start(self, tgt_lang: str | None) -> list[int]:
        """The ids that a target in this language begins with."""
        if tgt_lang is not None:
            return [*self.start_ids[:1], self._id("tgt_lang", tgt_lang)]
        if self.languages and len(self.start_ids) == 1:
            raise ArgumentError(
                f"tgt_lang: the model writes in {len(self.languages)} languages; give one of them, such as "
                f"{next(iter(self.languages))!r}"
            )
        return list(self.start_ids)

    def _id(self, name: str, language: str) -> int:
        if not self.languages:
            raise ArgumentError(f"{name}={language!r} has no effect: the model knows no languages by name")
        if language not in self.languages:
            alike = [known for known in self.languages if known[:3] == str(language)[:3]]
            shown = ", ".join((alike or list(self.languages))[:8])
            raise ArgumentError(f"{name}: {language!r} is not a language of the model; it has {shown} ...")
        return self.languages[language]


def source_rules(found: object, n_vocab: int) -> SourceRules:
    """The key "encoder" of generation.json, checked."""

    def ids(value: object) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(id) is int and 0 <= id < n_vocab for id in value)

    known: dict[str, Any] = found if isinstance(found, dict) else {}
    start, before, after, languages = (
        known.get(name) for name in ("start_ids", "before", "after", "languages")
    )
    if (
        not (ids(start) and start and ids(before) and ids(after))
        or not isinstance(languages, dict)
        or not ids(list(languages.values()))
    ):
        raise ModelFileError(
            "the embedded generation.json of a model with an encoder: expected "
            '"encoder": {"start_ids": [int, ...], "before": [], "after": [], "languages": {}}, '
            f"found {found!r:.200}; convert the model again"
        )
    return SourceRules(tuple(start), tuple(before), tuple(after), dict(languages))
