"""/v1/chat/completions: answers to conversations.

Owns: messages as a template takes them, the body of the answer and of its chunks, tool calls and reasoning as
fields of their own. Refuses: finding them in a text (parts.py).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Hashable
from typing import Any, NamedTuple

from starlette.requests import Request

from colibri.async_engine import AsyncStream
from colibri.sampling import CONSTRAINTS, Options
from colibri.server.choices import begin, pieces, read, unless_gone
from colibri.server.events import DONE, EventStream, event, openai_failure, usage
from colibri.server.failures import Failure
from colibri.server.logprobs import chat_logprobs
from colibri.server.parts import Parser, Parts, parser_of
from colibri.server.requests import ChatMessage, ChatRequest, NamedTool, Tool
from colibri.server.served import Served
from colibri.server.tool_calls import call_schema


async def chat(
    request: Request, body: ChatRequest, served: Served, client: Hashable
) -> dict[str, Any] | EventStream:
    """The answer, or its stream."""
    _check(body)
    tools = _tools(body)
    talk = Talk(
        [template_message(message) for message in body.messages],
        tools,
        forced=_forced(body, tools),
        variables=_variables(body),
    )
    streams, parser = await begin_talk(served, talk, _options(body, served), body.n or 1, client)
    answer = _Answer(served, streams, parser)
    if body.stream:
        return EventStream(request, answer.events(body.usage_at_end), openai_failure)
    await unless_gone(request, read(streams))
    return answer.whole()


class Talk(NamedTuple):
    """A conversation, whichever interface it came by."""

    messages: list[dict[str, Any]]  # as templates take them
    tools: list[Tool]
    forced: list[Tool]  # one of these must be called; none: the model decides
    variables: dict[str, Any]  # for the template


async def begin_talk(
    served: Served, talk: Talk, options: Options, n: int, client: Hashable
) -> tuple[list[AsyncStream], Parser]:
    """Begins to answer a conversation, and says how the answers are to be read."""
    ids = await asyncio.to_thread(
        served.model.chat_ids,
        talk.messages,
        tools=[tool.model_dump(exclude_none=True) for tool in talk.tools] or None,
        variables=talk.variables,
    )
    if talk.forced:
        if any(options.get(name) is not None for name in CONSTRAINTS):
            raise Failure(
                400, "tool_choice and response_format: an answer can be one of them", param="tool_choice"
            )
        named = [(tool.function.name, tool.function.parameters) for tool in talk.forced]
        options = {**options, "json_schema": call_schema(named)}
    parser = parser_of(served.model, ids, tools=bool(talk.tools), forced=bool(talk.forced))
    return await begin(served, served.answering(ids, parser.special), options, n, client), parser


def _check(body: ChatRequest) -> None:
    body.check_stream()
    if body.top_logprobs is not None and not body.logprobs:
        raise Failure(400, "top_logprobs has no effect without logprobs: true", param="top_logprobs")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise Failure(400, "tool_choice: expected tools to choose from, found none", param="tool_choice")
    if body.response_format is not None and body.structured_outputs is not None:
        raise Failure(
            400, "response_format and structured_outputs: leave one out", param="structured_outputs"
        )


def _options(body: ChatRequest, served: Served) -> Options:
    options = body.options(served.model._prompts.defaults)
    if body.response_format is not None:
        options |= body.response_format.constraint()
    most = body.max_completion_tokens
    options["max_tokens"] = body.max_tokens if most is None else most
    options["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return options


def _tools(body: ChatRequest) -> list[Tool]:
    """What the template is told of."""
    return [] if body.tool_choice == "none" else body.tools or []


def _forced(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
    """The tools of which one must be called; none where the model decides."""
    if body.tool_choice == "required":
        return tools
    if not isinstance(body.tool_choice, NamedTool):
        return []
    name = body.tool_choice.function.name
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        raise Failure(
            400, f"tool_choice.function.name: no tool has the name {name!r:.80}", param="tool_choice"
        )
    return found


def _variables(body: ChatRequest) -> dict[str, Any]:
    found = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        found["reasoning_effort"] = body.reasoning_effort
    return found


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: text as one text, arguments of calls as an object."""
    found = message.model_dump(exclude_none=True)
    if message.role == "developer":
        found["role"] = "system"
    if isinstance(message.content, list):
        found["content"] = "".join(part.text for part in message.content)
    for call in found.get("tool_calls", []):
        call["function"]["arguments"] = _object(call["function"]["arguments"])
    found.setdefault("content", "" if message.role != "assistant" else None)
    return found


def _object(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise Failure(
            400, "messages: the arguments of a tool call: expected JSON", param="messages"
        ) from None


class _Answer:
    """The bodies of one answer."""

    def __init__(self, served: Served, streams: list[AsyncStream], parser: Parser) -> None:
        self._served, self._streams = served, streams
        self._parts = [Parts(parser) for _ in streams]
        self._shown = [0] * len(streams)  # tokens whose log-probabilities have been told
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for at, stream in enumerate(self._streams):
            parts = self._parts[at]
            found = [*parts.push(stream.text), *parts.finish()]
            message: dict[str, Any] = {"role": "assistant", "content": None}
            for delta in found:
                _add(message, delta)
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            choices.append(
                {
                    "index": at,
                    "message": {**message, "refusal": None},
                    "logprobs": self._logprobs(at),
                    "finish_reason": self._reason(at),
                }
            )
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(self._streams, len(self._streams))}

    async def events(self, usage_at_end: bool) -> AsyncIterator[str]:
        for at in range(len(self._streams)):
            yield self._chunk(at, {"role": "assistant", "content": ""}, None)
        async for at, piece in pieces(self._streams):
            parts = self._parts[at]
            for delta in parts.finish() if piece is None else parts.push(piece):
                yield self._chunk(at, delta, None)
            if piece is None:
                yield self._chunk(at, {}, self._reason(at))
        if usage_at_end:
            head = {**self._head, "object": "chat.completion.chunk"}
            yield event({**head, "choices": [], "usage": usage(self._streams, len(self._streams))})
        yield DONE

    def _chunk(self, at: int, delta: dict[str, Any], reason: str | None) -> str:
        logprobs = self._logprobs(at) if delta.get("content") != "" else None
        choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def _reason(self, at: int) -> str:
        reason = self._streams[at].result.finish_reason
        return "tool_calls" if self._parts[at].called and reason == "stop" else reason

    def _logprobs(self, at: int) -> dict[str, Any] | None:
        found, before = self._streams[at].logprobs, self._shown[at]
        if found is None:
            return None
        self._shown[at] = len(found)
        return chat_logprobs(self._served.model.tokenizer, found[before:], before)


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """A chunk's part, joined to a whole message."""
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        into = calls[call["index"]]["function"]
        for name, text in call["function"].items():
            into[name] += text
