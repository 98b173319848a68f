"""The texts that answer one request: n of them, read whole or piece by piece, until the client leaves.

Owns: how they begin together, the order of their pieces, and the end of the work when nobody waits for it.
Refuses: what a body looks like (completions.py, chat.py …).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from typing import TypeVar

from starlette.requests import Request

from colibri.async_engine import AsyncStream
from colibri.drawing import Writing
from colibri.generate import Generation
from colibri.sampling import MAX_SEED, Options
from colibri.server.served import Served

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def begin(
    served: Served, prepare: Callable[[Options], Writing], options: Options, n: int, client: Hashable
) -> list[AsyncStream]:
    """Begins to write n texts. prepare: a Writing of options; it may take long and runs in a thread. The i-th
    text has the seed that was given, plus i."""
    writings = []
    for at in range(n):
        seed = options.get("seed")
        one: Options = options if seed is None else {**options, "seed": (seed + at) & MAX_SEED}
        writings.append(await asyncio.to_thread(prepare, one))
    streams: list[AsyncStream] = []
    try:
        for writing in writings:
            streams.append(served.engine.submit(writing, client))
    except BaseException:
        await close(streams)
        raise
    return streams


async def close(streams: list[AsyncStream]) -> None:
    for stream in streams:
        await stream.aclose()


async def read(streams: list[AsyncStream]) -> list[Generation]:
    """All of them; if one fails, all end."""
    try:
        return list(await asyncio.gather(*(stream.read() for stream in streams)))
    finally:
        await close(streams)


async def pieces(streams: list[AsyncStream]) -> AsyncIterator[tuple[int, str | None]]:
    """Which text goes on with what, as it comes; None: it has ended."""
    waiting: dict[asyncio.Task[str | None], int] = {}

    def wait_for(at: int) -> None:
        waiting[asyncio.ensure_future(_next(streams[at]))] = at

    try:
        for at in range(len(streams)):
            wait_for(at)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                at, piece = waiting.pop(task), task.result()
                yield at, piece
                if piece is not None:
                    wait_for(at)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await close(streams)


async def _next(stream: AsyncStream) -> str | None:
    return await anext(stream, None)


async def unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """What the work gives; it ends when the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
