"""The benchmark: turns interleaved over the thread counts, their medians, their share of the machine.

Owns: the order of turns, medians, rates and shares. Refuses: tables (cli/bench.py) and measuring itself
(turns.py, bandwidth.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from colibri import _native as native
from colibri.analysis import bandwidth, machine, turns
from colibri.analysis.cost import Cost, cost
from colibri.analysis.runs import lengths
from colibri.analysis.turns import Settings, Start, Turn
from colibri.arguments import Opening
from colibri.errors import ArgumentError
from colibri.inspection import Description, describe
from colibri.memory import available_bytes

Progress = Callable[[int, int, str], object]  # turns done, turns in all, what runs now
_DROPPED = 0.01  # most of a file that may still be cached for a start to count as cold


@dataclass(frozen=True, slots=True)
class Cell:
    """One thread count: its turns, and medians over them."""

    threads: int
    turns: tuple[Turn, ...]
    settings: Settings
    cost: Cost

    def rates(self, what: str) -> list[float]:
        """Tokens per second of "prefill" or "decode", turn after turn."""
        if what == "prefill":
            return [self.settings.n_prompt / turn.prefill_seconds for turn in self.turns]
        return [self.settings.n_decode / turn.decode_seconds for turn in self.turns]

    @property
    def bytes_per_token(self) -> float:
        """Of a token in the middle of the decoding."""
        return self.cost.decode_bytes(self.settings.n_prompt + (self.settings.n_decode + 1) / 2)

    def data(self) -> dict[str, Any]:
        """Every figure; units are in the key names, G is 1e9."""
        prefill, decode = self.rates("prefill"), self.rates("decode")
        reached = [self.bytes_per_token * rate / 1e9 for rate in decode]
        read = [(turn.before.gb_per_s + turn.after.gb_per_s) / 2 for turn in self.turns]
        probes = [probe for turn in self.turns for probe in (turn.before, turn.after)]
        peaks = [turn.peak_bytes for turn in self.turns if turn.peak_bytes is not None]
        plan = self.turns[0].plan
        flops = self.cost.prefill_flops(self.settings.n_prompt)
        return {
            "threads": self.threads,
            "isa": self.turns[0].isa,
            "residency": self.turns[0].residency,
            "turns": len(self.turns),
            **_spread("prefill_tok_per_s", prefill),
            **_spread("decode_tok_per_s", decode),
            "prompt_to_first_token_ms": median(1e3 * turn.prefill_seconds for turn in self.turns),
            "start_warm_ms": _start_data([turn.start for turn in self.turns]),
            "decode_bytes_per_token": self.bytes_per_token,
            **_spread("decode_gb_per_s", reached),
            **_spread("read_gb_per_s", read),
            "decode_share_of_read": median(a / b for a, b in zip(reached, read, strict=True)),
            "read_probe_is_memory_bound": all(probe.memory_bound for probe in probes),
            "prefill_gop_per_s": flops * median(prefill) / self.settings.n_prompt / 1e9,
            "peak_gop_per_s": median(turn.peak_gop_per_s for turn in self.turns),
            "prefill_share_of_peak": median(
                flops / turn.prefill_seconds / 1e9 / turn.peak_gop_per_s for turn in self.turns
            ),
            "peak_rss_bytes": max(peaks, default=None),
            "peak_rss_beyond_plan_bytes": max(peaks) - plan["total_bytes"] if peaks else None,
            "plan_bytes": plan,
            "streaming": self._streaming(),
            "outside_matrices_us_per_token": median(
                turn.outside_matrices_us_per_token for turn in self.turns
            ),
            "attention_us_per_token": median(turn.attention_us_per_token for turn in self.turns),
            "barrier_wait_share": median(turn.barrier_wait_share for turn in self.turns),
        }

    def _streaming(self) -> dict[str, Any] | None:
        """What streamed experts cost; None where none was streamed."""
        if self.turns[0].residency != "streamed":
            return None
        parts = {
            "prefill": [turn.prefill_traffic for turn in self.turns],
            "decode": [turn.decode_traffic for turn in self.turns],
        }
        told = {
            "expert_slots": self.turns[0].plan["expert_slots"],
            "prefetch": [one["prefetch"] for one in parts["decode"]],
        }
        return told | {
            part: {
                "hit_rate": median(one["hit_rate"] for one in of),
                "bytes_read_per_token": median(one["bytes_per_token"] for one in of),
                "wait_seconds_per_token": median(one["wait_seconds"] / one["tokens"] for one in of),
            }
            for part, of in parts.items()
        }


@dataclass(frozen=True, slots=True)
class Cold:
    """A start after the file was dropped from the page cache, or why there is none."""

    threads: int
    start: Start | None
    cached_share: float | None  # of the file, still cached when it should have been dropped; None: unknown
    reason: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole benchmark."""

    model: Description
    settings: Settings
    repeats: int
    cost: Cost
    probe_buffer_bytes: int
    cells: tuple[Cell, ...]
    cold: Cold
    machine: dict[str, Any]

    def data(self) -> dict[str, Any]:
        """One JSON object; units are in the key names."""
        cold = self.cold
        return {
            "version": native.version(),
            "machine": self.machine,
            "model": {
                "path": str(self.model.path),
                "name": self.model.source.get("name"),
                "file_bytes": self.model.bytes,
                "bytes_by_type": self.model.types,
                "parameters": self.model.parameters,
                "active_parameters": self.model.active_parameters,
            },
            "prompt_tokens": self.settings.n_prompt,
            "decode_tokens": self.settings.n_decode,
            "repeats": self.repeats,
            "options": dict(self.settings.options),
            "token_cost": asdict(self.cost),
            "read_probe": {"method": bandwidth.NAME, "buffer_bytes": self.probe_buffer_bytes},
            "cells": [cell.data() for cell in self.cells],
            "start_cold": {
                "threads": cold.threads,
                "start_ms": None if cold.start is None else _start_data([cold.start]),
                "file_cached_share": cold.cached_share,
                "not_measured_because": cold.reason,
            },
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a benchmark, checked when it is made: before a model is written, converted or read.
    n_prompt and n_decode: None is 512 and 64, or less where the model has fewer positions. threads: different
    counts; None is what the engine would choose. options: keywords of load() that say where weights are, and
    pin; a single thread is never pinned."""

    n_prompt: int | None = None
    n_decode: int | None = None
    threads: Sequence[int] | None = None
    repeat: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ArgumentError(f"repeat: expected at least 1, found {self.repeat}")
        counts = self.threads
        if counts is not None and (
            not counts or len(set(counts)) != len(counts) or any(not 1 <= n <= 256 for n in counts)
        ):
            raise ArgumentError(f"threads: expected different integers from 1 to 256, found {list(counts)}")
        Opening(threads=max(counts) if counts else None, **self.options)
        self.lengths(1 << 30)

    def lengths(self, limit: int) -> tuple[int, int]:
        """Tokens of prompt and decoding for a model of so many positions."""
        return lengths(limit, self.n_prompt, self.n_decode, default_prompt=512, default_decode=64)


def bench(path: Path, plan: Plan, progress: Progress | None = None) -> Report:
    """Measures a `.colibri` file. Each turn is a process of its own, with a warm-up that does not count;
    repeat after repeat, every thread count takes its turn. Read bandwidth is probed before and after each
    decoding. A file that is replaced meanwhile is refused."""
    identity = turns.identity(path)
    description, price = describe(path), cost(path, plan.options.get("kv_type", "f32"))
    n_prompt, n_decode = plan.lengths(description.config["context_length"])
    threads = plan.threads or [_default_threads(path)]
    peak_type = max(description.types, key=description.types.__getitem__)
    settings = Settings(path, n_prompt, n_decode, plan.options, peak_type, identity)
    before = machine.describe()
    total, done = plan.repeat * len(threads) + 1, 0
    found: dict[int, list[Turn]] = {n: [] for n in threads}
    probe = bandwidth.Probe()
    _read_once(path)
    for repeat in range(plan.repeat):
        for n in threads:
            if progress is not None:
                progress(done, total, f"threads {n}, turn {repeat + 1} of {plan.repeat}")
            found[n].append(turns.take(settings, n, probe, seed=repeat))
            done += 1
    if progress is not None:
        progress(done, total, "cold start")
    cells = tuple(Cell(n, tuple(of), settings, price) for n, of in found.items())
    cold = _cold_start(settings, max(threads))
    return Report(description, settings, plan.repeat, price, probe.bytes, cells, cold, before)


def _cold_start(settings: Settings, threads: int) -> Cold:
    try:
        share = turns.drop(settings.model)
    except OSError as error:
        return Cold(threads, None, None, f"the file could not be dropped: {error.strerror or error}")
    if share is None:
        return Cold(threads, None, None, "this system does not tell whether the file was dropped")
    if share > _DROPPED:
        return Cold(threads, None, share, f"{share:.0%} of the file stayed in the page cache")
    return Cold(threads, turns.start_only(settings, threads, seed=0), share, None)


def _default_threads(path: Path) -> int:
    model = native.open_model(path)
    try:
        return native.default_params(model).threads
    finally:
        native.close_model(model)


def _read_once(path: Path) -> None:
    """Into the page cache, so that the first turn is as warm as the others; not where it would not stay."""
    available = available_bytes()
    if available is not None and path.stat().st_size > available:
        return
    with path.open("rb", buffering=0) as file:
        block = bytearray(4 << 20)
        while file.readinto(block):
            pass


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _start_data(starts: list[Start]) -> dict[str, float]:
    """Medians, in milliseconds."""
    return {
        "process_to_first_token": median(1e3 * start.whole for start in starts),
        "open": median(1e3 * start.open for start in starts),
        "open_to_first_token": median(1e3 * start.open_to_first_token for start in starts),
    }
