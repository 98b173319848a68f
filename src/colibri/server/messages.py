"""/v1/messages: answers to conversations in the shape of Anthropic's interface.

Owns: its bodies, its events, its failures. Refuses: conversations (chat.py), pictures, documents.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from colibri.async_engine import AsyncStream
from colibri.sampling import Options
from colibri.server.chat import Talk, begin_talk
from colibri.server.choices import pieces, read, unless_gone
from colibri.server.events import EventStream, event
from colibri.server.failures import Failure
from colibri.server.parts import Delta, Parser, Parts
from colibri.server.requests import Body, Function, Tool
from colibri.server.served import Served

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_TYPES |= {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}


class Block(Body):
    cache_control: dict[str, Any] | None = None  # known, and without an effect: what can be shared is


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]


class ToolDefinition(Block):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class CountRequest(Body):
    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Known, and without an effect here.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def failure_body(failure: Failure) -> dict[str, Any]:
    """As the official clients understand it."""
    type = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": type, "message": str(failure)}}


async def count(body: CountRequest, served: Served) -> dict[str, int]:
    """How many tokens a conversation takes."""
    talk = _talk(body)
    tools = [tool.model_dump(exclude_none=True) for tool in talk.tools] or None
    ids = await asyncio.to_thread(served.model.chat_ids, talk.messages, tools=tools, variables=talk.variables)
    return {"input_tokens": len(ids)}


async def answer(
    request: Request, body: MessagesRequest, served: Served, client: Hashable
) -> dict[str, Any] | EventStream:
    """The answer, or its stream."""
    streams, parser = await begin_talk(served, _talk(body), _options(body, served), 1, client)
    found = _Answer(served, streams[0], parser)
    if body.stream:
        return EventStream(request, found.events(), lambda failure: event(failure_body(failure), "error"))
    await unless_gone(request, read(streams))
    return found.whole()


def _options(body: MessagesRequest, served: Served) -> Options:
    temperature = body.temperature
    if temperature is None and served.model._prompts.defaults.get("temperature") is None:
        temperature = 1.0
    greedy = temperature == 0
    return {
        "max_tokens": body.max_tokens,
        "temperature": temperature,
        "top_p": None if greedy else body.top_p,
        "top_k": None if greedy else body.top_k,
        "stop": body.stop_sequences or None,
    }


def _talk(body: CountRequest) -> Talk:
    choice = body.tool_choice
    tools = [
        Tool(
            type="function",
            function=Function(name=one.name, description=one.description, parameters=one.input_schema),
        )
        for one in body.tools or ()
    ]
    if choice is not None and choice.type in ("any", "tool") and not tools:
        raise Failure(400, "tool_choice: expected tools to choose from, found none", param="tool_choice")
    if choice is not None and (choice.name is not None) != (choice.type == "tool"):
        raise Failure(
            400, "tool_choice.name: goes with type tool, and with nothing else", param="tool_choice"
        )
    if choice is not None and choice.type == "none":
        tools = []
    forced = [] if choice is None or choice.type in ("auto", "none") else tools
    if choice is not None and choice.type == "tool":
        forced = [tool for tool in tools if tool.function.name == choice.name]
        if not forced:
            raise Failure(
                400, f"tool_choice.name: no tool has the name {choice.name!r:.80}", param="tool_choice"
            )
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    return Talk(list(_messages(body)), tools, forced, variables)


def _messages(body: CountRequest) -> Iterator[dict[str, Any]]:
    if body.system is not None:
        yield {"role": "system", "content": _text(body.system)}
    for message in body.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            continue
        results = [block for block in message.content if isinstance(block, ToolResultBlock)]
        for result in results:
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _text(result.content or "")}
        texts = "".join(block.text for block in message.content if isinstance(block, TextBlock))
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in message.content
            if isinstance(block, ToolUseBlock)
        ]
        if texts or calls or not results:
            yield {"role": message.role, "content": texts} | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class _Answer:
    """The bodies of one answer: blocks of thinking, text and tool use, in the order in which they came."""

    def __init__(self, served: Served, stream: AsyncStream, parser: Parser) -> None:
        self._stream, self._parts = stream, Parts(parser)
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": served.name,
        }

    def whole(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for delta in [*self._parts.push(self._stream.text), *self._parts.finish()]:
            for kind, value in _parts_of(delta):
                if kind == "tool_use":
                    content.append({"type": kind, **value, "input": _object(value["input"])})
                elif content and content[-1]["type"] == kind:
                    content[-1][kind] += value
                else:
                    content.append(
                        {"type": kind, kind: value} | ({"signature": ""} if kind == "thinking" else {})
                    )
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        start: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _named("message_start", message={**start, "usage": self._usage()})
        at, open_kind = -1, ""
        async for _, piece in pieces([self._stream]):
            for delta in self._parts.finish() if piece is None else self._parts.push(piece):
                for kind, value in _parts_of(delta):
                    if kind != open_kind or kind == "tool_use":
                        if at >= 0:
                            yield _named("content_block_stop", index=at)
                        at, open_kind = at + 1, kind
                        yield _named("content_block_start", index=at, content_block=_empty(kind, value))
                    yield _named("content_block_delta", index=at, delta=_delta(kind, value))
        if at >= 0:
            yield _named("content_block_stop", index=at)
        yield _named("message_delta", delta=self._end(), usage=self._usage())
        yield _named("message_stop")

    def _end(self) -> dict[str, Any]:
        result = self._stream.result
        reason = "max_tokens" if result.finish_reason == "length" else "end_turn"
        if result.stop_text is not None:
            reason = "stop_sequence"
        elif self._parts.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": result.stop_text}

    def _usage(self) -> dict[str, int]:
        reused = self._stream.work.n_reused
        return {
            "input_tokens": self._stream.n_prompt - reused,
            "cache_read_input_tokens": reused,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._stream.n_generated,
        }


def _named(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)


def _parts_of(delta: Delta) -> Iterator[tuple[str, Any]]:
    """(kind of block, its text or its call)"""
    if "reasoning_content" in delta:
        yield "thinking", delta["reasoning_content"]
    if "content" in delta:
        yield "text", delta["content"]
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        yield "tool_use", {"id": call["id"], "name": function["name"], "input": function["arguments"]}


def _empty(kind: str, value: Any) -> dict[str, Any]:
    if kind == "tool_use":
        return {"type": kind, "id": value["id"], "name": value["name"], "input": {}}
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _delta(kind: str, value: Any) -> dict[str, Any]:
    if kind == "tool_use":
        return {"type": "input_json_delta", "partial_json": value["input"]}
    return {"type": f"{kind}_delta", kind: value}


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}
