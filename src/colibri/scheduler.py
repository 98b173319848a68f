"""Many texts written together: which ids are evaluated next, and what becomes of the logits.

Owns: the queue, the places in the batch, the order of the work. One step is one evaluation: an id of every
text that is being written, and some of the prompts that are being read, so that no text waits for a whole
prompt. What a text becomes does not depend on what else is evaluated: the engine gives the same bits.
Refuses: threads and event loops (async_engine.py), what sequences hold (sequences.py).

A step with texts in writing holds at most max_batch + prefill_rows rows, which bounds how long they stall.
Requests are admitted in turns between clients, those of one client as they came. One whose prompt begins like
a prompt that is being read waits for that one, and shares what it has read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from colibri import _native as native
from colibri._native import Floats, Ids
from colibri.drawing import Writing
from colibri.errors import CancelledError, ColibriError, QueueFullError
from colibri.sequences import SEEN_ROWS, Sequences

WORTH_WAITING = 64  # ids of a prompt that another one is about to have read


class Event(NamedTuple):
    """What a step has brought a request: text, or why it failed."""

    request: Request
    piece: str
    error: ColibriError | None = None
    last: bool = True  # a later step may have finished the text before this is read: so it is noted here


@dataclass(eq=False, slots=True)
class Request:
    """A text to write, from its prompt to its end."""

    writing: Writing
    client: Hashable = None  # who asks; clients take turns
    cancelled: bool = False
    ids: Ids = field(init=False)  # the prompt, and what has been written
    n: int = field(init=False)  # how many of them count
    held: int = 0  # how many of them have been evaluated
    sequence: int = -1
    seen: Floats | None = None  # logits of a piece of the prompt

    def __post_init__(self) -> None:
        self.n = len(self.prompt)
        self.ids = np.empty(self.n + self.writing.limit, np.int32)
        self.ids[: self.n] = self.prompt

    @property
    def prompt(self) -> Ids:
        return self.writing.ids

    @property
    def sees_prompt(self) -> bool:
        """Whether the logits after every id of the prompt are wanted."""
        return self.writing.chooser.sees_prompt

    @property
    def finished(self) -> bool:
        return self.writing.answer.finish_reason is not None

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been read."""
        return self.n > len(self.prompt)


class Load(NamedTuple):
    """How much there is to do."""

    running: int
    waiting: int
    positions: int  # held by running requests
    capacity: int  # positions of all sequences together


