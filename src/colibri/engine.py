"""A model that is open and ready: load(), and Model with everything a program does with it.

Owns: one model's parts and how they work together. Refuses: arithmetic and memory (the C library), what
sequences hold (sequences.py), choosing tokens (drawing.py), checks (arguments.py), text rules (prompts.py,
tokenizer.py, chat.py, sources.py, generate.py)."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Unpack

import numpy as np

from colibri import _native as native
from colibri import drawing, placement
from colibri import residency as residency_rules
from colibri._native import Floats, Ids, MemoryPlan
from colibri.arguments import IdList, Opening, checked_ids
from colibri.cache import resolve
from colibri.chat import Message
from colibri.errors import ArgumentError
from colibri.generate import Generation, Stream
from colibri.opened import open_file
from colibri.prompts import Prompt, Prompts
from colibri.residency import Traffic
from colibri.sampling import Options
from colibri.sequences import Progress, Sequences
from colibri.tokenizer import Tokenizer

_log = logging.getLogger("colibri")


class Routing(NamedTuple):
    """What the router of one layer decided for every id."""

    logits: Floats  # [n, n_experts] gate logits
    experts: Ids  # [n, n_experts_used] best first
    weights: Floats  # [n, n_experts_used] what the experts' outputs are multiplied by


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    context: int | None = None,
    max_batch: int = 1,
    chunk: int | None = None,
    type: str | None = None,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    requantize: bool = False,
    memory: int | str | None = None,
    residency: str = "auto",
    expert_slots: int | None = None,
    expert_policy: str | None = None,
    lanes: int | None = None,
    prefetch: bool | None = None,
    pin: bool = False,
    numa: int | None = None,
    mlock: bool = False,
    kv_type: str = "f32",
    progress: Progress | None = None,
) -> Model:
    """Opens a model: a `.colibri` file, a Hugging Face directory (converted once into the cache) or "demo".

    threads: 1 to 256, by default the physical cores this process may use. context: most positions of a
    sequence, prompt and answer together, by default what the model was trained for, up to 4096. max_batch:
    sequences held at the same time, for batch_logits and for conversations that alternate. chunk: rows
    evaluated together, 1024 by default.
    type: the weight type, "q8" (default), "q6", "q4", "bf16" or "f32", that a directory is converted to;
    experts, dense (attention, shared experts, dense feed-forward), output (embedding, output head): another
    type for these; requantize: types of GGUF below 4 bits and non-linear ones may be rounded a second time.
    Each is an error where nothing is converted. A conversion is announced to the logger "colibri", level
    INFO.
    memory: most bytes that this process may hold, such as "4GiB" or a number; by default nine tenths of what
    the machine, or its control group, has left. A limit that is too low raises MemoryPlanError, which names
    what is needed.
    residency: "mapped" leaves the weights in the page cache and, unless prefetch is False, reads them ahead
    in a thread while the model is in use already; "resident" copies them into private memory in huge pages
    first, which is read faster; "streamed" copies all but the routed experts, which are read into slots when
    tokens choose them; "auto" is "mapped" where all fits, else "streamed". Model.residency says which it is.
    No choice changes a result.
    expert_slots: experts that are held, of all layers together; by default as many as `memory` allows.
    expert_policy: whose slot is taken for another: "lfru" (default), of the experts used least often lately,
    or "lru", of the one used longest ago. lanes: reads at the same time, 1 to 16, by default 4.
    prefetch: of streamed experts, whether those that the next layer is likely to choose are read while this
    one is computed; by default what proves quicker while tokens are decoded. Model.stats says what streaming
    costs, and which it is.
    kv_type: "f32", or "f16": keys and values are rounded to halves and take half the memory; results differ
    from those of f32 and are the same on every machine, for any threads, batch and chunks, too.
    pin: each thread but the caller's stays on a physical core of its own; more threads than cores are
    refused. numa: threads run on this NUMA node and memory is taken there. mlock: nothing that this process
    uses is swapped out or dropped any more, once it is in memory.
    progress(done, total) is called while weights come in, in bytes: with "resident" and "streamed" before
    load() returns, and what it raises comes out of load(); with "mapped" from the thread that reads ahead,
    also after load() has returned. There it may close the model, and what it raises ends the reading ahead
    and is logged; the model stays usable.
    """
    chosen = Opening(
        threads,
        context,
        max_batch,
        chunk,
        residency,
        prefetch,
        pin,
        progress,
        memory,
        expert_slots,
        expert_policy,
        lanes,
        numa,
        mlock,
        kv_type,
    )
    file = resolve(
        path,
        type,
        notify=_log.info,
        experts=experts,
        dense=dense,
        output=output,
        requantize=requantize,
    )
    with placement.on_node(chosen.node()):
        if chosen.mlock:
            placement.lock_memory()
        return Model(file, chosen)


class Model:
    """An open model with one context. Made by load(); a context manager; usable from several threads, one at
    a time.

    generate, stream, chat and stream_chat take the keywords of colibri.Sampling: max_tokens, temperature,
    top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed, stop,
    json_schema, regex, grammar, logprobs. One that is absent takes the model's own default, else it is off:
    without a default temperature the choice is greedy."""

    def __init__(self, path: Path, chosen: Opening | None = None) -> None:
        if not isinstance(chosen, Opening):
            raise ArgumentError(f"a Model is made by colibri.load: colibri.load({str(path)!r})")
        self.path = path
        opened = open_file(path, chosen)
        handle, params, info = opened.handle, opened.params, opened.info
        closing = weakref.finalize(self, native.close_model, handle)
        self.isa, self.n_vocab, self.config = info.isa, info.n_vocab, opened.config
        self.threads, self.context = params.threads, params.context
        self.max_batch = params.max_batch
        self.chunk = min(params.chunk, params.context * params.max_batch)
        self.chat_template = opened.chat_template
        self.residency, params = residency_rules.decide(handle, chosen, params, opened.n_experts)
        fetching = residency_rules.bring_in(handle, self.residency, chosen, params)
        closing.detach()
        failed = weakref.finalize(self, _end, fetching, handle)  # until there is a context
        self.memory: MemoryPlan = native.plan(handle, params)
        self._counters = native.Counters(info.n_layers)
        context_handle = native.init(handle, params, self._counters)
        failed.detach()
        self._release = weakref.finalize(self, _end, fetching, handle, context_handle, self._counters)
        self._sequences = Sequences(context_handle, params, info.n_vocab)
        self._prompts = Prompts(
            path, opened.rules, opened.chat_template, info.n_vocab, info.n_vocab_used, self._sequences.room
        )
        self._end_reading = fetching

    # --- text

    def generate(
        self,
        prompt: Prompt,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Continues a prompt: a text, in which nothing is a control token, or ids. A model with an encoder
        reads the prompt and writes what it makes of it; src_lang and tgt_lang name the languages of both,
        where the model knows some.

        progress(done, total) is called while the prompt is evaluated, in rows x layers.
        """
        with self._sequences.lock:
            return _read(
                self.stream(prompt, src_lang=src_lang, tgt_lang=tgt_lang, progress=progress, **options)
            )

    def stream(
        self,
        prompt: Prompt,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """generate() piece by piece; the stream's `result` is the Generation."""
        writing = self._prompts.continuing(prompt, src_lang, tgt_lang, options)
        return drawing.stream(self._sequences, writing, progress)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answers a conversation, [{"role": "user", "content": "..."}, ...], with the model's chat template.

        tools and variables are for the template. Control tokens in messages and tools are ordinary text.
        """
        with self._sequences.lock:
            return _read(
                self.stream_chat(messages, tools=tools, variables=variables, progress=progress, **options)
            )

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """chat() piece by piece."""
        ids = self.chat_ids(messages, tools=tools, variables=variables)
        return drawing.stream(self._sequences, self._prompts.answering(ids, options), progress)

    def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids that a conversation becomes."""
        return self._prompts.of_chat(messages, tools, variables)

    def prompt_ids(self, prompt: Prompt, src_lang: str | None = None) -> Ids:
        """The ids that generate() evaluates for a prompt."""
        return self._prompts.of_text(prompt, src_lang)

    def start_ids(self, tgt_lang: str | None = None) -> list[int]:
        """The ids that a target begins with, for logits() and routing(); a model without an encoder has
        none."""
        return self._prompts.of_target(tgt_lang)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    # --- numbers

    def logits(self, ids: IdList, source: Prompt | None = None) -> Floats:
        """Logits after each id, float32 [n, n_vocab]; with an encoder, of a target, which begins with
        start_ids(), for a source."""
        return self.batch_logits([ids], None if source is None else [source])[0]

    def batch_logits(
        self, sequences: Sequence[IdList], sources: Sequence[Prompt] | None = None
    ) -> list[Floats]:
        """Logits of several sequences evaluated together: at most max_batch, each [n, n_vocab]."""
        batch = [checked_ids(ids, self.n_vocab) for ids in sequences]
        if not 1 <= len(batch) <= self.max_batch:
            raise ArgumentError(
                f"sequences: expected 1 to {self.max_batch} (max_batch of load), found {len(batch)} of them"
            )
        rows = [np.empty((len(ids), self.n_vocab), np.float32) for ids in batch]
        self._sequences.evaluate_alone(batch, self._read_sources(sources, len(batch)), rows, None)
        return rows

    def router_logits(self, ids: IdList, source: Prompt | None = None) -> dict[int, Floats]:
        """Gate logits [n, n_experts] of every MoE layer."""
        return {layer: routing.logits for layer, routing in self.routing(ids, source).items()}

    def routing(self, ids: IdList, source: Prompt | None = None) -> dict[int, Routing]:
        """Gate logits, chosen experts and their weights for every id, by MoE layer; in the layers of an
        encoder for every id of the source."""
        checked = checked_ids(ids, self.n_vocab)
        read = self._read_sources(None if source is None else [source], 1)
        found: dict[int, Routing] = {}

        def keep(view: native.RoutingView) -> None:
            rows = view.rows()
            if rows.layer not in found:
                e, k = rows.logits.shape[1], rows.experts.shape[1]
                encoder = rows.layer < self.config["n_encoder_layers"]
                n = len(read[0] if encoder and read[0] is not None else checked)
                found[rows.layer] = Routing(
                    np.empty((n, e), np.float32), np.empty((n, k), np.int32), np.empty((n, k), np.float32)
                )
            into = found[rows.layer]
            into.logits[rows.positions], into.experts[rows.positions] = rows.logits, rows.experts
            into.weights[rows.positions] = rows.weights

        self._sequences.evaluate_alone([checked], read, [None], keep)
        return dict(sorted(found.items()))

    @contextmanager
    def observe(
        self,
        *,
        routing: Callable[[native.RoutingView], object] | None = None,
        expert: Callable[[native.ExpertOutputs], object] | None = None,
    ) -> Iterator[None]:
        """Shows observers what all evaluations do while the `with` block lasts. What they raise ends the
        evaluation and comes out of it; results are the same bits with and without.

        routing: once for each chunk and MoE layer, what its router decided. expert: then, by ascending
        number, each routed expert that a row chose: its outputs [rows, n_embd] before they are weighted,
        which lie in one array that the next expert is written over: copy what should last."""
        with self._sequences.lock:
            if self._sequences.watches:
                raise ArgumentError("the model is being observed already: end the other one first")
            watches: dict[str, Any] = {} if routing is None else {"routing": routing}
            if expert is not None:
                outputs = np.empty((self.chunk, self.config["n_embd"]), np.float32)
                watches["expert"] = native.ExpertObserver(expert, outputs)
            self._sequences.watches = watches
        try:
            yield
        finally:
            self._sequences.watches = {}

    @property
    def stats(self) -> Traffic:
        """What streamed experts have cost so far; nothing where no expert is streamed. A copy."""
        return Traffic.of(self._sequences.rows, self._counters)

    # --- life

    @property
    def position(self) -> int:
        """Positions held by the sequence that was used last."""
        return self._sequences.position

    def cancel(self) -> None:
        """Ends every generation and evaluation that has begun: it raises CancelledError in its own thread.
        What begins later is not touched. From any thread."""
        self._sequences.cancel()

    def close(self) -> None:
        """Wipes and releases the context and the file; waits for a running evaluation."""
        self._end_reading()  # first, and without the lock: progress may be closing the model itself
        self._sequences.close(self._release)

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._sequences.closed
            else f"context {self.context}, {self.threads} threads, {self.isa}"
        )
        return f"<colibri.Model {self.path.name}: {state}>"

    def _read_sources(self, sources: Sequence[Prompt] | None, n: int) -> list[Ids | None]:
        """The ids of each sequence's source; None for each without an encoder."""
        if self._prompts.source_rules is None and sources is None:
            return [None] * n
        if self._prompts.source_rules is None or sources is None:
            has = "an encoder" if sources is None else "no encoder"
            raise ArgumentError(f"source: the model has {has}, found {'none' if sources is None else 'one'}")
        if len(sources) != n:
            raise ArgumentError(f"sources: expected {n}, one for each sequence, found {len(sources)}")
        return [self.prompt_ids(source) for source in sources]


def _read(stream: Stream) -> Generation:
    for _ in stream:
        pass
    return stream.result


def _end(
    fetching: Callable[[], None],
    model: native.ModelHandle,
    context: native.ContextHandle | None = None,
    _counters: native.Counters | None = None,  # the context adds to them as long as it lives
) -> None:
    fetching()
    if context is not None:
        native.free(context)
    native.close_model(model)
