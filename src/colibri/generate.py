"""The loop from tokens to text: limits, end tokens, stop texts, streaming.

Owns: when a generation ends and why, and that nothing of a stop text leaks: generate() is stream() read to
its end, so both give the same text.
Refuses: evaluation and sampling: a function that returns the next id is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from colibri.errors import ArgumentError

FinishReason = Literal["stop", "length"]


class TextDecoder(Protocol):
    """What the loop needs of tokenizer.Decoder."""

    def push(self, id: int, /) -> str: ...
    def finish(self) -> str: ...


class NoText:
    """Decoder of a model without a tokenizer: ids in, ids out."""

    def push(self, _id: int, /) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text and how it came about."""

    text: str
    ids: list[int]  # the sampled tokens, without the end token; those of a stop text are among them
    finish_reason: (
        FinishReason  # "stop": an end token or a stop text; "length": max_tokens or the context's end
    )
    n_prompt: int  # tokens of the prompt
    n_reused: int  # of them, tokens that were still in the KV cache from the call before
    n_generated: int  # len(ids)
    prefill_seconds: float  # engine time from the prompt to the first token
    decode_seconds: float  # engine time of the later tokens
    seed: int | None  # repeats this text with the same prompt and options; None when greedy

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens per second, without the reused ones; 0 if nothing was evaluated."""
        return (self.n_prompt - self.n_reused) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens per second after the first one; 0 if there was only one."""
        return max(0, self.n_generated - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(slots=True)
class Work:
    """What the engine notes while it computes tokens."""

    n_reused: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class _Outcome:
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class StopFilter:
    """Lets text through up to the first stop text. What could be the beginning of one is held back.

    The stop text that is complete first counts (of two that end together, the longer one): that depends on
    the text alone, not on how tokens divide it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of what was held and of `text` that may be shown now."""
        if not self._stops:
            return text
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return held[: min(ends)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        shown = len(held) - keep
        self._held = held[shown:]
        return held[:shown]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Stream(Iterator[str]):
    """Pieces of text as they come, each of complete characters. After the last one `result` is the
    Generation."""

    def __init__(
        self,
        next_id: Callable[[list[int]], int],
        decoder: TextDecoder,
        *,
        limit: int,
        n_prompt: int,
        end_ids: Sequence[int],
        stops: Sequence[str] = (),
        seed: int | None = None,
        work: Work | None = None,
    ) -> None:
        """next_id: given the ids generated so far, the next one. limit: most tokens to generate."""
        self._outcome = _Outcome()
        self._work = work or Work()
        self._n_prompt, self._seed = n_prompt, seed
        self._finished = False
        self._pieces = self._loop(next_id, decoder, limit, frozenset(end_ids), StopFilter(stops))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._outcome.texts.append(piece)
        return piece

    def close(self) -> None:
        """Ends the generation early; `result` stays unavailable, `text` is what came."""
        self._pieces.close()

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._outcome.texts)

    @property
    def result(self) -> Generation:
        """The finished Generation."""
        if not self._finished:
            raise ArgumentError(
                "the stream is not at its end: read all of its pieces before asking for the result"
            )
        outcome, work = self._outcome, self._work
        return Generation(
            text=self.text,
            ids=list(outcome.ids),
            finish_reason=outcome.finish_reason,
            n_prompt=self._n_prompt,
            n_reused=work.n_reused,
            n_generated=len(outcome.ids),
            prefill_seconds=work.prefill_seconds,
            decode_seconds=work.decode_seconds,
            seed=self._seed,
        )

    def _loop(
        self,
        next_id: Callable[[list[int]], int],
        decoder: TextDecoder,
        limit: int,
        end_ids: frozenset[int],
        stops: StopFilter,
    ) -> Generator[str, None, None]:
        outcome = self._outcome
        while len(outcome.ids) < limit:
            id = next_id(outcome.ids)
            if id in end_ids:
                outcome.finish_reason = "stop"
                break
            outcome.ids.append(id)
            piece = stops.push(decoder.push(id))
            if stops.stopped:
                outcome.finish_reason = "stop"
            if piece:
                yield piece
            if stops.stopped:
                break
        if not stops.stopped:
            rest = stops.push(decoder.finish())
            if stops.stopped:
                outcome.finish_reason = "stop"
            else:
                rest += stops.finish()
            if rest:
                yield rest
        self._finished = True
