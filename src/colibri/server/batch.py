"""A file of requests, answered into a file: the same bodies as over HTTP, in the order of the requests.

Owns: lines, the order, and what a run that was interrupted has left: a new run goes on behind it.
Refuses: answers themselves (completions.py, chat.py, messages.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from colibri.errors import ArgumentError, ColibriError, ModelIOError
from colibri.server import messages
from colibri.server.chat import chat
from colibri.server.completions import complete
from colibri.server.failures import Failure, failure_of, invalid
from colibri.server.requests import ChatRequest, CompletionRequest
from colibri.server.responses import ResponsesRequest, respond
from colibri.server.served import Models

_FORMS: dict[str, tuple[Any, Any]] = {
    "/v1/completions": (CompletionRequest, complete),
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/responses": (ResponsesRequest, respond),
    messages.PATH: (messages.MessagesRequest, messages.answer),
}


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file that are not empty."""
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelIOError(f"Cannot read {path}: {error}.") from error


async def answer(models: Models, line: str) -> dict[str, Any]:
    """What a line is answered with: {"custom_id", "response": {"status_code", "body"}, "error"}.

    A line is {"custom_id", "method": "POST", "url": "/v1/…", "body"}, as OpenAI's batches have it, or a body
    alone: with `messages` a conversation, else a completion."""
    custom_id = None
    try:
        url, body, custom_id = _request(line)
        schema, work = _FORMS[url]
        try:
            asked = schema.model_validate(body)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        if asked.stream:
            raise Failure(400, "stream has no effect in a batch: leave it out", param="stream")
        found = await work(_nobody(), asked, models.find(asked.model), None)
        response = {"status_code": 200, "body": found}
    except (Failure, ColibriError) as error:
        failure = failure_of(error)
        response = {"status_code": failure.status, "body": failure.body()}
    return {"custom_id": custom_id, "response": response, "error": None}


def _request(line: str) -> tuple[str, Any, str | None]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Failure(400, f"the line: expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise Failure(400, f"the line: expected a JSON object, found {found!r:.80}")
    if "body" not in found:
        return "/v1/chat/completions" if "messages" in found else "/v1/completions", found, None
    url, method = found.get("url", "/v1/chat/completions"), found.get("method", "POST")
    if url not in _FORMS or method != "POST":
        raise Failure(
            400,
            f"url: expected POST to one of {', '.join(_FORMS)}, found {method!r} {url!r:.80}",
            param="url",
        )
    return url, found["body"], found.get("custom_id")


def _nobody() -> Request:
    """A client that never leaves."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    return Request({"type": "http", "headers": []}, receive)


async def run(
    models: Models, source: Path, out: Path, at_once: int, progress: Callable[[int, int], object]
) -> tuple[int, int]:
    """Answers a file, at_once requests at a time. Answers go into OUT.part, line by line, in the order of the
    requests; at the end it becomes OUT. Returns (answered now, found from an earlier run)."""
    part = out.with_name(out.name + ".part")
    requests = list(lines_of(source))
    done = _resume(part, len(requests))
    ahead: dict[int, asyncio.Task[dict[str, Any]]] = {}
    try:
        with part.open("a", encoding="utf-8") as file:
            for at in range(done, len(requests)):
                for more in range(at, min(at + at_once, len(requests))):
                    if more not in ahead:
                        ahead[more] = asyncio.ensure_future(answer(models, requests[more]))
                found = await ahead.pop(at)
                file.write(json.dumps(found, ensure_ascii=False) + "\n")
                file.flush()
                progress(at + 1, len(requests))
            os.fsync(file.fileno())
        os.replace(part, out)
    except OSError as error:
        raise ModelIOError(f"Cannot write {out}: {error.strerror or error}.") from error
    finally:
        for task in ahead.values():
            task.cancel()
        await asyncio.gather(*ahead.values(), return_exceptions=True)
    return len(requests) - done, done


def _resume(part: Path, n: int) -> int:
    """How many answers are there already; a last line that was cut is removed."""
    if not part.exists():
        return 0
    data = part.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if len(lines) > n or not all(_is_answer(line) for line in lines):
        raise ArgumentError(
            f"{part} is of another batch: expected at most {n} answers; remove it, or choose another output"
        )
    if len(whole) != len(data):
        os.truncate(part, len(whole))
    return len(lines)


def _is_answer(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == {"custom_id", "response", "error"}
