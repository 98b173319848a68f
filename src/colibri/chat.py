"""A conversation to one text, through the model's own chat template.

Owns: the sandboxed template, what it may call, and that control tokens inside messages and tools stay text.
Refuses: guessing a template for a model that has none, token ids (tokenizer.py), adding a BOS (the template
does, where the model wants one).

How messages are protected: a template decides by looking at its messages (trim, split, startswith, `in`), so
they are given to it nearly as they are. Only where a text holds the name of a control token, or ends with the
beginning of one, an unused character (the mark) is put behind that name's first character. The tokenizer then
sees which names the template wrote itself, and removes the marks.

Limits, by intent: a template that searches messages for control tokens does not find them; one that measures
or cuts such a message counts the mark; one that deletes characters from the middle of a message could build a
name anew. Roles are not protected (templates build names from them) and may not hold such names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from colibri.errors import ArgumentError, ChatTemplateError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
# Unicode noncharacters: valid in UTF-8, never assigned, no white space.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Rendered(NamedTuple):
    """A conversation as text. A control token's name with the mark behind its first character is ordinary
    text."""

    text: str
    mark: str


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    control: Collection[str] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Rendered:
    """The template's text, ready for the answer.

    control: names of the control tokens. tools: given to the template only if there are any. variables:
    further names for the template, bos_token and eos_token among them; they are not protected."""
    if template is None:
        raise ChatTemplateError(
            "the model has no chat template, so it cannot hold a conversation: use generate() or `colibri "
            "run` without --chat, or convert a checkpoint that has one (an instruction-tuned model)"
        )
    check_messages(messages, control)
    mark = _unused(template, messages, tools, variables)
    protect = _protector(control, mark)
    values: dict[str, Any] = {
        **(variables or {}),
        "messages": [{**protect(message), "role": message["role"]} for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        values["tools"] = protect(list(tools))
    return Rendered(_run(template, values, mark), mark)


def _run(template: str, values: Mapping[str, Any], mark: str) -> str:
    import jinja2

    try:
        return _compile(template, mark).render(values)
    except ChatTemplateError:
        raise
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template failed: {error}") from error
    except Exception as error:  # a template is foreign code: whatever it trips over is its failure
        raise ChatTemplateError(
            f"the model's chat template failed: {type(error).__name__}: {error}"
        ) from error


def check_messages(messages: Sequence[Message], control: Iterable[str] = ()) -> None:
    """Raises ArgumentError unless this is a list of {"role": str, "content": str | list | None, ...}."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ArgumentError(
            'messages: expected a list such as [{"role": "user", "content": "Hello"}] with at least one '
            f"message, found {messages!r:.80}"
        )
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ArgumentError(
                f"messages[{at}]: expected a mapping with role and content, found {message!r:.80}"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ArgumentError(f"messages[{at}].role: expected a text such as 'user', found {role!r:.80}")
        if any(name in role for name in control):
            raise ArgumentError(f"messages[{at}].role: expected no control token in it, found {role!r:.80}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list | tuple):
            raise ArgumentError(
                f"messages[{at}].content: expected a text, a list of parts or nothing, found {content!r:.80}"
            )


def _unused(*values: object) -> str:
    """A mark that occurs nowhere in the values."""
    seen: set[str] = set()
    for text in _texts(values):
        seen.update(text)
    for mark in _MARKS:
        if mark not in seen:
            return mark
    raise ArgumentError("messages: expected at least one of the noncharacters U+FDD0 to U+FDEF to be absent")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _protector(control: Iterable[str], mark: str) -> Callable[[object], Any]:
    """A function that copies a value and breaks the names of control tokens in every text within."""
    names = [name for name in control if name]
    if not names:
        return lambda value: value
    ordered = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    inside = re.compile(f"(?=(?:{ordered}))(.)", re.DOTALL)
    # Two texts side by side could make a name together, so a text may not end with the beginning of one
    # either. Beginnings with a letter are left alone: they would change every word, and no model has such
    # names.
    beginnings = {name[:end] for name in names for end in range(1, len(name)) if not name[0].isalnum()}
    longest = max(map(len, names)) - 1

    def inner(text: str) -> str:
        return inside.sub(rf"\1{mark}", text)

    def whole(text: str) -> str:
        text = inner(text)
        cut = max(0, len(text) - longest)
        ends = (text[at] + mark if text[at:] in beginnings else text[at] for at in range(cut, len(text)))
        return text[:cut] + "".join(ends)

    def protect(value: object) -> Any:
        if isinstance(value, str):
            return whole(value)
        if isinstance(value, Mapping):
            return {
                inner(name) if isinstance(name, str) else name: protect(item) for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [protect(item) for item in value]
        return value

    return protect


def template_error(template: str) -> str | None:
    """What is wrong with a template's text, with the line; None if it can be read."""
    import jinja2

    try:
        _compile(template, "")
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


@lru_cache(maxsize=4)
def _compile(template: str, mark: str) -> jinja2.Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks the assistant's words for training; here it only holds its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return text.replace(f"\\u{ord(mark):04x}", mark) if mark and ensure_ascii else text

    def raise_exception(message: object) -> NoReturn:
        raise ChatTemplateError(
            f"the model's chat template refused the messages: {str(message).replace(mark, '')}"
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template)
