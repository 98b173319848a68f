"""An answer's text taken apart while it comes: what it says, what it thinks, what it calls.

Owns: the marks of reasoning and of channels, and that nothing is shown too early: what could be the beginning
of a mark is held back. Refuses: calls themselves (tool_calls.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colibri.engine import Model
from colibri.generate import overlap
from colibri.server.tool_calls import Call, Form, calls_in_json, form_of

Delta = dict[str, Any]  # fields of a message: content, reasoning_content, tool_calls

CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"


@dataclass(frozen=True, slots=True)
class Parser:
    """What is looked for in the answers of one request."""

    form: Form | None = None
    forced: bool = False  # the whole answer is a call
    reasoning: tuple[str, str] | None = None  # what begins and ends it
    thinks_first: bool = False  # the prompt has opened the reasoning already
    channels: bool = False  # the answer is a row of messages in channels
    hidden: tuple[str, ...] = ()  # names of control tokens, which are no text

    @property
    def special(self) -> bool:
        """Whether control tokens must be seen."""
        return bool(self.hidden)


def parser_of(model: Model, ids: Sequence[int], *, tools: bool, forced: bool) -> Parser:
    """For a conversation's ids. tools: calls are looked for."""
    template, tokenizer = model.chat_template or "", model.tokenizer
    form = form_of(template) if tools and not forced else None
    channels = CHANNEL in template and MESSAGE in template
    reasoning = next((pair for pair in _REASONING if pair[1] in template and not channels), None)
    end = tokenizer.decode(ids[-16:], special=True).rstrip()
    marks = {CHANNEL} if channels else {form.open} if form is not None else set()
    marks |= set(reasoning or ())
    controls = tuple(tokenizer.control_ids)
    return Parser(
        form=form,
        forced=forced,
        reasoning=reasoning,
        thinks_first=reasoning is not None and end.endswith(reasoning[0]),
        channels=channels,
        hidden=controls if marks & set(controls) else (),
    )


class Parts:
    """One answer."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._held = ""
        self._mode = "header" if parser.channels else "reasoning" if parser.thinks_first else "content"
        if parser.forced or (parser.form is not None and not parser.form.open):
            self._mode = "call"
        self._began = False  # something of this part has been shown
        self._header = self._to = ""  # of a message in a channel, and whom it is for
        self.called = 0

    def push(self, text: str) -> list[Delta]:
        """What of a piece, and of what was held, may be shown now."""
        self._held += text
        found: list[Delta] = []
        while (step := self._step()) is not None:
            found += step
        return found

    def finish(self) -> list[Delta]:
        """What was held back, at the end."""
        text, self._held = self._held, ""
        return self._text(text, "")

    # --- one mark further

    def _step(self) -> list[Delta] | None:
        """The text before the next mark, which is passed; None: there is none yet."""
        if self._mode == "call" and self._close() is None:
            return None  # to the end
        marks = self._marks()
        at, mark = min(
            ((self._held.find(mark), mark) for mark in marks if mark in self._held), default=(-1, "")
        )
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            shown = self._text(text, mark)
            self._pass(mark, text)
            return shown
        if self._mode in ("call", "header"):
            return None
        keep = max((overlap(self._held, mark) for mark in marks), default=0)
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return self._text(text, "") or None

    def _text(self, text: str, mark: str) -> list[Delta]:
        """A text that the mark ends, if there is one."""
        if self._mode == "call":
            return self._call(text, mark)
        return [] if self._mode == "header" else self._show(text)

    def _close(self) -> str | None:
        if self._parser.channels:
            return END
        return self._parser.form.close if self._parser.form is not None and not self._parser.forced else None

    def _marks(self) -> list[str]:
        """What ends the part at hand, or is to vanish from it."""
        parser, marks = self._parser, list(self._parser.hidden)
        if self._mode == "call":
            return [mark for mark in (self._close(),) if mark is not None]
        if parser.channels:
            return [*marks, MESSAGE] if self._mode == "header" else marks
        if parser.reasoning is not None:
            marks.append(parser.reasoning[1 if self._mode == "reasoning" else 0])
        if parser.form is not None and parser.form.open:
            marks.append(parser.form.open)
        return marks

    def _pass(self, mark: str, text: str) -> None:
        """The part behind a mark begins. text: what stood in front of it."""
        parser, form = self._parser, self._parser.form
        if parser.channels:
            self._channel(mark, text)
        elif parser.reasoning is not None and mark in parser.reasoning:
            self._mode = "reasoning" if mark == parser.reasoning[0] else "content"
        elif form is not None and mark == form.open:
            self._mode = "call"
        elif self._mode == "call":
            self._mode = "content"
        else:
            return  # a control token that means nothing here
        self._began = False

    def _channel(self, mark: str, text: str) -> None:
        """`<|channel|>`, header, `<|message|>`, text, `<|end|>`, and so on. A header names the channel, and
        whom the message is for."""
        if mark == MESSAGE:
            header = self._header + text
            _, _, to = header.partition("to=functions.")
            self._to = to.split()[0] if to.split() else ""
            thinks = header.strip().startswith("analysis")
            self._mode = "call" if self._to else "reasoning" if thinks else "content"
        elif self._mode == "header" and mark != CHANNEL:
            self._header += text + " "
        else:
            self._mode, self._header = "header", ""
        self._began = False

    # --- what is shown

    def _show(self, text: str) -> list[Delta]:
        if not self._began and self._parser.reasoning is not None:
            text = text.lstrip("\n")  # line ends between the parts belong to neither
        if not text:
            return []
        self._began = True
        return [{"reasoning_content" if self._mode == "reasoning" else "content": text}]

    def _call(self, text: str, close: str) -> list[Delta]:
        """Calls, or the text as it is where it is none."""
        form = self._parser.form
        for mark in self._parser.hidden if form is None or not self._parser.special else ():
            text = text.replace(mark, "")
        try:
            if self._parser.channels and not self._parser.forced:
                calls = [Call(self._to, text.strip())]
            else:
                calls = calls_in_json(text) if form is None else form.read(text)
        except (ValueError, RecursionError, TypeError):
            shown = text if self._parser.forced or form is None else form.open + text + close
            return [{"content": shown}] if shown else []
        found = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            one = {"index": self.called, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            found.append({"tool_calls": [{**one, "function": function}]})
            self.called += 1
        return found


_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))
