"""Colibri and Transformers in a worker: how each is loaded and its loop.

Owns: Engine and Answer, what a worker needs of any engine. Refuses: talking to the process that asks
(worker.py), llama.cpp and ik_llama.cpp (peers.py).
"""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class Answer(NamedTuple):
    """Tokens and times of one request."""

    ids: list[int]  # chosen greedily
    first_seconds: float  # from the prompt to the first token
    decode_seconds: float  # from the first token to the last
    decoded: int  # tokens evaluated in this time
    first_at: float  # time.time() at the first token
    stats: dict[str, float] | None = None  # of streamed experts, while decoding


class Engine(NamedTuple):
    """What a worker needs of an engine."""

    generate: Callable[[list[int], int, list[int] | None], Answer]  # prompt, n tokens or given ones
    logits: Callable[[list[int]], Logits] | None  # [n, n_vocab]
    setting: dict[str, Any]


def colibri_engine(
    model: str, threads: int, context: int, residency: str = "mapped", **options: Any
) -> Engine:
    """The Python face as a program uses it, load() and stream(); given ids go the same way into the
    library. options: more keywords of load()."""
    import colibri

    if "memory" in options:
        residency = "auto"
    opened = colibri.load(model, threads=threads, context=context, residency=residency, **options)
    opened._prompts.end_ids = ()  # the work is a number of tokens, whatever they say

    def follow(ids: list[int], then: list[int]) -> Answer:
        from colibri.analysis.runs import Loops

        loops = Loops(opened, len(ids), len(then))
        loops.ids = np.array([*ids, *then], np.int32)
        first = loops.prefill()
        first_at = time.time()
        before, waited = opened.stats, loops.decode()
        return Answer([], first, waited, len(then), first_at, _since(before, opened.stats))

    def generate(ids: list[int], n: int, then: list[int] | None) -> Answer:
        if then is not None:
            return follow(ids, then)
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
                f"engines.py: expected {n} new tokens after a prompt evaluated whole, found "
                f"{result.n_generated} after one with {result.n_reused} tokens reused"
            )
        return Answer(result.ids, first, total - first, n - 1, first_at)

    return Engine(generate, opened.logits, {"isa": opened.isa, "threads": opened.threads, "kv": "f32"})


def _since(before: Any, after: Any) -> dict[str, Any] | None:
    """What streamed experts cost between two states of Model.stats; None where none was streamed."""
    between = after.since(before)
    if between.uses == 0:
        return None
    return {
        "hit_rate": round(between.hit_rate, 4),
        "mb_per_token": round(between.bytes_per_token / 1e6, 1),
        "prefetch": between.prefetch.state,
        "asked_rate": round(between.asked_rate, 4),
    }


def transformers_engine(model: str, threads: int, dtype: str, experts: str) -> Engine:
    """A checkpoint, by AutoModelForCausalLM."""
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
    # batched_mm copies the weights of all experts that tokens choose: fine for one token, not for a prompt.
    of_prompt = "grouped_mm" if experts == "batched_mm" else experts
    return _transformers_loop(loaded, threads, experts, of_prompt, None)


def transformers_shape_engine(
    shape: str, threads: int, context: int, dtype: str, prompt_experts: str, experts: str
) -> Engine:
    """A model of a named shape, drawn here. Its KV cache has its full size from the start (StaticCache): one
    that grows is copied for every token."""
    import torch
    import transformers as package

    import torch_model

    transformers: Any = package
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    loaded = torch_model.build(shape, dtype, experts)
    cache = transformers.StaticCache(config=loaded.config, max_cache_len=context)
    return _transformers_loop(loaded, threads, experts, prompt_experts, cache)


def _transformers_loop(loaded: Any, threads: int, experts: str, of_prompt: str, static: Any) -> Engine:
    """A loop around forward(), which costs less a token than generate(). static: a KV cache of fixed size
    that all requests use, or None for one that grows."""
    import torch

    # The keyword of the KV cache has a new name since Transformers 5.24.
    cache = "cache" if "cache" in inspect.signature(loaded.forward).parameters else "past_key_values"

    def generate(ids: list[int], n: int, then: list[int] | None) -> Answer:
        with torch.inference_mode():
            if of_prompt != experts:
                loaded.set_experts_implementation(of_prompt)
            if static is not None:
                static.reset()
            started = time.perf_counter()
            out = loaded(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{cache: static})
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens = [int(token)]
            first, first_at = time.perf_counter(), time.time()
            if of_prompt != experts:
                loaded.set_experts_implementation(experts)
            second = time.perf_counter()
            decoded = n - 1 if then is None else len(then)
            for at in range(decoded):
                given = token if then is None else torch.tensor([[then[at]]])
                out = loaded(input_ids=given, use_cache=True, **{cache: out.past_key_values})
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(token))
            ended = time.perf_counter()
        return Answer(tokens, first - started, ended - second, decoded, first_at)

    def logits(ids: list[int]) -> Logits:
        with torch.inference_mode():
            values: Logits = loaded(input_ids=torch.tensor([ids])).logits[0].float().numpy()
        return values

    setting = {
        "attention": loaded.config._attn_implementation,
        "threads": threads,
        "cache": "growing" if static is None else "static",
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }
    return Engine(generate, logits, setting)
