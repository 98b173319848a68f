"""How the texts of one model begin: prompts, conversations and the starts of targets to ids, and with the
options of a generation to a Writing.

Owns: the model's own rules for texts (generation.json, tokenizer, chat template) and what cannot be done
without them. Refuses: evaluating (sequences.py), choosing ids (drawing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri import chat
from colibri import sampling as sampling_rules
from colibri._native import Ids
from colibri.arguments import IdList, checked_ids
from colibri.constraints import Constraint
from colibri.drawing import Chooser, Writing
from colibri.errors import ArgumentError, UnsupportedError
from colibri.generate import Answer, NoText, Work
from colibri.model_facts import TextRules
from colibri.sampling import Options
from colibri.tokenizer import Tokenizer

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]


class Prompts:
    """The rules of one open model."""

    def __init__(
        self,
        path: Path,
        rules: TextRules,
        template: str | None,
        n_vocab: int,
        n_vocab_used: int,
        room: Callable[[int], int],
    ) -> None:
        """n_vocab_used: ids from there on are padding. room: positions that are left after so many."""
        self.template = template
        self.end_ids: Sequence[int] = rules.generation["eos_ids"]
        self.source_rules = rules.source
        self.known_tokenizer = rules.tokenizer  # None: there is none
        self.defaults, self._template_names = (
            rules.generation["defaults"],
            rules.generation["special_tokens"],
        )
        self._path, self._n_vocab, self._n_vocab_used, self._room = path, n_vocab, n_vocab_used, room

    @property
    def tokenizer(self) -> Tokenizer:
        if self.known_tokenizer is None:
            raise UnsupportedError(
                f"{self._path} has no tokenizer, so it takes and gives ids only: pass a list of ids, or "
                "convert a checkpoint with a tokenizer.json"
            )
        return self.known_tokenizer

    # --- to ids

    def of_text(self, prompt: Prompt, src_lang: str | None) -> Ids:
        """What is evaluated for a prompt, or read by an encoder."""
        rules = self.source_rules
        if src_lang is not None and (rules is None or not isinstance(prompt, str)):
            raise ArgumentError(
                f"src_lang={src_lang!r} has no effect but on a text for a model with an encoder"
            )
        if not isinstance(prompt, str):
            return checked_ids(prompt, self._n_vocab)
        if rules is not None:
            return checked_ids(rules.source(self.tokenizer.encode(prompt), src_lang), self._n_vocab)
        ids = self.tokenizer.encode_prompt(prompt)
        if not ids:
            raise ArgumentError(
                "prompt: it is empty, and the model has no BOS token to begin a text with; give a text"
            )
        return checked_ids(ids, self._n_vocab)

    def of_target(self, tgt_lang: str | None) -> list[int]:
        """What a target begins with."""
        if self.source_rules is None:
            raise UnsupportedError("start_ids: the model has no encoder: what it writes continues its prompt")
        return self.source_rules.start(tgt_lang)

    def of_chat(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[int]:
        """What a conversation becomes."""
        if self.source_rules is not None:
            raise UnsupportedError(
                "chat: the model reads a text and writes another: it holds no conversations; give the text "
                "as a prompt, to generate() or to `colibri run` without --chat"
            )
        tokenizer = self.tokenizer
        text, mark = chat.render(
            self.template,
            messages,
            control=tokenizer.control_ids,
            tools=tools,
            variables={**self._template_names, **(variables or {})},
        )
        return tokenizer.encode(text, special=True, mark=mark)

    # --- to what is written

    def continuing(
        self, prompt: Prompt, src_lang: str | None, tgt_lang: str | None, options: Options
    ) -> Writing:
        """What continues a prompt; of a model with an encoder, what is made of it."""
        ids = self.of_text(prompt, src_lang)
        if self.source_rules is not None:
            start = np.array(self.source_rules.start(tgt_lang), np.int32)
            return self._writing(start, options, answer=True, source=ids)
        if tgt_lang is not None:
            raise ArgumentError(f"tgt_lang={tgt_lang!r} has no effect: the model has no encoder")
        return self._writing(ids, options, answer=False)

    def answering(self, ids: IdList, options: Options, *, special: bool = False) -> Writing:
        """What answers a conversation, which of_chat() has made ids of. special: control tokens appear in its
        text under their names."""
        return self._writing(checked_ids(ids, self._n_vocab), options, answer=True, special=special)

    def _writing(
        self, ids: Ids, options: Options, *, answer: bool, source: Ids | None = None, special: bool = False
    ) -> Writing:
        given = sampling_rules.from_options(options)
        if given.stop and self.known_tokenizer is None:
            raise ArgumentError("stop: the model has no tokenizer, so there is no text to look for it in")
        if given.prompt_logprobs is not None and source is not None:
            raise ArgumentError(
                "prompt_logprobs has no effect: the model reads its prompt and does not write such texts"
            )
        chosen, work = sampling_rules.resolve(given, self.defaults), Work()
        room = self._room(len(ids))
        limit = room if given.max_tokens is None else min(room, given.max_tokens)
        decoder = (
            NoText()
            if self.known_tokenizer is None
            else self.known_tokenizer.decoder(start=answer, special=special)
        )
        constraint = None
        if chosen.constrained:
            constraint = Constraint(self.tokenizer, self.end_ids, self._n_vocab, chosen)
        return Writing(
            ids=ids,
            source=source,
            limit=limit,
            answer=Answer(decoder, limit=limit, end_ids=frozenset(self.end_ids), stops=chosen.stops),
            chooser=Chooser(chosen, self._n_vocab, self._n_vocab_used, constraint, work),
            work=work,
            seed=chosen.seed,
        )
