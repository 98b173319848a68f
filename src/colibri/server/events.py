"""Server-sent events: an answer piece by piece.

Owns: the format, the failure in the middle of a stream, the end when the client leaves or takes nothing for
too long. Refuses: what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from colibri.async_engine import AsyncStream
from colibri.server.choices import ClientLeft, unless_gone
from colibri.server.failures import Failure, failure_of

STALLED_SECONDS = 120.0  # a client that takes nothing for so long is taken to have left
QUIET_SECONDS = 15.0  # after so long without an event a comment is sent, so that proxies keep the connection


def event(data: object, name: str | None = None) -> str:
    """One event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


DONE = event("[DONE]")


class EventStream(Response):
    """Sends events as they come. fail: the events that tell of a failure."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncIterator[str], fail: Callable[[Failure], str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._events, self._fail = request, events, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientLeft, OSError, TimeoutError):  # the work ends with the events
            await unless_gone(self._request, self._send(send))

    async def _send(self, send: Send) -> None:
        async def body(text: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            await asyncio.wait_for(send(message), STALLED_SECONDS)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for text in quiet_kept(self._events):
                await body(text)
        except (asyncio.CancelledError, OSError, TimeoutError):
            raise
        except Exception as error:
            await body(self._fail(failure_of(error)))
        await body("", more=False)


async def quiet_kept(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and comments between them while there are none."""
    following = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=QUIET_SECONDS)
            if not done:
                yield ": waiting\n\n"
                continue
            text = following.result()
            if text is None:
                return
            yield text
            following = asyncio.ensure_future(_next(events))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if hasattr(events, "aclose"):
            await events.aclose()


async def _next(events: AsyncIterator[str]) -> str | None:
    return await anext(events, None)


def openai_failure(failure: Failure) -> str:
    """As the official clients understand it."""
    return event(failure.body())


def usage(streams: Sequence[AsyncStream], n: int = 1) -> dict[str, Any]:
    """The usage object of OpenAI for n texts of each prompt; a prompt counts once."""
    n_prompt = sum(stream.n_prompt for stream in streams[::n])
    n_generated = sum(stream.n_generated for stream in streams)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(stream.work.n_reused for stream in streams[::n])},
    }
