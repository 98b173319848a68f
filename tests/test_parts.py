"""Answers taken apart: reasoning, tool calls of each family of templates, channels, at every cut."""

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from colibri.server.parts import Parser, Parts  # noqa: E402
from colibri.server.tool_calls import form_of  # noqa: E402

CALLS = [
    ("<tool_call>", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    ("<tool_call> <arg_key>", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    (
        "<tool_call> <function=",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
    ("[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    ("<|tool_call_start|>", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
    ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'),
    ("<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    ('ipython "parameters"', '{"name": "f", "parameters": {"a": 1}}'),
]


def joined(parser: Parser, pieces: list[str]) -> dict[str, Any]:
    parts = Parts(parser)
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    deltas = [delta for piece in pieces for delta in parts.push(piece)] + parts.finish()
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            function = call["function"]
            found["calls"].append((call["index"], function["name"], json.loads(function["arguments"])))
    return found


def everywhere_cut(parser: Parser, text: str) -> dict[str, Any]:
    """What comes out; it must be the same for every cut in two, and letter by letter."""
    whole = joined(parser, [text])
    assert joined(parser, list(text)) == whole
    for at in range(len(text)):
        assert joined(parser, [text[:at], text[at:]]) == whole
    return whole


@pytest.mark.parametrize(("template", "text"), CALLS)
def test_calls_of_each_family(template: str, text: str) -> None:
    form = form_of(template)
    assert form is not None
    parser = Parser(form=form)
    found = everywhere_cut(parser, text)
    assert found == {"content": "", "reasoning_content": "", "calls": [(0, "f", {"a": 1})]}
    if form.open:
        found = everywhere_cut(parser, "I look. " + text)
        assert found["content"] == "I look. " and len(found["calls"]) == 1
    if form.close is not None and form.close in text:
        found = everywhere_cut(parser, text + "\n" + text + " bye")
        assert [call[0] for call in found["calls"]] == [0, 1] and found["content"].strip() == "bye"


@pytest.mark.parametrize(("template", "text"), CALLS)
def test_what_is_no_call_stays_text(template: str, text: str) -> None:
    form = form_of(template)
    assert form is not None
    for broken in (form.open + "[what? {", form.open + "{}" + (form.close or ""), "plain < text <tool"):
        found = everywhere_cut(Parser(form=form), broken)
        assert found["content"] == broken and not found["calls"]


@pytest.mark.parametrize("thinks_first", [False, True])
def test_reasoning(thinks_first: bool) -> None:
    form = form_of("<tool_call>")
    parser = Parser(form=form, reasoning=("<think>", "</think>"), thinks_first=thinks_first)
    text = ("" if thinks_first else "<think>\n") + "I see.\nSo</think>\n\nYes <b>" + CALLS[0][1]
    found = everywhere_cut(parser, text)
    assert found == {
        "content": "Yes <b>",
        "reasoning_content": "I see.\nSo",
        "calls": [(0, "f", {"a": 1})],
    }


def test_channels() -> None:
    controls = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>")
    parser = Parser(channels=True, hidden=controls)
    text = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    )
    found = everywhere_cut(parser, text)
    assert found == {"content": "Yes", "reasoning_content": "I think.", "calls": [(0, "f", {"a": 1})]}


def test_a_whole_answer_that_is_a_call() -> None:
    found = everywhere_cut(Parser(forced=True), '{"name": "f", "arguments": {"a": 1}}')
    assert found["calls"] == [(0, "f", {"a": 1})] and found["content"] == ""
    assert everywhere_cut(Parser(forced=True), '{"name": "f", "arg')["content"] == '{"name": "f", "arg'


def test_control_tokens_that_mean_nothing_vanish() -> None:
    parser = Parser(form=form_of("<|tool_call|>"), hidden=("<|tool_call|>", "<|end|>", "<|x|>"))
    found = everywhere_cut(parser, "a<|x|>b<|end|>")
    assert found["content"] == "ab"
