"""Weight types expert by expert, under a budget of bytes (docs/PRUNING.md): which, and the file.

Owns: the proposal, and requantising a `.colibri` file. Refuses: more bits than a source has; conversion of
checkpoints (convert/)."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.analysis.rewriting import Progress, check_output, model_hash, rewrite
from colibri.entries import Entry
from colibri.errors import ArgumentError, ConversionError, UnsupportedError
from colibri.expert_bits import FORMAT, VERSION, types_by_entry
from colibri.format import Container, read_container, read_entry
from colibri.layout import PAGE, aligned, lay_out
from colibri.quantize import Floats, matrix_bytes, pack, unpack

ORDER = ("q4", "q6", "q8", "bf16", "f32")  # from few bits to many
CANDIDATES = ("q4", "q6", "q8")
_RECORD = 512  # bytes that source.json may take more, for what it says of the change


@dataclass(frozen=True, slots=True)
class Proposal:
    """What propose() found."""

    types: dict[str, list[str]]  # by layer
    bytes: int  # of the file
    bytes_before: int
    average: float  # bits of an expert's weight
    error: float  # sum over experts of mass times relative squared error of the weights

    def as_json(self, container: Container) -> dict[str, Any]:
        """plan.json"""
        model = {"name": container.path.name, "sha256": model_hash(container)}
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "bytes": self.bytes,
            "experts": self.types,
        }


def propose(
    container: Container,
    mass: npt.NDArray[np.float64],
    *,
    budget: int | None = None,
    average: float | None = None,
    progress: Progress | None = None,
) -> Proposal:
    """Types for every expert so that the sum of mass times weight error is small.

    mass [n_layers, n_experts]: of router weights, as Uses.masses. budget: most bytes of the file, or average:
    most bits of an expert's weight. All begin with the fewest bits; the step up that saves most error a byte
    comes next, as long as it fits: the greedy solution of a knapsack with one choice for each expert."""
    if (budget is None) == (average is None):
        raise ArgumentError("budget: give either it or average")
    experts = [entry for entry in container.entries if entry.kind == "expert"]
    if not experts:
        raise UnsupportedError(f"{container.path} has no routed experts")
    options = {}
    for done, entry in enumerate(experts, 1):
        own = _options(container, entry)  # in a file a record takes whole pages
        options[entry.name] = own if budget is None else [(t, aligned(n, PAGE), e) for t, n, e in own]
        if progress is not None:
            progress(done, len(experts), entry.name)
    weights = sum(rows * cols for entry in experts for rows, cols, _ in entry.matrices)
    now = dict.fromkeys(options, 0)

    def mass_of(name: str) -> float:
        _, layer, _, expert = name.split(".")
        return float(mass[int(layer), int(expert)])

    def total() -> int:
        return sum(options[name][at][1] for name, at in now.items())

    if budget is not None:
        least = {name: options[name][0][0] for name in now}
        room = budget - _RECORD - _file_bytes(container, least) + total()
    else:
        assert average is not None
        room = int(average * weights / 8)
    if room < total():
        need = _RECORD + _file_bytes(container, {name: options[name][0][0] for name in now})
        fewest = sum(_raw_bytes(one, options[one.name][0][0]) for one in experts)
        told = f"budget: {budget:,} bytes" if budget is not None else f"average: {average} bits"
        raise ArgumentError(
            f"{told} is too little: with the fewest bits the file has {need:,} bytes, experts "
            f"{8 * fewest / weights:.3g} bits a weight"
        )
    used = total()

    def best_step(name: str) -> tuple[float, str, int, int] | None:
        """(-error saved a byte, name, option, bytes) of the best step up that fits."""
        here, found = options[name][now[name]], []
        for at in range(now[name] + 1, len(options[name])):
            more, saved = options[name][at][1] - here[1], here[2] - options[name][at][2]
            if more <= room - used and mass_of(name) * saved > 0:
                found.append((-mass_of(name) * saved / max(more, 1), name, at, more))
        return min(found, default=None)

    steps = [step for step in map(best_step, now) if step is not None]
    heapq.heapify(steps)
    while steps:
        _, name, at, more = heapq.heappop(steps)
        if more <= room - used:
            now[name], used = at, used + more
        step = best_step(name)  # the next one, or a smaller one where this one did not fit
        if step is not None:
            heapq.heappush(steps, step)
    types: dict[str, list[str]] = {}
    for entry in experts:
        types.setdefault(entry.name.split(".")[1], []).append(options[entry.name][now[entry.name]][0])
    chosen = {name: options[name][at][0] for name, at in now.items()}
    return Proposal(
        types,
        _file_bytes(container, chosen),
        container.bytes,
        8 * sum(_raw_bytes(entry, chosen[entry.name]) for entry in experts) / weights,
        sum(mass_of(name) * options[name][at][2] for name, at in now.items()),
    )


def requantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    plan: Mapping[str, list[str]],
    progress: Progress | None = None,
) -> int:
    """Writes a file whose experts have the types of a plan; the others' bytes are copied. Returns its bytes.
    An expert can only lose bits: more than it has would be a larger file that says the same."""
    container = read_container(model)
    check_output(container.path, Path(out))
    entries = {entry.name: entry for entry in container.entries}
    planned = types_by_entry(plan, container.config)
    for name, types in planned.items():
        for old in filter(None, entries[name].types):
            if old not in ORDER or ORDER.index(types[0]) > ORDER.index(old):
                raise ConversionError(
                    f"{name} is {old} in {container.path.name}: expected a plan with "
                    f"{'no other type' if old not in ORDER else 'as few bits or fewer'}, found {types[0]}; "
                    "convert the checkpoint with it instead"
                )

    def change(new: Entry, old: Entry) -> bytes | memoryview | None:
        return None if new.types == old.types else b"".join(_repacked(container, old, planned[old.name][0]))

    return rewrite(
        container,
        Path(out),
        container.config,
        entries.__getitem__,
        change,
        lambda name: planned.get(name) or entries[name].types,
        {"expert_bits": dict(Counter(type for types in plan.values() for type in types))},
        progress,
    )


def _options(container: Container, entry: Entry) -> list[tuple[str, int, float]]:
    """(type, bytes, relative squared error of the weights), from few bytes to many, each better than the one
    before."""
    own = {type for type in entry.types if type}
    if len(own) > 1 or not own <= set(ORDER):
        raise UnsupportedError(
            f"{entry.name} of {container.path.name} is {'/'.join(sorted(own))}: expected one of "
            f"{', '.join(ORDER)}; convert the checkpoint to one of them first"
        )
    (source,) = own
    whole = list(expert_matrices(container, entry))
    size = sum(float(np.vdot(one, one)) for one in whole) or 1.0
    found = []
    for type in CANDIDATES:
        if ORDER.index(type) > ORDER.index(source):
            break
        error = 0.0
        for one in whole if type != source else ():
            gap = unpack(pack(one, type), len(one), one.shape[1], type) - one
            error += float(np.vdot(gap, gap))
        found.append((type, _raw_bytes(entry, type), error / size))
    return found


def _raw_bytes(entry: Entry, type: str) -> int:
    """Of an expert's record in that type, without padding."""
    return sum(matrix_bytes(rows, cols, type) for rows, cols, _ in entry.matrices)


def expert_matrices(container: Container, entry: Entry) -> Iterator[Floats]:
    """Gate (if there is one), up and down of an expert."""
    data, at = memoryview(read_entry(container, entry)), 0
    for rows, cols, type in entry.matrices:
        size = matrix_bytes(rows, cols, type)
        yield unpack(data[at : at + size], rows, cols, type)
        at += size


def _repacked(container: Container, entry: Entry, type: str) -> Iterator[memoryview]:
    for number, values in enumerate(expert_matrices(container, entry)):
        yield pack(values, type, name=f"{entry.name}[{number}]")


def _file_bytes(container: Container, types: Mapping[str, str]) -> int:
    """Of the whole file, with those types of experts."""
    entries = {entry.name: entry for entry in container.entries}
    blobs = {entry.name: bytes(entry.bytes) for entry in container.entries if entry.kind == "blob"}

    def of(name: str) -> tuple[str, ...]:
        return (types[name],) * 3 if name in types else entries[name].types

    return lay_out(container.config, of, blobs).bytes