class Scheduler:
    """submit(), cancel() and load() from any thread; step() and wait() from one."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        n_vocab: int,
        max_batch: int,
        context: int,
        chunk: int,
        prefill_rows: int,
        max_waiting: int,
    ) -> None:
        self.on_end: Callable[[Request], object] | None = None  # hears of requests that leave the batch
        self._sequences, self._chunk, self._prefill_rows = sequences, chunk, min(chunk, prefill_rows)
        self._capacity, self._max_waiting = max_batch * context, max_waiting
        self._logits = np.empty((max_batch, n_vocab), np.float32)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: OrderedDict[Hashable, deque[Request]] = OrderedDict()
        self._running: list[Request] = []
        self._n_waiting = 0
        self._in_step: list[Request] = []  # whose rows are being evaluated
        self._closing = False

    def submit(self, request: Request) -> None:
        """Puts a request at the end of its client's queue."""
        with self._changed:
            if self._closing:
                raise CancelledError("the engine is closed")
            if self._n_waiting >= self._max_waiting:
                raise QueueFullError(
                    f"{self._n_waiting} requests are waiting, as many as may (max_waiting): try again later"
                )
            self._waiting.setdefault(request.client, deque()).append(request)
            self._n_waiting += 1
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Ends a request; it hears nothing more. If an evaluation runs for cancelled ones only, it ends."""
        with self._changed:
            request.cancelled = True
            self._forget(request)
            alone = bool(self._in_step) and all(one.cancelled for one in self._in_step)
            self._changed.notify()
        if alone:
            self._sequences.cancel()

    def load(self) -> Load:
        with self._changed:
            return Load(
                len(self._running), self._n_waiting, sum(one.held for one in self._running), self._capacity
            )

    def close(self) -> list[Request]:
        """Takes no more requests; those that have not ended are given back, cancelled."""
        with self._changed:
            self._closing = True
            left = [*self._running, *(one for queue in self._waiting.values() for one in queue)]
            self._changed.notify()
        for request in left:
            self.cancel(request)
        return left

    def wait(self) -> bool:
        """Waits for something to do; False: the scheduler is closed and has nothing left."""
        with self._changed:
            while not (self._running or self._n_waiting or self._closing):
                self._changed.wait()
            return bool(self._running) or not self._closing

    def step(self) -> list[Event]:
        """Evaluates once."""
        self._drop()
        events = self._admit()
        batch = self._batch()
        if not batch:
            return events
        began = self._sequences.cancels
        with self._changed:
            self._in_step = [request for request, _ in batch]
        try:
            started = perf_counter()
            failed = self._evaluate(batch, began)
            seconds = perf_counter() - started
        except (
            CancelledError
        ):  # by the last of those that it was for; or by Model.cancel(), which is not for us
            return events
        finally:
            with self._changed:
                self._in_step = []
        for request, n in batch:
            error = failed.get(request.sequence)
            if error is None:
                request.held += n
                self._timed(request, seconds)
                self._show(request, n)
                if request.held < request.n:
                    continue
                try:
                    events.append(self._choose(request))
                except ColibriError as raised:
                    error = raised
            if error is not None:
                events.append(Event(request, "", error))
                request.cancelled = True
        return events

    # --- the parts of a step

    def _drop(self) -> None:
        """Requests that have ended leave their places."""
        with self._changed:
            ended = [one for one in self._running if one.cancelled or (one.finished and one.held == one.n)]
            self._running = [one for one in self._running if one not in ended]
        for request in ended:
            self._sequences.give_back(request.sequence)
            if self.on_end is not None:
                self.on_end(request)

    def _admit(self) -> list[Event]:
        """Gives places to requests that wait; those that fail to get one are told."""
        events: list[Event] = []
        for request in self._candidates():
            if any(self._worth_waiting(request, other) for other in self._running):
                continue
            try:
                place = self._sequences.take(
                    request.prompt,
                    request.writing.source,
                    self._sequences.cancels,
                    fresh=request.sees_prompt,
                )
            except CancelledError:
                continue
            except ColibriError as error:
                self._leave_queue(request)
                request.cancelled = True
                events.append(Event(request, "", error))
                continue
            if place is None:
                break
            self._leave_queue(request)
            request.sequence, request.held = place
            request.writing.work.n_reused = request.held
            with self._changed:
                self._running.append(request)
        return events

    def _candidates(self) -> Iterator[Request]:
        """Those that wait, in the order in which they may be admitted: one of each client in turn."""
        with self._changed:
            queues = [list(queue) for queue in self._waiting.values()]
        for turn in range(max(map(len, queues), default=0)):
            yield from (queue[turn] for queue in queues if turn < len(queue))

    def _leave_queue(self, request: Request) -> None:
        """The client goes behind all others."""
        with self._changed:
            if request.client in self._waiting:
                self._waiting.move_to_end(request.client)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """It waits no longer. With the lock."""
        queue = self._waiting.get(request.client)
        if queue is None or request not in queue:
            return
        queue.remove(request)
        self._n_waiting -= 1
        if not queue:
            del self._waiting[request.client]

    def _worth_waiting(self, request: Request, other: Request) -> bool:
        """Whether another request is reading what this one begins with."""
        if other.decodes or other.cancelled:
            return False
        mine, others = request.writing.source, other.writing.source
        if (b"" if mine is None else mine.tobytes()) != (b"" if others is None else others.tobytes()):
            return False
        n = min(len(request.prompt), len(other.prompt))
        differs = np.flatnonzero(request.prompt[:n] != other.prompt[:n])
        shared = int(differs[0]) if differs.size else n
        return shared - other.held >= min(WORTH_WAITING, len(request.prompt) - 1) > 0

    def _batch(self) -> list[tuple[Request, int]]:
        """Who is evaluated, and how many ids of each: first those in writing, then prompts as they came."""
        decoding = [request for request in self._running if request.decodes]
        left = self._prefill_rows if decoding else self._chunk
        batch = [(request, request.n - request.held) for request in decoding]
        for request in self._running:
            n = min(left, request.n - request.held, SEEN_ROWS if request.sees_prompt else left)
            if not request.decodes and n > 0:
                batch.append((request, n))
                left -= n
        return batch

    def _evaluate(self, batch: list[tuple[Request, int]], began: int) -> dict[int, ColibriError]:
        """What failed, by sequence. If all of a batch fails, each is tried alone, to find out whose fault it
        was: an evaluation that fails leaves no trace."""
        inputs, ids = [], []
        for request, n in batch:
            end = request.held + n
            logits = self._logits_of(request, n) if request.sees_prompt or end == request.n else None
            inputs.append(native.Input(request.sequence, request.ids[request.held : end], logits))
            ids.append(request.ids[:end])
        try:
            self._sequences.advance(inputs, ids, began)
        except CancelledError:
            raise
        except ColibriError as error:
            if len(batch) == 1:
                return {batch[0][0].sequence: error}
            return {key: found for part in batch for key, found in self._evaluate([part], began).items()}
        return {}

    def _logits_of(self, request: Request, n: int) -> Floats:
        """Where the logits of the last n ids of a request go."""
        if not request.sees_prompt or request.decodes:
            row: Floats = self._logits[request.sequence]
            return row
        if request.seen is None:
            request.seen = np.empty((SEEN_ROWS, self._logits.shape[1]), np.float32)
        return request.seen[:n]

    @staticmethod
    def _timed(request: Request, seconds: float) -> None:
        if request.decodes:
            request.writing.work.decode_seconds += seconds
        else:
            request.writing.work.prefill_seconds += seconds

    def _show(self, request: Request, n: int) -> None:
        """A piece of the prompt, to whom wants its logits."""
        if request.seen is None or request.decodes:
            return
        rows, end = request.seen[:n], request.held
        request.writing.chooser.see_prompt(rows, request.prompt[end - n + 1 : end + 1])
        if end == request.n:
            self._logits[request.sequence] = rows[-1]
            request.seen = None

    def _choose(self, request: Request) -> Event:
        """The next id, and what it adds to the text."""
        if request.finished:  # only the prompt was to be read
            return Event(request, "")
        logits, ids = self._logits[request.sequence], request.ids[: request.n]
        with self._sequences.lock:  # the draw takes scratch memory of the context
            id = request.writing.chooser.choose(self._sequences.context, logits, ids)
        piece = request.writing.answer.push(id, request.writing.work.complete)
        if not request.finished:
            request.ids[request.n] = id
            request.n += 1
        return Event(request, piece, last=request.finished)
