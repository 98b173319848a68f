"""One engine in a process of its own, driven by decode.py: JSON requests on stdin, JSON answers on stdout.

Owns: how each engine is loaded and its greedy loop. A request {"ids": [...], "n": N} evaluates the prompt and
draws N tokens, never stopping early; {"ids": [...], "logits": FILE} writes the logits of all ids to a file.
Refuses: prompts, rounds, comparing: decode.py's.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from machine import memory

Logits = npt.NDArray[np.float32]


class Answer(NamedTuple):
    """Tokens and times of one request."""

    ids: list[int]
    first_seconds: float  # from the prompt to the first token
    decode_seconds: float  # from the first token to the last
    first_at: float  # time.time() at the first token


class Engine(NamedTuple):
    """What a worker needs of an engine."""

    generate: Callable[[list[int], int], Answer]
    logits: Callable[[list[int]], Logits]  # [n, n_vocab]
    setting: dict[str, Any]


def colibri_engine(model: str, threads: int, context: int) -> Engine:
    """The Python face as a program uses it: load() and stream()."""
    import colibri

    opened = colibri.load(model, threads=threads, context=context)
    opened._end_ids = ()  # the work is a number of tokens, whatever they say

    def generate(ids: list[int], n: int) -> Answer:
        started = time.perf_counter()
        stream = opened.stream(ids, max_tokens=n, temperature=0)
        prepared = time.perf_counter() - started
        next(stream, "")  # the first piece of text
        first_at = time.time()
        for _ in stream:
            pass
        total = time.perf_counter() - started
        result = stream.result
        first = prepared + result.prefill_seconds  # the engine's own clock: a token may bring no text
        if result.n_generated != n or result.n_reused:
            raise SystemExit(
                f"decode_worker.py: expected {n} new tokens after a prompt evaluated whole, found "
                f"{result.n_generated} after one with {result.n_reused} tokens reused"
            )
        return Answer(result.ids, first, total - first, first_at)

    return Engine(generate, opened.logits, {"isa": opened.isa, "threads": opened.threads})


def transformers_engine(model: str, threads: int, dtype: str, experts: str) -> Engine:
    """AutoModelForCausalLM and a loop around forward(), which costs less a token than its generate()."""
    import torch
    import transformers as package

    transformers: Any = package  # parts of its types are missing
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    options = {"experts_implementation": experts} if experts else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa", **options
    ).eval()
    # The keyword of the KV cache has a new name since Transformers 5.24.
    cache = "cache" if "cache" in inspect.signature(loaded.forward).parameters else "past_key_values"

    # batched_mm copies the weights of all experts that tokens choose: fine for one token, not for a prompt.
    of_prompt = "grouped_mm" if experts == "batched_mm" else experts

    def generate(ids: list[int], n: int) -> Answer:
        with torch.inference_mode():
            if of_prompt != experts:
                loaded.set_experts_implementation(of_prompt)
            started = time.perf_counter()
            out = loaded(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens = [int(token)]
            first, first_at = time.perf_counter(), time.time()
            if of_prompt != experts:
                loaded.set_experts_implementation(experts)
            second = time.perf_counter()
            while len(tokens) < n:
                out = loaded(input_ids=token, use_cache=True, **{cache: out.past_key_values})
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(token))
            ended = time.perf_counter()
        return Answer(tokens, first - started, ended - second, first_at)

    def logits(ids: list[int]) -> Logits:
        with torch.inference_mode():
            values: Logits = loaded(input_ids=torch.tensor([ids])).logits[0].float().numpy()
        return values

    return Engine(generate, logits, {"attention": loaded.config._attn_implementation, "threads": threads})


def serve(engine: Engine, answers: Any) -> None:
    """Answers requests until stdin ends."""

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(engine.setting)
    for line in sys.stdin:
        request = json.loads(line)
        if "logits" in request:
            np.save(request["logits"], engine.logits(request["ids"]))
            answer({})
        else:
            answer(engine.generate(request["ids"], request["n"])._asdict() | {"memory": memory()})


def main() -> None:
    """decode_worker.py ENGINE JSON-ARGUMENTS. What libraries print goes to stderr: stdout is for answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        makers: dict[str, Callable[..., Engine]] = {
            "colibri": colibri_engine,
            "transformers": transformers_engine,
        }
        serve(makers[sys.argv[1]](**json.loads(sys.argv[2])), answers)


if __name__ == "__main__":
    main()
