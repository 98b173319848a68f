"""Turns: one measurement of one thread count in a fresh process, with memory probes around its decoding.

Owns: talking to worker.py, dropping a file from the page cache, and checking that it was dropped.
Refuses: medians and tables.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri import errors
from colibri.analysis.bandwidth import Probe, Reading
from colibri.errors import ColibriError, ModelFileError, ModelIOError

_DROPS = 5  # a page that another processor has just used is skipped: the system is asked again
_GOODBYE = 5  # seconds for a process that is told to end
_PAUSE = 0.2  # seconds before a turn: what ran before has gone to sleep then


@dataclass(frozen=True, slots=True)
class Settings:
    """What every turn of a benchmark has in common."""

    model: Path
    n_prompt: int
    n_decode: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of load(); a single thread is never pinned
    peak_type: str = "q8"  # weight type whose kernels' peak prefill is compared with
    identity: tuple[int, ...] = ()  # identity() of the file when the benchmark began; (): not compared


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of a fresh process until its first token for a short prompt."""

    whole: float  # from the start of the process: interpreter, imports, open, prompt
    open: float  # of these, load()
    open_to_first_token: float  # load(), the prompt and the choice


@dataclass(frozen=True, slots=True)
class Turn:
    """All figures of one process."""

    threads: int
    isa: str
    residency: str
    start: Start
    prefill_seconds: float  # until the first id after the prompt is chosen
    decode_seconds: float
    before: Reading  # memory bandwidth just before decoding
    after: Reading
    plan: dict[str, int]  # bytes by category
    peak_bytes: int | None  # most that was resident
    peak_gop_per_s: float  # of the matrix kernels in cache
    outside_matrices_us_per_token: float
    attention_us_per_token: float
    barrier_wait_share: float
    prefill_traffic: dict[str, Any]  # totals of residency.Traffic, while it was measured
    decode_traffic: dict[str, Any]


class _Worker:
    """A running worker.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why it ended is in its last answer, or on stderr
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            reason = "its words are above"
            if status == -signal.SIGKILL:
                reason = "the system killed it, as it does when memory runs out"
            raise ColibriError(f"the measuring process ended with status {status}: {reason}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["kind"], ColibriError)(answer["error"])
        return answer


def identity(path: Path) -> tuple[int, ...]:
    """Changes when the file is replaced or written: device, inode, size, time."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_same(settings: Settings) -> None:
    if settings.identity and identity(settings.model) != settings.identity:
        raise ModelFileError(
            f"{settings.model} was replaced or changed during the measurement, so that figures would be "
            "those of two models. Measure again when it stays as it is."
        )


@contextmanager
def _worker(settings: Settings, threads: int, seed: int) -> Iterator[_Worker]:
    _check_same(settings)
    wanted = {
        "model": str(settings.model),
        "threads": threads,
        "prompt": settings.n_prompt,
        "decode": settings.n_decode,
        "options": {name: value for name, value in settings.options.items() if name != "pin" or threads > 1},
        "peak_type": settings.peak_type,
        "seed": seed,
    }
    # -P: the current directory is the user's, no place to import from.
    command = [sys.executable, "-P", "-m", "colibri.analysis.worker", json.dumps(wanted)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Worker(process)
        process.communicate()
        _check_same(settings)
    finally:
        process.terminate()  # it removes its temporary files; only one that does not listen is killed
        try:
            process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _began(answer: dict[str, Any], started: float) -> Start:
    imported, loaded, first = (answer[f"{name}_at"] for name in ("imported", "loaded", "first_token"))
    return Start(first - started, loaded - imported, first - imported)


def take(settings: Settings, threads: int, probe: Probe, seed: int) -> Turn:
    """One turn. The file is in the page cache from the turns before, or from reading it once."""
    time.sleep(_PAUSE)
    started = time.time()
    with _worker(settings, threads, seed) as worker:
        first = worker.hear()
        start = _began(first, started)
        prefill = worker.ask("prefill")
        before = probe.read(threads)
        decode = worker.ask("decode")
        after = probe.read(threads)
        phases = worker.ask("phases")
        peak = worker.ask("peak")
    memory = decode["memory"]
    return Turn(
        threads,
        first["isa"],
        first["residency"],
        start,
        prefill["seconds"],
        decode["seconds"],
        before,
        after,
        first["plan"],
        None if memory is None else memory["peak"],
        peak["gop_per_s"],
        phases["outside_matrices_us_per_token"],
        phases["attention_us_per_token"],
        phases["barrier_wait_share"],
        prefill["traffic"],
        decode["traffic"],
    )


def start_only(settings: Settings, threads: int, seed: int) -> Start:
    """A process that ends after its first token."""
    time.sleep(_PAUSE)
    started = time.time()
    with _worker(settings, threads, seed) as worker:
        return _began(worker.hear(), started)


def drop(path: Path) -> float | None:
    """Asks the system to forget the file's cached pages; the share of them that is still there, or None if it
    does not tell. Pages that any process has mapped stay."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that wait to be written would stay
        share = cached_share(file.fileno())
        for _ in range(_DROPS):
            if not share or not hasattr(os, "posix_fadvise"):
                break
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached_share(file.fileno())
            time.sleep(_PAUSE if share else 0)
        return share


def cached_share(file: int) -> float | None:
    """Of all pages of an open file, by mincore(2), which touches none of them: reading a page to see whether
    it is there makes the system read those behind it. None: not told, as for a file of another user."""
    status = os.fstat(file)
    if not status.st_size or not (
        status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{file}", os.W_OK)
    ):
        return None
    try:
        ask = ctypes.CDLL(None, use_errno=True).mincore
    except AttributeError:
        return None
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        failed = ask(address, size, ctypes.c_void_p(pages.ctypes.data))
        del view  # the mapping ends only without it
    return None if failed else float((pages & 1).mean())
