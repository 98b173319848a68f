"""Many texts at the same time on one model, for asyncio: AsyncEngine.

    model = colibri.load("demo", max_batch=8)
    async with colibri.AsyncEngine(model) as engine:
        async for piece in engine.stream("Once upon a time", max_tokens=50):
            print(piece, end="")

Owns: the thread that evaluates, and the way of its results into event loops.
Refuses: the order of the work (scheduler.py), how prompts and options are read (engine.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from colibri.arguments import IdList, bounded
from colibri.chat import Message
from colibri.drawing import Writing
from colibri.engine import Model
from colibri.errors import CancelledError, ColibriError
from colibri.generate import Generation, Logprobs, Work, finished
from colibri.prompts import Prompt
from colibri.sampling import Options
from colibri.scheduler import Event, Load, Request, Scheduler

_log = logging.getLogger("colibri")


class AsyncStream(AsyncIterator[str]):
    """Pieces of text as they come, each of complete characters. After the last one `result` is the
    Generation. Ending the iteration early, by aclose() or by cancelling its task, ends the work."""

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self._engine, self._request, self._writing = engine, request, request.writing
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Event] = asyncio.Queue()
        self._texts: list[str] = []
        self._ended = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            try:
                event = await self._arrived.get()
            except asyncio.CancelledError:
                await self.aclose()
                raise
            if event.error is not None:
                self._ended = True
                raise event.error
            self._ended = event.last
            if event.piece:
                self._texts.append(event.piece)
                return event.piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the work early; `result` stays unavailable, `text` is what came."""
        if not self._ended:
            self._ended = True
            self._engine._end(self)

    def __del__(self) -> None:
        if not self._ended:  # nobody can read what would come
            self._engine._end(self)

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._texts)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._writing.n_prompt

    @property
    def n_generated(self) -> int:
        """Tokens written so far."""
        return len(self._writing.answer.ids)

    @property
    def logprobs(self) -> list[Logprobs] | None:
        """Of the tokens so far; None: they were not asked for."""
        found = self._writing.work.logprobs
        return None if found is None else found[: self.n_generated]

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return list(map(int, self._writing.ids))

    @property
    def prompt_logprobs(self) -> list[Logprobs] | None:
        """Of the prompt from its second token on, once the first piece is there; None: not asked for."""
        return self._writing.work.prompt_logprobs

    @property
    def work(self) -> Work:
        """What the engine has noted so far: times, tokens of the prompt that were in the KV cache."""
        return self._writing.work

    @property
    def result(self) -> Generation:
        """The finished Generation."""
        writing = self._writing
        return finished(writing.answer, writing.work, self.text, writing.n_prompt, writing.seed)

    async def read(self) -> Generation:
        """All of it."""
        async for _ in self:
            pass
        return self.result

    def _deliver(self, event: Event) -> None:
        self._arrived.put_nowait(event)


class AsyncEngine:
    """Evaluates requests together: as many at once as the model holds sequences (max_batch of load), the
    others wait. Which others there are changes no text. Methods belong to any event loop of any thread.

    The model may be used beside it, between two steps, where it has sequences left."""

    def __init__(
        self,
        model: Model,
        *,
        max_waiting: int = 1024,
        prefill_rows: int = 256,
    ) -> None:
        """max_waiting: more requests than that waiting raise QueueFullError. prefill_rows: most ids of
        prompts that are read between two tokens of texts in writing: 1 to 4096."""
        bounded("max_waiting", max_waiting, 2**31, optional=False)
        bounded("prefill_rows", prefill_rows, 4096, optional=False)
        self.model = model
        self._scheduler = Scheduler(
            model._sequences,
            n_vocab=model.n_vocab,
            max_batch=model.max_batch,
            context=model.context,
            chunk=model.chunk,
            prefill_rows=prefill_rows,
            max_waiting=max_waiting,
        )
        self._streams: dict[Request, AsyncStream] = {}
        self._lock = threading.Lock()  # guards _streams
        self._thread = threading.Thread(target=self._run, name="colibri-engine", daemon=True)
        self._thread.start()

    def stream(
        self,
        prompt: Prompt,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        client: Hashable = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Model.stream(). client: whose request it is; clients take turns."""
        return self.submit(self.model._prompts.continuing(prompt, src_lang, tgt_lang, options), client)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        client: Hashable = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Model.stream_chat()."""
        ids = self.model.chat_ids(messages, tools=tools, variables=variables)
        return self.stream_answer(ids, client=client, **options)

    def stream_answer(
        self, ids: IdList, *, client: Hashable = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """What stream_chat() writes after chat_ids(): an answer, whose text begins with its first word."""
        return self.submit(self.model._prompts.answering(ids, options), client)

    def submit(self, writing: Writing, client: Hashable = None) -> AsyncStream:
        """Begins to write what was prepared, which may take long where an answer must match something."""
        request = Request(writing, client)
        stream = AsyncStream(self, request)
        if request.finished and not request.sees_prompt:  # nothing may be written
            stream._deliver(Event(request, ""))
            return stream
        with self._lock:
            self._streams[request] = stream
        try:
            self._scheduler.submit(request)
        except ColibriError:
            with self._lock:
                del self._streams[request]
            stream._ended = True
            raise
        return stream

    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """stream(), read to its end."""
        return await self.stream(prompt, **options).read()

    async def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """stream_chat(), read to its end."""
        return await self.stream_chat(messages, **options).read()

    def on_end(self, hear: Callable[[Writing], object]) -> None:
        """Calls hear with every text that has ended or was left, from the engine's thread."""
        self._scheduler.on_end = lambda request: hear(request.writing)

    def load(self) -> Load:
        """How many requests run and wait, and how much of the KV cache they fill."""
        return self._scheduler.load()

    async def drain(self) -> None:
        """Waits until every request has ended; more may come meanwhile."""
        while any(self.load()[:2]):
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Ends all requests: they raise CancelledError. The model stays open."""
        for request in self._scheduler.close():
            self._tell([Event(request, "", CancelledError("the engine was closed"))])
        if self._thread is not threading.current_thread():
            self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    # --- between the threads

    def _end(self, stream: AsyncStream) -> None:
        with self._lock:
            self._streams.pop(stream._request, None)
        self._scheduler.cancel(stream._request)

    def _run(self) -> None:
        while self._scheduler.wait():
            try:
                self._tell(self._scheduler.step())
            except Exception as error:  # a fault of ours must not leave clients waiting for ever
                _log.exception("a step of the engine failed")
                self._tell([Event(one, "", _fault(error)) for one in self._scheduler.close()])

    def _tell(self, events: list[Event]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AsyncStream, Event]]] = {}
        with self._lock:
            for event in events:
                stream = self._streams.get(event.request)
                if stream is None:
                    continue
                if event.last:
                    del self._streams[event.request]
                by_loop.setdefault(stream._loop, []).append((stream, event))
        for loop, found in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, found)
            except RuntimeError:  # the loop is closed: nobody is there to hear
                for stream, _ in found:
                    self._end(stream)


def _deliver(found: list[tuple[AsyncStream, Event]]) -> None:
    for stream, event in found:
        stream._deliver(event)


def _fault(error: Exception) -> ColibriError:
    if isinstance(error, ColibriError):
        return error
    return ColibriError(
        f"the engine failed: {type(error).__name__}: {error}; this is a bug: please report it"
    )
