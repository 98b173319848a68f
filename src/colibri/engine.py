"""A model that is open and ready: load(), and Model with everything a program does with it.

Owns: checks of parameters and ids, what the file's blobs mean, and drawing tokens for a stream.
Refuses: arithmetic and memory (the C library), what sequences hold (sequences.py), text rules (tokenizer.py,
chat.py, generate.py)."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from colibri import _native as native
from colibri import chat as chat_template
from colibri import sampling as sampling_rules
from colibri._native import Floats, Ids, MemoryPlan
from colibri.cache import DEMO, resolve
from colibri.errors import ArgumentError, ModelFileError, UnsupportedError
from colibri.format import read_blobs, read_json_blob
from colibri.generate import Generation, NoText, Stream, Work
from colibri.sampling import Options, Sampling
from colibri.sequences import Progress, Sequences
from colibri.tokenizer import Tokenizer

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
_log = logging.getLogger("colibri")
IdList = Sequence[int] | npt.NDArray[np.integer[Any]]


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
) -> Model:
    """Opens a model: a `.colibri` file, a Hugging Face directory (converted once into the cache) or "demo".

    threads: 1 to 256, by default the CPUs this process may use. context: most positions of a sequence, prompt
    and answer together, by default what the model was trained for, up to 4096. max_batch: sequences held at
    the same time, for batch_logits and for conversations that alternate. chunk: rows evaluated together.
    type: the weight type, "q8" (default), "bf16" or "f32", that a directory is converted to; an error for
    what is not converted. A conversion is announced to the logger "colibri", level INFO."""
    name = os.fspath(path)
    if type is not None and (name == DEMO or not Path(name).is_dir()):
        raise ArgumentError(
            f"type={type!r} has no effect: {name} is not a Hugging Face directory, so nothing is converted"
        )
    file = resolve(name, type or "q8", notify=_log.info)
    return Model(file, threads=threads, context=context, max_batch=max_batch, chunk=chunk)


class Model:
    """An open model with one context. Made by load(); a context manager; usable from several threads, one at
    a time.

    generate, stream, chat and stream_chat take the keywords of colibri.Sampling: max_tokens, temperature,
    top_k, top_p, min_p, repetition_penalty, seed, stop. One that is absent takes the model's own default,
    else it is off: without a default temperature the choice is greedy."""

    def __init__(
        self, path: Path, *, threads: int | None, context: int | None, max_batch: int, chunk: int | None
    ) -> None:
        asked = {
            "threads": _bounded("threads", threads, 256),
            "context": _bounded("context", context, 2**30),
            "max_batch": _bounded("max_batch", max_batch, 4096),
            "chunk": _bounded("chunk", chunk, 4096),
        }
        self.path = path
        handle = native.open_model(path)
        opened = weakref.finalize(self, native.close_model, handle)  # until there is a context
        info = native.info(handle)
        defaults = native.default_params(handle)
        values = {name: getattr(defaults, name) for name in asked} | {
            k: v for k, v in asked.items() if v is not None
        }
        if chunk is None:  # the default follows from the other two
            values["chunk"] = min(values["context"] * values["max_batch"], 512)
        params = native.Params(**values)
        self.isa, self.n_vocab = info.isa, info.n_vocab
        self.threads, self.context = params.threads, params.context
        self.max_batch, self.chunk = params.max_batch, params.chunk
        self.config = _config(handle)
        if params.context > info.context_length:
            _log.warning(
                "context %d is longer than the %d positions that %s was trained for: beyond them it may "
                "write nonsense",
                params.context,
                info.context_length,
                path.name,
            )
        self.memory: MemoryPlan = native.plan(handle, params)
        blobs = read_blobs(path)
        rules = _rules(blobs)
        self._defaults, self._end_ids = rules["defaults"], rules["eos_ids"]
        self._template_names = rules["special_tokens"]
        self._tokenizer = (
            Tokenizer(
                blobs["tokenizer.json"],
                bos_id=rules["bos_id"],
                eos_ids=rules["eos_ids"],
                add_bos=rules["add_bos"],
                n_vocab=info.n_vocab,
            )
            if "tokenizer.json" in blobs
            else None
        )
        template = blobs.get("chat_template.jinja")
        self.chat_template = None if template is None else template.decode("utf-8", "replace")
        context_handle = native.init(handle, params)
        opened.detach()
        self._release = weakref.finalize(self, _release, handle, context_handle)
        self._sequences = Sequences(context_handle, params, info.n_vocab)

    # --- text

    def generate(
        self, prompt: Prompt, *, progress: Progress | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Continues a prompt: a text, in which nothing is a control token, or ids.

        progress(done, total) is called while the prompt is evaluated, in rows x layers.
        """
        with self._sequences.lock:
            return _read(self.stream(prompt, progress=progress, **options))

    def stream(
        self, prompt: Prompt, *, progress: Progress | None = None, **options: Unpack[Options]
    ) -> Stream:
        """generate() piece by piece; the stream's `result` is the Generation."""
        ids = self.prompt_ids(prompt)
        return self._stream(ids, sampling_rules.from_options(options), progress, answer=False)

    def chat(
        self,
        messages: Sequence[chat_template.Message],
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
        messages: Sequence[chat_template.Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """chat() piece by piece."""
        ids = _checked_ids(self.chat_ids(messages, tools=tools, variables=variables), self.n_vocab)
        return self._stream(ids, sampling_rules.from_options(options), progress, answer=True)

    def chat_ids(
        self,
        messages: Sequence[chat_template.Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids that a conversation becomes."""
        tokenizer = self.tokenizer
        text, mark = chat_template.render(
            self.chat_template,
            messages,
            control=tokenizer.control_ids,
            tools=tools,
            variables={**self._template_names, **(variables or {})},
        )
        return tokenizer.encode(text, special=True, mark=mark)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """The ids that generate() evaluates for a prompt."""
        if not isinstance(prompt, str):
            return _checked_ids(prompt, self.n_vocab)
        ids = self.tokenizer.encode_prompt(prompt)
        if not ids:
            raise ArgumentError(
                "prompt: it is empty, and the model has no BOS token to begin a text with; give a text"
            )
        return _checked_ids(ids, self.n_vocab)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UnsupportedError(
                f"{self.path} has no tokenizer, so it takes and gives ids only: pass a list of ids, or "
                "convert a checkpoint with a tokenizer.json"
            )
        return self._tokenizer

    # --- numbers

    def logits(self, ids: IdList) -> Floats:
        """Logits after each id, float32 [n, n_vocab]."""
        return self.batch_logits([ids])[0]

    def batch_logits(self, sequences: Sequence[IdList]) -> list[Floats]:
        """Logits of several sequences evaluated together: at most max_batch, each [n, n_vocab]."""
        batch = [_checked_ids(ids, self.n_vocab) for ids in sequences]
        if not 1 <= len(batch) <= self.max_batch:
            raise ArgumentError(
                f"sequences: expected 1 to {self.max_batch} (max_batch of load), found {len(batch)} of them"
            )
        rows = [np.empty((len(ids), self.n_vocab), np.float32) for ids in batch]
        self._sequences.evaluate_alone(batch, rows, None)
        return rows

    def router_logits(self, ids: IdList) -> dict[int, Floats]:
        """Gate logits [n, n_experts] of every MoE layer."""
        return {layer: routing.logits for layer, routing in self.routing(ids).items()}

    def routing(self, ids: IdList) -> dict[int, Routing]:
        """Gate logits, chosen experts and their weights for every id, by MoE layer."""
        checked = _checked_ids(ids, self.n_vocab)
        found: dict[int, Routing] = {}

        def keep(rows: native.RoutingRows) -> None:
            if rows.layer not in found:
                e, k = rows.logits.shape[1], rows.experts.shape[1]
                found[rows.layer] = Routing(
                    np.empty((len(checked), e), np.float32),
                    np.empty((len(checked), k), np.int32),
                    np.empty((len(checked), k), np.float32),
                )
            into = found[rows.layer]
            into.logits[rows.positions], into.experts[rows.positions] = rows.logits, rows.experts
            into.weights[rows.positions] = rows.weights

        self._sequences.evaluate_alone([checked], [None], keep)
        return dict(sorted(found.items()))

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

    def _stream(self, ids: Ids, given: Sampling, progress: Progress | None, *, answer: bool) -> Stream:
        self._sequences.context  # noqa: B018 - a closed model is an error now, not at the first piece
        if given.stop and self._tokenizer is None:
            raise ArgumentError("stop: the model has no tokenizer, so there is no text to look for it in")
        chosen = sampling_rules.resolve(given, self._defaults)
        room = self._sequences.room(len(ids))
        limit = room if given.max_tokens is None else min(room, given.max_tokens)
        work = Work()
        return Stream(
            _drawer(self._sequences, self.n_vocab, ids, limit, chosen, progress, work),
            NoText() if self._tokenizer is None else self._tokenizer.decoder(start=answer),
            limit=limit,
            n_prompt=len(ids),
            end_ids=self._end_ids,
            stops=chosen.stops,
            seed=chosen.seed,
            work=work,
        )


def _drawer(
    sequences: Sequences,
    n_vocab: int,
    prompt: Ids,
    limit: int,
    chosen: Sampling,
    progress: Progress | None,
    work: Work,
) -> Callable[[list[int]], int]:
    """The function that gives a Stream its next id: evaluates what a sequence lacks, then draws.

    Between two calls other work may use the model: the sequence is found or made again, with the same result.
    """
    ids = np.empty(len(prompt) + limit, np.int32)
    ids[: len(prompt)] = prompt
    penalised = chosen.repetition_penalty != 1
    sampler = native.sampler(
        native.Sampler(
            temperature=float(chosen.temperature or 0),
            top_k=min(int(chosen.top_k or 0), n_vocab),
            top_p=float(chosen.top_p or 1),
            min_p=float(chosen.min_p or 0),
            repetition_penalty=float(chosen.repetition_penalty or 1),
            seed=int(chosen.seed or 0),
        )
    )
    began = sequences.cancels
    sequence = -1

    def next_id(generated: list[int]) -> int:
        nonlocal sequence
        n = len(prompt) + len(generated)
        if generated:
            ids[n - 1] = generated[-1]
        with sequences.lock:
            started = time.perf_counter()
            sequence, reused = sequences.hold(ids[:n], sequence, began, None if generated else progress)
            id = native.sample(
                sequences.context, sequences.logits, sampler, ids[:n] if penalised else None, n
            )
            seconds = time.perf_counter() - started
        if generated:
            work.decode_seconds += seconds
        else:
            work.prefill_seconds, work.n_reused = seconds, reused
        return id

    return next_id


def _read(stream: Stream) -> Generation:
    for _ in stream:
        pass
    return stream.result


def _release(model: native.ModelHandle, context: native.ContextHandle) -> None:
    native.free(context)
    native.close_model(model)


def _config(handle: native.ModelHandle) -> dict[str, Any]:
    """Every config field; a list with one value per layer where the field is per layer."""
    fields = native.config_schema()["fields"]
    n_layers = int(native.config_value(handle, "n_layers"))
    config: dict[str, Any] = {}
    for field in fields:
        number = int if field["type"] == "int" else float
        count = n_layers if field["per_layer"] else 1
        values = [number(native.config_value(handle, field["name"], layer)) for layer in range(count)]
        config[field["name"]] = values if field["per_layer"] else values[0]
    return config


def _rules(blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """generation.json, checked, with every key present."""
    found = read_json_blob(blobs, "generation.json")
    empty: dict[str, Any] = {
        "bos_id": None,
        "eos_ids": [],
        "add_bos": False,
        "defaults": {},
        "special_tokens": {},
    }
    rules = empty | found
    sound = (
        (rules["bos_id"] is None or type(rules["bos_id"]) is int)
        and isinstance(rules["eos_ids"], list)
        and all(type(id) is int for id in rules["eos_ids"])
        and isinstance(rules["add_bos"], bool)
        and isinstance(rules["defaults"], dict)
        and isinstance(rules["special_tokens"], dict)
    )
    if not sound:
        raise ModelFileError(
            "the embedded generation.json: expected "
            '{"bos_id": int or null, "eos_ids": [int], "add_bos": bool, '
            f'"defaults": {{}}, "special_tokens": {{}}}}, found {found!r:.200}; convert the model again'
        )
    return rules


def _bounded(name: str, value: object, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= high:
        raise ArgumentError(f"{name}: expected an integer from 1 to {high}, found {value!r}")
    return int(value)


def _checked_ids(ids: IdList, n_vocab: int) -> Ids:
    """Contiguous int32 [n], n at least 1, every id a row of the embedding."""
    if isinstance(ids, str | bytes):
        raise ArgumentError(
            "ids: expected a list of integers, found a text; Model.tokenizer.encode makes ids of it"
        )
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"ids: expected a list of integers, found {ids!r:.80}")
    if not array.size:
        raise ArgumentError("ids: expected at least one, found none")
    wrong = np.flatnonzero((array < 0) | (array >= n_vocab))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(f"ids[{at}]: expected 0 to {n_vocab - 1} (n_vocab - 1), found {array[at]}")
    return np.ascontiguousarray(array, np.int32)
