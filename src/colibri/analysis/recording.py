"""Records what a model's routers decide for texts: texts to a trace.

Owns: which texts, how long ones are cut, what of a model a trace tells.
Refuses: the file (trace_writer.py), options and bars (cli/trace.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from colibri import _native as native
from colibri.analysis.trace import Header
from colibri.analysis.trace_writer import TraceWriter
from colibri.engine import Model
from colibri.errors import ArgumentError, ModelIOError, UnsupportedError
from colibri.format import read_container
from colibri.layout import PAGE, aligned
from colibri.sampling import Options


class Text(NamedTuple):
    """A text to trace."""

    text: str
    label: str | None = None  # what it is about: a domain
    where: str = "the text"  # for errors


class Recorded(NamedTuple):
    """What came into a trace."""

    sequences: int
    tokens: int


def record(
    model: Model,
    texts: Sequence[Text],
    path: str | os.PathLike[str],
    *,
    generate: int = 0,
    logits: bool = False,
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[Options],
) -> Recorded:
    """Traces texts, and of each `generate` tokens that the model writes after it (options: those of
    colibri.Sampling). A text longer than the context is cut into sequences. With an encoder, texts are
    sources. progress: texts done, of all."""
    if not texts:
        raise ArgumentError("texts: expected at least one, found none")
    if not 0 <= generate < model.context:
        raise ArgumentError(
            f"generate: expected 0 to {model.context - 1} (the context of {model.context} without one), "
            f"found {generate}"
        )
    labels = tuple(dict.fromkeys(text.label for text in texts if text.label is not None))
    header, expert_bytes = describe_model(model, labels, logits)
    n = 0
    with TraceWriter(path, header, expert_bytes) as writer, recorded(model, logits) as take:
        for done, text in enumerate(texts):
            for ids in _pieces(model, text, generate):
                _evaluate(model, ids, generate, options)
                writer.add_sequence(take(), label=text.label, n_prompt=len(ids))
                n += 1
            if progress is not None:
                progress(done + 1, len(texts))
    return Recorded(n, writer.n_rows)


def _evaluate(
    model: Model,
    ids: npt.NDArray[np.int32],
    generate: int,
    options: Options,
) -> None:
    model._sequences.forget()  # a beginning in common is evaluated, and traced, for each text
    source = ids if model.config["n_encoder_layers"] else None
    if generate:
        for _ in model.stream(ids, **(options | {"max_tokens": generate})):
            pass
        return
    begin = ids if source is None else np.array(model.start_ids(), np.int32)
    model._sequences.evaluate_alone([begin], [source], [None], None)


@contextmanager
def recorded(model: Model, logits: bool = False) -> Iterator[Callable[[], Mapping[str, npt.NDArray[Any]]]]:
    """Records all evaluations of a model while the `with` block lasts. What it gives takes out what has been
    recorded since: the arrays of docs/TRACE.md by name, which the next evaluation writes over. There is room
    for a source and a whole context between two calls."""
    counts, used = model.config["n_experts"], model.config["n_experts_used"]
    layers = sum(count > 0 for count in counts)
    arrays = native.Recording(2 * model.context, layers, used, max(counts), logits=logits)
    sequences = model._sequences
    with sequences.lock:
        if sequences.recorded:
            raise ArgumentError("the model is being recorded already: end the other one first")
        sequences.recorded = True
    try:
        with native.recorded(sequences.context, arrays) as take:
            yield take
    finally:
        sequences.recorded = False


def _pieces(model: Model, text: Text, generate: int) -> Iterator[npt.NDArray[np.int32]]:
    """The ids of a text, in sequences that leave room for what is written after them."""
    try:
        ids = model.prompt_ids(text.text)
    except ArgumentError as error:
        raise ArgumentError(f"{text.where}: {error}") from error
    if model.config["n_encoder_layers"]:
        if len(ids) > model.context:
            raise ArgumentError(
                f"{text.where}: a source of {len(ids)} tokens, the context holds {model.context}; a source "
                "is read whole: give shorter texts or a larger context"
            )
        yield ids
        return
    tokenizer = model.tokenizer
    begin = ids[:1] if tokenizer.add_bos else ids[:0]
    room = model.context - generate - len(begin)
    if room < 1:
        raise ArgumentError(
            f"generate: {generate} tokens leave no room for a text in {model.context} positions"
        )
    for at in range(len(begin), len(ids), room):
        yield np.concatenate([begin, ids[at : at + room]])
    if len(ids) == len(begin):
        yield ids


def describe_model(
    model: Model, labels: tuple[str, ...], logits: bool
) -> tuple[Header, npt.NDArray[np.int64]]:
    """The header of a model's traces, and the bytes of its experts' records [n_layers, n_experts], whole
    pages as a read takes them."""
    config = model.config
    counts: list[int] = config["n_experts"]
    if not any(counts):
        raise UnsupportedError(f"{model.path} has no routed experts, so there is nothing to trace")
    container = read_container(model.path)
    expert_bytes = np.zeros((config["n_layers"], max(counts)), np.int64)
    for entry in container.entries:
        if entry.kind == "expert":
            _, layer, _, expert = entry.name.split(".")
            expert_bytes[int(layer), int(expert)] = aligned(entry.bytes, PAGE)
    end = min(entry.offset for entry in container.entries)
    told = {"name": model.path.name, "sha256": head_hash(model.path, end), "bytes": container.bytes}
    header = Header(
        told,
        config["n_layers"],
        config["n_encoder_layers"],
        tuple(counts),
        config["n_experts_used"],
        labels,
        logits,
        visits=True,
    )
    return header, expert_bytes


def head_hash(path: Path, end: int) -> str:
    """Of everything before the first tensor: config and directory, with the checksums of all data."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(end)).hexdigest()
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error


def texts_of_lines(path: Path, lines: Iterable[bytes], field: str, label: str) -> Iterator[Text]:
    """JSON Lines: of each object the text in `field`, and its label if it has one."""
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{where}: expected a JSON object, found {line[:40]!r} ({error})") from error
        if not isinstance(found, dict) or not isinstance(found.get(field), str):
            names = ", ".join(map(repr, found)) if isinstance(found, dict) else "no object"
            raise ArgumentError(
                f"{where}: expected an object with a text named {field!r}, found {names}; --field names "
                "another"
            )
        about = found.get(label)
        yield Text(found[field], None if about is None else str(about), where)
