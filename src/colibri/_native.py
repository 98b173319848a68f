"""The only module that calls libcolibri: one thin typed function for each C function.

Owns: statuses to exceptions, numpy arrays to pointers (never copied), exceptions of observers carried through
C and raised again.
Refuses: finding the library (_library.py), policy. Defaults, caching, locking and text are the engine's. A
handle belongs to one thread at a time, except for cancel(); one that was closed or freed must not be used
again: nothing here can notice.

cffi's ABI mode releases the GIL during every call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NewType

import numpy as np

from colibri._library import config_schema as config_schema
from colibri._library import declared_version as declared_version
from colibri._library import load as _load
from colibri._records import Bytes
from colibri._records import Counters as Counters
from colibri._records import Counts as Counts
from colibri._records import ExpertObserver as ExpertObserver
from colibri._records import ExpertOutputs as ExpertOutputs
from colibri._records import Floats as Floats
from colibri._records import Ids as Ids
from colibri._records import Input as Input
from colibri._records import MemoryPlan as MemoryPlan
from colibri._records import ModelInfo as ModelInfo
from colibri._records import Params as Params
from colibri._records import Progress as Progress
from colibri._records import Recording as Recording
from colibri._records import RoutingObserver as RoutingObserver
from colibri._records import RoutingRows as RoutingRows
from colibri._records import RoutingView as RoutingView
from colibri._records import Sampler as Sampler
from colibri.errors import ArgumentError, from_status

ModelHandle = NewType("ModelHandle", object)
ContextHandle = NewType("ContextHandle", object)

# Structs that point to other cffi objects keep them alive here.
_PROFILED: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def version() -> str:
    """Version of the library."""
    ffi, library = _load()
    return str(ffi.string(library.colibri_version()).decode())


def status_text(status: int) -> str:
    """A short name of a status."""
    ffi, library = _load()
    return str(ffi.string(library.colibri_status_text(status)).decode())


def _text(error: Any) -> str:
    ffi, _ = _load()
    return str(ffi.string(error.text).decode("utf-8", "replace"))


def _check(status: int, error: Any) -> None:
    if status < 0:
        raise from_status(status, _text(error))


def _check_context(status: int, context: ContextHandle) -> int:
    if status < 0:
        raise from_status(status, last_error(context)[1])
    return status


def open_model(path: Path) -> ModelHandle:
    ffi, library = _load()
    model, error = ffi.new("colibri_model **"), ffi.new("colibri_error *")
    name = bytes(path)
    if b"\0" in name:
        raise ArgumentError(f"a path holds no NUL character, found {str(path)!r}")
    _check(library.colibri_open(name, model, error), error)
    return ModelHandle(model[0])


def close_model(model: ModelHandle) -> None:
    _load()[1].colibri_close(model)


def info(model: ModelHandle) -> ModelInfo:
    ffi, library = _load()
    found = library.colibri_info(model)
    values = {name: getattr(found, name) for name in ModelInfo.__slots__ if name != "isa"}
    return ModelInfo(**values, isa=ffi.string(found.isa).decode())


def config_bytes(model: ModelHandle) -> bytes:
    """The config section of the file, as the library checked it."""
    ffi, library = _load()
    found = library.colibri_info(model)
    return bytes(ffi.buffer(found.config, found.config_bytes))


def default_params(model: ModelHandle) -> Params:
    ffi, library = _load()
    params = ffi.new("colibri_params *")
    status = library.colibri_default_params(model, params)
    if status < 0:
        raise from_status(status, f"the default parameters: {status_text(status)}")
    return Params(**{name: getattr(params, name) for name in Params.__slots__})


def _params(params: Params, counters: Counters | None = None) -> Any:
    """counters must outlive the context."""
    ffi, _ = _load()
    values = {name: getattr(params, name) for name in Params.__slots__}
    for name in ("traffic", "gate") if counters is not None else ():
        array = ffi.from_buffer(getattr(counters, name), require_writable=True)
        values[name] = ffi.cast(f"colibri_{name} *", array)
    return ffi.new("colibri_params *", values)


def fetch(model: ModelHandle, residency: int, progress: Progress) -> None:
    """colibri_fetch; an exception of `progress` ends the work and is raised."""
    ffi, library = _load()
    error, raised = ffi.new("colibri_error *"), []

    def keep(_type: object, exception: BaseException, _trace: object) -> None:
        raised.append(exception)

    def report(_user: object, done: int, total: int) -> int:
        progress(done, total)
        return 0

    callback = ffi.callback("int32_t(void *, uint64_t, uint64_t)", report, error=1, onerror=keep)
    status = library.colibri_fetch(model, residency, callback, ffi.NULL, error)
    if raised:
        raise raised[0]
    _check(status, error)


def plan(model: ModelHandle, params: Params) -> MemoryPlan:
    ffi, library = _load()
    found, error = ffi.new("colibri_memory_plan *"), ffi.new("colibri_error *")
    _check(library.colibri_plan(model, _params(params), found, error), error)
    return MemoryPlan(**{name: getattr(found, name) for name in MemoryPlan.__slots__})


def init(model: ModelHandle, params: Params, counters: Counters | None = None) -> ContextHandle:
    ffi, library = _load()
    context, error = ffi.new("colibri_context **"), ffi.new("colibri_error *")
    _check(library.colibri_init(model, _params(params, counters), context, error), error)
    return ContextHandle(context[0])


def free(context: ContextHandle) -> None:
    _load()[1].colibri_free(context)


def last_error(context: ContextHandle) -> tuple[int, str]:
    """(status, text) of the context's last failure; status 0 if there was none."""
    error = _load()[1].colibri_last_error(context)
    return int(error.status), _text(error)


