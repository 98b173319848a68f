"""The loop from tokens to text: limits, end tokens, stop texts, streaming.

Owns: when a generation ends and why, and that nothing of a stop text leaks: generate() is stream() read to
its end, so both give the same text.
Refuses: evaluation and sampling: a function that returns the next id is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

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


class Logprobs(NamedTuple):
    """How likely an id was: natural logarithms of the softmax of the model's logits as they are, before
    penalties, biases, constraints and temperature."""

    id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely ids, best first; of equals the lowest


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
    logprobs: list[Logprobs] | None = None  # one for each of ids, if they were asked for
    prompt_logprobs: list[Logprobs] | None = None  # of the prompt from its second id on, if they were
    stop_text: str | None = None  # the one of `stop` that ended the text

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
    logprobs: list[Logprobs] | None = None  # of every id drawn, an end token too; None: nobody asked
    prompt_logprobs: list[Logprobs] | None = None  # of the prompt from its second id on; None: nobody asked
    complete: bool = False  # the text matches what it must, and nothing can follow


class StopFilter:
    """Lets text through up to the first stop text. What could be the beginning of one is held back.

    The stop text that is complete first counts (of two that end together, the longer one): that depends on
    the text alone, not on how tokens divide it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the stop text that counts

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """The part of what was held and of `text` that may be shown now."""
        if not self._stops:
            return text
        held = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return held[:at]
        keep = max(overlap(held, stop) for stop in self._stops)
        shown = len(held) - keep
        self._held = held[shown:]
        return held[:shown]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Answer:
    """One text as it comes about: ids are pushed, pieces of complete characters come out, until
    `finish_reason` says why it ends."""

    def __init__(
        self, decoder: TextDecoder, *, limit: int, end_ids: Collection[int], stops: Sequence[str] = ()
    ) -> None:
        """limit: most ids."""
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None if limit > 0 else "length"
        self._decoder, self._limit, self._end_ids = decoder, limit, end_ids
        self._stops = StopFilter(stops)

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended it."""
        return self._stops.found

    def push(self, id: int, complete: bool = False) -> str:
        """The piece that may be shown now. complete: nothing can follow this id."""
        if id in self._end_ids:
            return self._end("stop")
        self.ids.append(id)
        piece = self._stops.push(self._decoder.push(id))
        if self._stops.stopped:
            self.finish_reason = "stop"
        elif complete:
            piece += self._end("stop")
        elif len(self.ids) == self._limit:
            piece += self._end("length")
        return piece

    def _end(self, reason: FinishReason) -> str:
        rest = self._stops.push(self._decoder.finish())
        if not self._stops.stopped:
            rest += self._stops.finish()
        self.finish_reason = "stop" if self._stops.stopped else reason
        return rest


def finished(answer: Answer, work: Work, text: str, n_prompt: int, seed: int | None) -> Generation:
    """The Generation that an answer has become."""
    if answer.finish_reason is None:
        raise ArgumentError(
            "the stream is not at its end: read all of its pieces before asking for the result"
        )
    return Generation(
        text=text,
        ids=list(answer.ids),
        finish_reason=answer.finish_reason,
        n_prompt=n_prompt,
        n_reused=work.n_reused,
        n_generated=len(answer.ids),
        prefill_seconds=work.prefill_seconds,
        decode_seconds=work.decode_seconds,
        seed=seed,
        logprobs=None if work.logprobs is None else work.logprobs[: len(answer.ids)],
        prompt_logprobs=work.prompt_logprobs,
        stop_text=answer.stop_text,
    )


class Stream(Iterator[str]):
    """Pieces of text as they come, each of complete characters. After the last one `result` is the
    Generation."""

    def __init__(
        self,
        next_id: Callable[[list[int]], int],
        answer: Answer,
        *,
        n_prompt: int,
        seed: int | None = None,
        work: Work | None = None,
        read_prompt: Callable[[], object] | None = None,
    ) -> None:
        """next_id: given the ids generated so far, the next one. read_prompt: called before all of them."""
        self._answer = answer
        self._texts: list[str] = []
        self._work = work or Work()
        self._n_prompt, self._seed = n_prompt, seed
        self._pieces = self._loop(next_id, read_prompt)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._texts.append(piece)
        return piece

    def close(self) -> None:
        """Ends the generation early; `result` stays unavailable, `text` is what came."""
        self._pieces.close()

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._texts)

    @property
    def result(self) -> Generation:
        """The finished Generation."""
        return finished(self._answer, self._work, self.text, self._n_prompt, self._seed)

    def _loop(
        self, next_id: Callable[[list[int]], int], read_prompt: Callable[[], object] | None
    ) -> Generator[str, None, None]:
        if read_prompt is not None:
            read_prompt()
        while self._answer.finish_reason is None:
            id = next_id(self._answer.ids)
            piece = self._answer.push(id, self._work.complete)
            if piece:
                yield piece
