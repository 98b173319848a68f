"""/v1/responses: answers in the shape of OpenAI's newer interface: items in, items out.

Owns: its bodies and its events. Refuses: conversations (chat.py), and keeping any: a request brings all that
it is about.
"""

from __future__ import annotations

import json
import time
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
from colibri.server.requests import Body, Function, JsonSchema, ResponseFormat, Tool
from colibri.server.served import Served


class Part(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    status: str | None = None


Item = CallItem | CallOutputItem | ReasoningItem | MessageItem


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class Text(Body):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Body):
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    # Known, and without an effect here.
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    user: str | None = None
    service_tier: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None


async def respond(
    request: Request, body: ResponsesRequest, served: Served, client: Hashable
) -> dict[str, Any] | EventStream:
    """The answer, or its stream."""
    if body.previous_response_id is not None:
        raise Failure(
            400,
            "previous_response_id: no response is kept here: send the whole conversation as input",
            param="previous_response_id",
        )
    streams, parser = await begin_talk(served, _talk(body), _options(body, served), 1, client)
    found = _Answer(body, served, streams[0], parser)
    if body.stream:
        return EventStream(request, found.events(), found.failed)
    await unless_gone(request, read(streams))
    for _ in found.take(streams[0].text):
        pass
    for _ in found.take(None):
        pass
    return found.body("completed")


def _options(body: ResponsesRequest, served: Served) -> Options:
    temperature = body.temperature
    if temperature is None and served.model._prompts.defaults.get("temperature") is None:
        temperature = 1.0
    found: Options = {
        "max_tokens": body.max_output_tokens,
        "temperature": temperature,
        "top_p": None if temperature == 0 else body.top_p,
    }
    form = body.text.format if body.text is not None else None
    if form is None:
        return found
    schema = None
    if form.type == "json_schema" or form.schema_ is not None:
        schema = JsonSchema.model_validate({"name": form.name, "schema": form.schema_})
    return found | ResponseFormat(type=form.type, json_schema=schema).constraint()


def _talk(body: ResponsesRequest) -> Talk:
    tools = [
        Tool(
            type="function",
            function=Function(name=one.name, description=one.description, parameters=one.parameters),
        )
        for one in (body.tools or ())
        if body.tool_choice != "none"
    ]
    forced = tools if body.tool_choice == "required" else []
    if isinstance(body.tool_choice, NamedFunction):
        name = body.tool_choice.name
        forced = [tool for tool in tools if tool.function.name == name]
    if body.tool_choice not in (None, "none", "auto") and not forced:
        raise Failure(400, "tool_choice: no tool of that name, or none at all", param="tool_choice")
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = {} if effort is None else {"reasoning_effort": effort}
    return Talk(list(_messages(body)), tools, forced, variables)


def _messages(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    for item in body.input:
        if isinstance(item, MessageItem):
            parts = item.content
            text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
            yield {"role": "system" if item.role == "developer" else item.role, "content": text}
        elif isinstance(item, CallOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        elif isinstance(item, CallItem):
            try:
                arguments = json.loads(item.arguments)
            except (ValueError, RecursionError):
                raise Failure(400, "input: the arguments of a call: expected JSON", param="input") from None
            function = {"name": item.name, "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}


class _Answer:
    """Items as they come about, and the events that tell of them."""

    def __init__(self, body: ResponsesRequest, served: Served, stream: AsyncStream, parser: Parser) -> None:
        self._asked, self._stream, self._parts = body, stream, Parts(parser)
        self._items: list[dict[str, Any]] = []
        self._open = ""  # the kind of the last item, while it grows
        self._number = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.name,
        }

    def body(self, status: str, error: Failure | None = None) -> dict[str, Any]:
        asked, ended = self._asked, status in ("completed", "failed")
        cut = status == "completed" and self._stream.result.finish_reason == "length"
        told = asked.model_dump(exclude_none=True, by_alias=True)
        text = told.get("text") or {"format": {"type": "text"}}
        failed = None if error is None else {"code": "server_error", "message": str(error)}
        return {
            **self._head,
            "status": "incomplete" if cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": failed,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "output": self._items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "text": text,
            "tool_choice": told.get("tool_choice", "auto"),
            "tools": told.get("tools", []),
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    async def events(self) -> AsyncIterator[str]:
        yield self._event("response.created", response=self.body("in_progress"))
        yield self._event("response.in_progress", response=self.body("in_progress"))
        async for _, piece in pieces([self._stream]):
            for one in self.take(piece):
                yield one
        whole = self.body("completed")
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, failure: Failure) -> str:
        return self._event("response.failed", response=self.body("failed", failure))

    def take(self, piece: str | None) -> Iterator[str]:
        """What a piece of the text, or its end, adds: events, once they have been noted."""
        for delta in self._parts.finish() if piece is None else self._parts.push(piece):
            yield from self._grow(delta)
        if piece is None:
            yield from self._close()

    def _grow(self, delta: Delta) -> Iterator[str]:
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if name not in delta:
                continue
            if self._open != kind:
                yield from self._close()
                yield from self._begin(kind)
            self._items[-1]["content"][0]["text"] += delta[name]
            type = "reasoning_text" if kind == "reasoning" else "output_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._part_event(f"response.{type}.delta", delta=delta[name], **more)
        for call in delta.get("tool_calls", ()):
            yield from self._close()
            yield from self._call(call)

    def _begin(self, kind: str) -> Iterator[str]:
        self._open = kind
        if kind == "message":
            item = {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": []}  # type: ignore[dict-item]
            part = {"type": "reasoning_text", "text": ""}
        self._items.append({**item, "status": "in_progress", "content": []})
        yield self._item_event("response.output_item.added")
        self._items[-1]["content"] = [part]
        yield self._part_event("response.content_part.added", part=dict(part))

    def _close(self) -> Iterator[str]:
        if not self._open:
            return
        item = self._items[-1]
        part = item["content"][0]
        item["status"] = "completed"
        more: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        yield self._part_event(f"response.{part['type']}.done", text=part["text"], **more)
        yield self._part_event("response.content_part.done", part=dict(part))
        self._open = ""
        yield self._item_event("response.output_item.done")

    def _call(self, call: dict[str, Any]) -> Iterator[str]:
        function, id = call["function"], f"fc_{uuid.uuid4().hex}"
        item = {"type": "function_call", "id": id, "call_id": call["id"], "name": function["name"]}
        self._items.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item_event("response.output_item.added")
        at = {"item_id": id, "output_index": len(self._items) - 1}
        text = function["arguments"]
        yield self._event("response.function_call_arguments.delta", **at, delta=text)
        yield self._event(
            "response.function_call_arguments.done", **at, name=function["name"], arguments=text
        )
        self._items[-1] |= {"arguments": text, "status": "completed"}
        yield self._item_event("response.output_item.done")

    def _item_event(self, name: str) -> str:
        return self._event(name, output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _part_event(self, name: str, **fields: Any) -> str:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(name, **at, **fields)

    def _event(self, type: str, /, **fields: Any) -> str:
        self._number += 1
        return event({"type": type, "sequence_number": self._number - 1, **fields}, type)

    def _usage(self) -> dict[str, Any]:
        n_prompt, n = self._stream.n_prompt, self._stream.n_generated
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": self._stream.work.n_reused},
            "output_tokens": n,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + n,
        }