def _ids(ids: Ids) -> Any:
    """A pointer to the array's own memory; the caller keeps the array alive during the call."""
    if ids.dtype != np.int32 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise ArgumentError(f"ids: expected contiguous int32 [n], found {ids.dtype} {list(ids.shape)}")
    return _load()[0].from_buffer("int32_t[]", ids) if ids.size else _load()[0].NULL


def _floats(values: Floats, rows: int, columns: int, *, writable: bool) -> Any:
    if values.dtype != np.float32 or values.size != rows * columns or not values.flags.c_contiguous:
        raise ArgumentError(
            f"expected contiguous float32 [{rows}, {columns}], found {values.dtype} {list(values.shape)}"
        )
    return _load()[0].from_buffer("float[]", values, require_writable=writable)


def _observer(
    progress: Progress | None, routing: RoutingObserver | None, expert: ExpertObserver | None
) -> tuple[Any, list[BaseException], list[Any]]:
    """(colibri_observer *, exceptions, callbacks): an exception inside a callback cancels the evaluation and
    lands in the list, KeyboardInterrupt too. The caller keeps all three until the call is over."""
    ffi, _ = _load()
    raised: list[BaseException] = []

    def keep(_type: object, error: BaseException, _trace: object) -> None:
        raised.append(error)

    def on_progress(_user: object, done: int, total: int) -> int:
        if progress is not None:
            progress(done, total)
        return 0

    def on_routing(_user: object, found: Any) -> int:
        if routing is not None:
            routing(RoutingView(found, ffi.buffer))
        return 0

    def on_expert(_user: object, found: Any) -> int:
        if expert is not None:
            expert.see(ExpertOutputs.of(found, ffi.buffer, expert.outputs))
        return 0

    callbacks = [
        ffi.callback("int32_t(void *, uint64_t, uint64_t)", on_progress, error=1, onerror=keep)
        if progress is not None
        else ffi.NULL,
        ffi.callback("int32_t(void *, const colibri_routing *)", on_routing, error=1, onerror=keep)
        if routing is not None
        else ffi.NULL,
        ffi.NULL,
        ffi.callback("int32_t(void *, const colibri_expert *)", on_expert, error=1, onerror=keep)
        if expert is not None
        else ffi.NULL,
        ffi.NULL if expert is None else _floats(expert.outputs, *expert.outputs.shape, writable=True),
    ]
    return ffi.new("colibri_observer *", callbacks), raised, callbacks


