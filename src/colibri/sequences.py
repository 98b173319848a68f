"""What the sequences of one context hold, and the way into the library for everything that evaluates.

Owns: the lock (one evaluation at a time), cancelling, reuse: a prompt that begins like what a sequence holds
is not evaluated again from its beginning. Reuse changes speed only; logits are the same bits however a
sequence came about.
Refuses: text, and choosing a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from colibri import _native as native
from colibri._native import Floats, Ids
from colibri.errors import ArgumentError, CancelledError, ContextFullError

Progress = Callable[[int, int], object]
SEEN_ROWS = 32  # logits of so many ids of a prompt are held at once: 20 MiB where there are 151,936 tokens
WORTH_SHARING = 16  # ids: evaluating them costs more than a copy of the cache block that both go on to write


class Sequences:
    """The sequences of one context. Usable from any thread."""

    def __init__(self, context: native.ContextHandle, params: native.Params, n_vocab: int) -> None:
        self.lock = threading.RLock()
        self.cancels = 0  # calls of cancel(): work that began before the latest one ends
        self.measured = False  # profiling.measure() has given the context its arrays
        self.recorded = False  # recording.recorded() has given it its arrays
        self.rows = 0  # ids evaluated so far, those of sources too
        self.watches: dict[str, Any] = {}  # observers of all evaluations, as native.evaluate() takes them
        self.logits = np.empty(n_vocab, np.float32)  # of the last id given to hold()
        self._cancel_lock = (
            threading.Lock()
        )  # guards cancels, _evaluating and _context; held for moments only
        self._evaluating = False
        self._context: native.ContextHandle | None = context
        self._capacity, self._n_vocab = params.context, n_vocab
        self._held = np.empty((params.max_batch, params.context), np.int32)  # ids of every sequence
        self._count = [0] * params.max_batch  # how many of them count
        self._used = [0] * params.max_batch  # when a sequence was last used
        # What a sequence is made from, b"" for nothing: int32 ids as bytes.
        self._sources = [b""] * params.max_batch
        self._clock = self._last = 0
        self._taken: set[int] = set()  # sequences that take() gave away

    @property
    def context(self) -> native.ContextHandle:
        if self._context is None:
            raise ArgumentError("the model is closed; load it again")
        return self._context

    @property
    def closed(self) -> bool:
        return self._context is None

    @property
    def position(self) -> int:
        """Positions held by the sequence that was used last."""
        with self.lock:
            return native.position(self.context, self._last)

    def room(self, n_ids: int) -> int:
        """Positions that are left after n_ids. A closed model is an error now, not at the first piece."""
        self.context  # noqa: B018
        if n_ids > self._capacity:
            raise ContextFullError(
                f"the prompt has {n_ids} tokens, the context holds {self._capacity}: shorten the prompt or "
                f"load the model with context={n_ids} or more"
            )
        return self._capacity - n_ids

    def hold(
        self, ids: Ids, hint: int, began: int, progress: Progress | None, source: Ids | None = None
    ) -> tuple[int, int]:
        """Makes a sequence hold exactly these ids, made from a source if there is one, with the logits of the
        last one in `logits`.

        hint: the sequence that held all but the last one a moment ago, or -1. began: `cancels` when the work
        began. Returns (sequence, how many ids of both it held already)."""
        self._check_idle()
        key = b"" if source is None else source.tobytes()
        sequence, kept = hint, self._shared(hint, ids, key) if hint >= 0 and hint not in self._taken else -1
        if kept != len(ids) - 1:
            sequence, kept = self._begin(ids, key)
        self._rewind(sequence, kept)
        read = self._read(sequence, source, began, progress, None)
        if source is not None:
            progress = None  # the first ids of a target are soon evaluated
        self._evaluate([native.Input(sequence, ids[kept:], self.logits)], began, progress, None)
        self._note(sequence, kept, ids)
        return sequence, kept + (0 if read or source is None else len(source))

    def take(
        self, ids: Ids, source: Ids | None, began: int, *, fresh: bool = False
    ) -> tuple[int, int] | None:
        """Gives a sequence away, to advance(), until give_back(). It holds what is known of the beginning of
        these ids, unless it should be fresh; they are made from a source if there is one, which is evaluated
        now.

        Returns (sequence, how many ids it holds already: fewer than there are), or None if none is left."""
        with self.lock:
            self._check_idle()
            if len(self._taken) == len(self._count):
                return None
            known = ids[:1] if fresh else ids  # of a single id nothing is kept
            sequence, kept = self._begin(known, b"" if source is None else source.tobytes())
            self._read(sequence, source, began, None, None)
            self._note(sequence, kept, ids[:kept])
            self._taken.add(sequence)
            return sequence, kept

    def give_back(self, sequence: int) -> None:
        """What a sequence holds stays for others to begin with."""
        self._taken.discard(sequence)

    def advance(self, inputs: list[native.Input], ids: list[Ids], began: int) -> None:
        """Appends to sequences that take() gave away. ids: all that each of them holds then."""
        with self.lock:
            self._check_idle()
            self._evaluate(inputs, began, None, None)
            for item, whole in zip(inputs, ids, strict=True):
                self._note(item.sequence, len(whole) - len(item.ids), whole)

    def evaluate_alone(
        self,
        batch: list[Ids],
        sources: Sequence[Ids | None],
        rows: Sequence[Floats | None],
        routing: native.RoutingObserver | None,
    ) -> None:
        """Evaluates sequences from their beginning, because logits (rows) or the routing of every id are
        wanted; with routing their sources too."""
        for ids in batch:
            self.room(len(ids))
        with self.lock:
            self._check_idle()
            places = sorted(self._free(len(batch)), key=lambda at: self._used[at])[: len(batch)]
            for place, source in zip(places, sources, strict=True):
                self._rewind(place, 0)
                if routing is not None:
                    self._sources[place] = b""
                self._read(place, source, self.cancels, None, routing)
            inputs = [native.Input(*item) for item in zip(places, batch, rows, strict=True)]
            self._evaluate(inputs, self.cancels, None, routing)
            for place, ids in zip(places, batch, strict=True):
                self._note(place, 0, ids)

    def read_alone(self, ids: Ids, began: int, see: Callable[[Floats, Ids], None]) -> None:
        """Evaluates a prompt from its beginning, in pieces, and shows the logits after each piece's ids and
        the ids that follow them."""
        logits = np.empty((SEEN_ROWS, self._n_vocab), np.float32)
        with self.lock:
            self._check_idle()
            place = self._begin(ids[:1], b"")[0]
            self._rewind(place, 0)
            for start in range(0, len(ids), SEEN_ROWS):
                end = min(start + SEEN_ROWS, len(ids))
                rows = logits[: end - start]
                self._evaluate([native.Input(place, ids[start:end], rows)], began, None, None)
                self._note(place, start, ids[:end])
                see(rows, ids[start + 1 : end + 1])

    def forget(self) -> None:
        """Nothing of what the sequences hold is used again: what comes next is evaluated whole."""
        with self.lock:
            self._check_idle()
            for sequence in self._free(0):
                self._rewind(sequence, 0)
                self._sources[sequence] = b""

    def cancel(self) -> None:
        """Ends all work that has begun."""
        with self._cancel_lock:
            self.cancels += 1
            if self._evaluating and self._context is not None:
                native.cancel(self._context)

    def close(self, release: Callable[[], object]) -> None:
        """Calls release() when nothing is running."""
        with self.lock, self._cancel_lock:
            self._check_idle()
            self._context = None
            release()

    def _check_idle(self) -> None:
        """The lock lets a callback of the running evaluation in; it must not change what is evaluated."""
        if self._evaluating:
            raise ArgumentError(
                "the model is evaluating: a callback may call cancel() and nothing else of its Model; do the "
                "rest after the evaluation, or load a second Model"
            )

    def _read(
        self,
        sequence: int,
        source: Ids | None,
        began: int,
        progress: Progress | None,
        routing: native.RoutingObserver | None,
    ) -> bool:
        """Makes a sequence attend to a source; whether the source was evaluated for it."""
        if source is None or self._sources[sequence] == source.tobytes():
            return False
        self._rewind(sequence, 0)
        self._sources[sequence] = b""
        context, follow, watches = self.context, progress or _nothing, self._watches(routing)
        self._run(lambda: native.encode(context, sequence, source, progress=follow, **watches), began)
        self._sources[sequence] = source.tobytes()
        self.rows += len(source)
        return True

    def _shared(self, sequence: int, ids: Ids, source: bytes) -> int:
        """How many ids at the beginning a sequence has in common with these, which are made from a source."""
        if self._sources[sequence] != source:
            return 0
        n = min(self._count[sequence], len(ids))
        differs = self._held[sequence, :n] != ids[:n]
        return int(differs.argmax()) if differs.any() else n

    def _free(self, n: int) -> list[int]:
        """The sequences that nobody has taken: at least n."""
        free = [at for at in range(len(self._count)) if at not in self._taken]
        if len(free) < n:
            raise ArgumentError(
                f"the model holds {len(self._count)} sequences (max_batch of load), of which an AsyncEngine "
                f"uses {len(self._taken)}: {n} are needed here; wait, or load the model a second time"
            )
        return free

    def _begin(self, ids: Ids, source: bytes) -> tuple[int, int]:
        """A free sequence that holds the longest beginning of ids that any sequence has, but not all of them:
        the last one is evaluated, for its logits. It is the one where the fewest ids are evaluated and
        forgotten, of equals the one not used for longest; another's beginning is shared, not copied."""
        free, all = self._free(1), range(len(self._count))
        shared = [min(self._shared(at, ids, source), len(ids) - 1) for at in all]
        best = max(all, key=lambda at: shared[at])

        def cost(at: int) -> tuple[bool, int, int]:
            kept = max(shared[at], shared[best] if shared[best] >= WORTH_SHARING else 0)
            return self._sources[at] != source, self._count[at] - shared[at] - kept, self._used[at]

        sequence = min(free, key=cost)
        if shared[best] >= shared[sequence] + WORTH_SHARING:
            native.fork(self.context, best, sequence)
            self._held[sequence, : self._count[best]] = self._held[best, : self._count[best]]
            self._count[sequence], self._sources[sequence] = self._count[best], self._sources[best]
            shared[sequence] = shared[best]
        self._rewind(sequence, shared[sequence])
        return sequence, shared[sequence]

    def _rewind(self, sequence: int, position: int) -> None:
        if position < self._count[sequence]:
            native.rewind(self.context, sequence, position)
            self._count[sequence] = position

    def _note(self, sequence: int, kept: int, ids: Ids) -> None:
        self._held[sequence, kept : len(ids)] = ids[kept:]
        self._count[sequence] = len(ids)
        self._clock += 1
        self._used[sequence], self._last = self._clock, sequence

    def _evaluate(
        self,
        inputs: list[native.Input],
        began: int,
        progress: Progress | None,
        routing: native.RoutingObserver | None,
    ) -> None:
        context, watches = self.context, self._watches(routing)
        if progress is None and sum(len(item.ids) for item in inputs) > 1:
            progress = _nothing  # Ctrl-C is seen between layers, when the callback runs, not only at the end
        self._run(
            lambda: native.evaluate(context, inputs, self._n_vocab, progress=progress, **watches),
            began,
        )
        self.rows += sum(len(item.ids) for item in inputs)

    def _watches(self, routing: native.RoutingObserver | None) -> dict[str, Any]:
        return self.watches if routing is None else self.watches | {"routing": routing}

    def _run(self, call: Callable[[], None], began: int) -> None:
        """One call of the library, which cancel() may end."""
        while True:
            with self._cancel_lock:
                if began != self.cancels:
                    raise CancelledError("cancelled by Model.cancel()")
                self._evaluating = True
            try:
                call()
                return
            except CancelledError:
                if began != self.cancels:
                    raise
                # A cancel() that came just after the end of an earlier evaluation hit this one: once more.
            finally:
                with self._cancel_lock:
                    self._evaluating = False


def _nothing(_done: int, _total: int) -> None:
    """A progress callback for Python's signal handlers to run in."""
