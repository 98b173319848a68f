"""Tool calls as the families of chat templates write them.

Owns: the marks around calls, by what a template says of them, and the reading of what stands between. What
cannot be read is no call: it stays text, nothing is lost. Refuses: streams (parts.py).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A tool call that a model has written."""

    name: str
    arguments: str  # JSON


class Form(NamedTuple):
    """How a family writes calls: `open`, calls, `close`; None: to the end of the answer."""

    open: str
    close: str | None
    read: Callable[[str], list[Call]]


def form_of(template: str | None) -> Form | None:
    """The form that a template teaches; None: it knows no tools, or in a way that is not known here."""
    if template is None:
        return None
    return next((form for marks, form in _FORMS if all(mark in template for mark in marks)), None)


def calls_in_json(text: str) -> list[Call]:
    """{"name": ..., "arguments": {...}}, "parameters" for "arguments", several of them one after the other or
    in a list. ValueError: it is something else."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip().rstrip(";")
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found += [_call(one) for one in (value if isinstance(value, list) else [value])]
        at += len(text[at:]) - len(text[at:].lstrip("; \n\t\r,"))
    if not found:
        raise ValueError("no call")
    return found


def call_schema(functions: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """What a call of one of these functions (name, schema of its parameters) must match."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in functions
        ]
    }


def _call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else _dumped(arguments))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    """An argument that is written without quotes: JSON where it is JSON, else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _between(text: str, pattern: str) -> list[tuple[str, ...]]:
    found = re.findall(pattern, text, re.DOTALL)
    if not found:
        raise ValueError("no call")
    return found


def _xml_pairs(text: str) -> list[Call]:
    """name, then <arg_key>k</arg_key><arg_value>v</arg_value> for each argument."""
    name, _, rest = text.strip().partition("<arg_key>")
    if not name.strip() or "{" in name:
        raise ValueError("no call")
    pairs = re.findall(r"(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?:<arg_key>|$)", rest, re.DOTALL)
    return [Call(name.strip(), _dumped({key.strip(): _value(value) for key, value in pairs}))]


def _xml_functions(text: str) -> list[Call]:
    """<function=name><parameter=k>v</parameter>…</function>"""
    calls = []
    for name, body in _between(text, r"<function=([^>\s]+)>(.*?)</function>"):
        pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        calls.append(Call(name, _dumped({key: _value(value) for key, value in pairs})))
    return calls


def _listed_calls(text: str) -> list[Call]:
    """A JSON list, or name[ARGS]{...} for each call, with [TOOL_CALLS] between them."""
    if "[ARGS]" not in text:
        return calls_in_json(text)
    calls = []
    for part in filter(str.strip, text.split("[TOOL_CALLS]")):
        name, _, arguments = part.partition("[ARGS]")
        calls.append(Call(re.sub(r"\[CALL_ID\].*", "", name).strip(), _dumped(json.loads(arguments))))
    return calls


def _separated_calls(text: str) -> list[Call]:
    """function, a mark, a name and JSON in a fence; or a name, a mark and JSON."""
    calls = []
    for head, body in _between(text, r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"):
        fenced = re.fullmatch(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*", body, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head.strip(), body)
        calls.append(Call(name, _dumped(json.loads(arguments))))
    return calls


def _numbered_calls(text: str) -> list[Call]:
    """functions.name:0, a mark, JSON."""
    marks = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
    return [
        Call(re.sub(r"^functions\.|:\d+$", "", name.strip()), _dumped(json.loads(arguments)))
        for name, arguments in _between(text, marks)
    ]


def _python_calls(text: str) -> list[Call]:
    """[name(k=v), …], in Python's notation."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no call") from error
    items = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    calls = []
    for item in items:
        if not isinstance(item, ast.Call) or item.args:
            raise ValueError("no call")
        pairs = {pair.arg: ast.literal_eval(pair.value) for pair in item.keywords if pair.arg}
        calls.append(Call(ast.unparse(item.func), _dumped(pairs)))
    return calls


# The first whose marks are all in the template counts.
_FORMS: list[tuple[tuple[str, ...], Form]] = [
    (("<arg_key>",), Form("<tool_call>", "</tool_call>", _xml_pairs)),
    (("<function=", "<tool_call>"), Form("<tool_call>", "</tool_call>", _xml_functions)),
    (("<tool_call>",), Form("<tool_call>", "</tool_call>", calls_in_json)),
    (("<｜tool▁calls▁begin｜>",), Form("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _separated_calls)),
    (
        ("<|tool_calls_section_begin|>",),
        Form("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _numbered_calls),
    ),
    (("<|tool_call_start|>",), Form("<|tool_call_start|>", "<|tool_call_end|>", _python_calls)),
    (("[TOOL_CALLS]",), Form("[TOOL_CALLS]", None, _listed_calls)),
    (("<|tool_call|>",), Form("<|tool_call|>", "<|/tool_call|>", calls_in_json)),
    (("<|python_tag|>",), Form("<|python_tag|>", None, calls_in_json)),
    (('"parameters"', "ipython"), Form("", None, calls_in_json)),
]