def _observed(
    context: ContextHandle,
    progress: Progress | None,
    routing: RoutingObserver | None,
    expert: ExpertObserver | None,
    call: Callable[[Any], int],
) -> None:
    """call(observer). What an observer raises ends the evaluation and comes out of here."""
    if progress is None and routing is None and expert is None:
        _check_context(call(_load()[0].NULL), context)
        return
    observer, raised, _callbacks = _observer(progress, routing, expert)
    status = call(observer)
    if raised:
        raise raised[0]
    _check_context(status, context)


def encode(
    context: ContextHandle,
    sequence: int,
    ids: Ids,
    *,
    progress: Progress | None = None,
    routing: RoutingObserver | None = None,
    expert: ExpertObserver | None = None,
) -> None:
    """Makes ids the source of a sequence that holds no positions."""
    at, n, library = _ids(ids), len(ids), _load()[1]
    watch = (progress, routing, expert)
    _observed(context, *watch, lambda o: library.colibri_encode(context, sequence, at, n, o))


def evaluate(
    context: ContextHandle,
    inputs: Sequence[Input],
    n_vocab: int,
    *,
    progress: Progress | None = None,
    routing: RoutingObserver | None = None,
    expert: ExpertObserver | None = None,
) -> None:
    """Appends ids to sequences."""
    ffi, library = _load()
    array = ffi.new(
        "colibri_input[]", len(inputs)
    )  # points into the arrays of `inputs`, which outlive the call
    for item, (sequence, ids, logits) in zip(array, inputs, strict=True):
        item.sequence, item.n_ids, item.ids = sequence, len(ids), _ids(ids)
        if logits is not None:
            item.n_logits = logits.size // n_vocab
            item.logits = _floats(logits, item.n_logits, n_vocab, writable=True)
    n = len(inputs)
    watch = (progress, routing, expert)
    _observed(context, *watch, lambda o: library.colibri_evaluate(context, array, n, o))


def run_inference(context: ContextHandle, ids: Ids, logits: Floats) -> None:
    """Appends ids to sequence 0; logits [n_vocab] receives those of the last one."""
    status = _load()[1].colibri_run_inference(
        context, _ids(ids), len(ids), _floats(logits, 1, logits.size, writable=True)
    )
    _check_context(status, context)


def cancel(context: ContextHandle) -> None:
    """Ends the running evaluation, or the next one if none runs. From any thread."""
    _load()[1].colibri_cancel(context)


def position(context: ContextHandle, sequence: int = 0) -> int:
    return _check_context(_load()[1].colibri_position(context, sequence), context)


def rewind(context: ContextHandle, sequence: int, to: int) -> None:
    _check_context(_load()[1].colibri_rewind(context, sequence, to), context)


def fork(context: ContextHandle, source: int, target: int) -> None:
    _check_context(_load()[1].colibri_fork(context, source, target), context)


def sampler(values: Sampler) -> Any:
    """The C struct for sample(), made once for many draws."""
    return _load()[0].new(
        "colibri_sampling *",
        [
            values.temperature,
            values.top_k,
            values.top_p,
            values.min_p,
            values.repetition_penalty,
            values.seed,
        ],
    )


def sample(context: ContextHandle, logits: Floats, sampling: Any, history: Ids | None, position: int) -> int:
    """The next id from logits [n_vocab]; `sampling` comes from sampler()."""
    ffi, library = _load()
    out = ffi.new("int32_t *")
    status = library.colibri_sample(
        context,
        _floats(logits, 1, logits.size, writable=False),
        sampling,
        ffi.NULL if history is None else _ids(history),
        0 if history is None else len(history),
        position,
        out,
    )
    _check_context(status, context)
    return int(out[0])


@functools.cache
def phase_names() -> tuple[str, ...]:
    """Names of the parts of an evaluation, in the order of enum colibri_phase."""
    ffi, library = _load()
    count = int(library.COLIBRI_PHASES)
    return tuple(ffi.string(library.colibri_phase_name(phase)).decode() for phase in range(count))


