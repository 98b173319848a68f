"""/v1/completions: texts that continue prompts.

Owns: the body of the answer and of its chunks. Refuses: conversations (chat.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from starlette.requests import Request

from colibri.async_engine import AsyncStream
from colibri.generate import Generation, Logprobs
from colibri.sampling import Options
from colibri.server.choices import begin, close, pieces, read, unless_gone
from colibri.server.events import DONE, EventStream, event, openai_failure, usage
from colibri.server.failures import Failure
from colibri.server.logprobs import completion_logprobs
from colibri.server.requests import CompletionRequest
from colibri.server.served import Served


async def complete(
    request: Request, body: CompletionRequest, served: Served, client: Hashable
) -> dict[str, Any] | EventStream:
    """The answer, or its stream."""
    _check(body)
    n, prompts = body.n or 1, body.prompts()
    options: Options = body.options(served.model._prompts.defaults)
    options["max_tokens"], options["logprobs"] = body.max_tokens, body.logprobs
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = body.logprobs
    streams: list[AsyncStream] = []
    try:
        for prompt in prompts:
            streams += await begin(served, served.continuing(prompt), options, n, client)
    except BaseException:
        await close(streams)
        raise
    echoes = [served.text_of(prompt) if body.echo else "" for prompt in prompts for _ in range(n)]
    answer = _Answer(served, streams, echoes, n)
    if body.stream:
        return EventStream(request, answer.events(body.usage_at_end), openai_failure)
    return answer.whole(await unless_gone(request, read(streams)))


def _check(body: CompletionRequest) -> None:
    body.check_stream()
    if body.suffix:
        raise Failure(
            400, "suffix: the model continues texts and fills no gaps: leave it out", param="suffix"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Failure(400, f"best_of: expected n ({body.n or 1}), found {body.best_of}", param="best_of")


class _Answer:
    """The bodies of one answer."""

    def __init__(self, served: Served, streams: list[AsyncStream], echoes: Sequence[str], n: int) -> None:
        """echoes: what stands in front of each text. n: texts of each prompt."""
        self._tokenizer, self._streams, self._echoes, self._n = served.tokenizer, streams, echoes, n
        self._shown = [0] * len(streams)  # tokens whose log-probabilities have been told
        self._offsets = [0] * len(streams)  # characters of these tokens
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def whole(self, found: list[Generation]) -> dict[str, Any]:
        choices = [
            self._choice(at, self._echoes[at] + one.text, one.finish_reason) for at, one in enumerate(found)
        ]
        return {**self._head, "choices": choices, "usage": usage(self._streams, self._n)}

    async def events(self, usage_at_end: bool) -> AsyncIterator[str]:
        for at, echo in enumerate(self._echoes):
            if echo:
                yield event({**self._head, "choices": [self._choice(at, echo, None, echo=True)]})
        async for at, piece in pieces(self._streams):
            reason = self._streams[at].result.finish_reason if piece is None else None
            yield event({**self._head, "choices": [self._choice(at, piece or "", reason)]})
        if usage_at_end:
            yield event({**self._head, "choices": [], "usage": usage(self._streams, self._n)})
        yield DONE

    def _choice(self, at: int, text: str, reason: str | None, echo: bool = False) -> dict[str, Any]:
        logprobs = None if echo else self._logprobs(at)
        return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, at: int) -> dict[str, Any] | None:
        """Of the tokens that have not been told yet, after the first piece those of an echoed prompt too."""
        stream = self._streams[at]
        if stream.logprobs is None or self._tokenizer is None:
            return None
        found: list[tuple[int, Logprobs | None]] = [(one.id, one) for one in stream.logprobs]
        if stream.prompt_logprobs is not None:
            prompt = [(one.id, one) for one in stream.prompt_logprobs]
            found = [(stream.prompt_ids[0], None), *prompt, *found]
        told = completion_logprobs(self._tokenizer, found[self._shown[at] :], self._offsets[at])
        self._shown[at] = len(found)
        self._offsets[at] += sum(map(len, told["tokens"]))
        return told