def profile(phase_ns: Counts, wait_ns: Counts, expert_ns: Counts) -> Any:
    """A colibri_profile that points into the arrays [n_layers + 1, phases], the same, [n_layers, n_experts];
    it keeps them alive."""
    ffi, _ = _load()
    arrays = (phase_ns, wait_ns, expert_ns)
    if any(array.dtype != np.uint64 or not array.flags.c_contiguous for array in arrays):
        raise ArgumentError("a profile: expected contiguous uint64 arrays")
    pointers = [
        ffi.from_buffer("uint64_t[]", array, require_writable=True) if array.size else ffi.NULL
        for array in arrays
    ]
    struct = ffi.new("colibri_profile *", [len(phase_ns) - 1, expert_ns.shape[1], *pointers])
    _PROFILED[struct] = pointers
    return struct


def measure(context: ContextHandle, profile: Any | None) -> None:
    """Adds the times of later evaluations to a profile(), which must outlive that; None ends it."""
    ffi, library = _load()
    _check_context(library.colibri_measure(context, ffi.NULL if profile is None else profile), context)


@contextmanager
def recorded(context: ContextHandle, recording: Recording) -> Iterator[Callable[[], dict[str, Any]]]:
    """Later evaluations append to a recording, until the end of the `with` block. What it gives takes out
    what is there: views [n, ...], which the next evaluation writes over."""
    ffi, library = _load()
    parts = ("chunks", "rows", "choices", "visits")
    of = dict.fromkeys(("ids", "positions", "sequences"), "rows") | {"chunks": "chunks"}
    of |= dict.fromkeys(("experts", "weights", "logits"), "choices")
    of |= dict.fromkeys(("visit_ns", "visit_read"), "visits")
    struct = ffi.new("colibri_recording *", {"max_rows": recording.rows})
    kept = []
    for name, array in recording.arrays.items():
        if array.size:
            kept.append(ffi.from_buffer(array, require_writable=True))
            setattr(struct, name, ffi.cast(ffi.typeof(getattr(struct, name)), kept[-1]))

    def take() -> dict[str, Any]:
        n = {part: getattr(struct, f"n_{part}") for part in parts}
        for part in parts:
            setattr(struct, f"n_{part}", 0)
        return {name: array[: n[of[name]]] for name, array in recording.arrays.items()}

    _check_context(library.colibri_record(context, struct), context)
    try:
        yield take
    finally:
        library.colibri_record(context, ffi.NULL)


def quantize(type: int, weights: Floats, costs: Floats) -> tuple[Floats, Bytes, Bytes]:
    """Units [2, ...], steps [16, ...], quants [256, ...] of q4 (5) or q6 (6) for weights [256, ...] and what
    their squared errors cost. The other axes hold a multiple of 4 super-groups."""
    ffi, library = _load()
    n = weights.size // 256
    shape = weights.shape[1:]
    units, steps, quants = (
        np.empty((2, *shape), np.float32),
        np.empty((16, *shape), np.uint8),
        np.empty((256, *shape), np.uint8),
    )
    status = library.colibri_quantize(
        type,
        n,
        _floats(weights, 256, n, writable=False),
        _floats(costs, 256, n, writable=False),
        _floats(units, 2, n, writable=True),
        *(ffi.from_buffer("uint8_t[]", out, require_writable=True) for out in (steps, quants)),
    )
    if status < 0:
        raise from_status(status, f"quantize: {status_text(status)}")
    return units, steps, quants


def topk_select(values: Floats, k: int) -> Ids:
    """The k largest of values [n], best first, ties to the lowest index."""
    if not 0 < k <= values.size:
        raise ArgumentError(f"k: expected 1 to {values.size} (the number of values), found {k}")
    indices = np.empty(k, np.int32)
    ffi, library = _load()
    pointer = ffi.from_buffer("int32_t[]", indices, require_writable=True)
    status = library.colibri_topk_select(
        _floats(values, 1, values.size, writable=False), values.size, k, pointer
    )
    if status < 0:
        raise from_status(status, f"topk_select: {status_text(status)}")
    return indices
