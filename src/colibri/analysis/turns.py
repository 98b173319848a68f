"""Turns: one measurement of one thread count in a fresh process, with memory probes around its decoding.

Owns: talking to worker.py, dropping a file from the page cache, and checking that it was dropped.
Refuses: medians and tables.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.analysis.bandwidth import Probe, Reading
from colibri.errors import ColibriError

_PAGE = 4096
_SAMPLES = 512  # pages looked at to see how much of a file is cached
_DROPS = 5  # a page that another processor has just used is skipped: the system is asked again
_PAUSE = 0.2  # seconds before a turn: what ran before has gone to sleep then


@dataclass(frozen=True, slots=True)
class Settings:
    """What every turn of a benchmark has in common."""

    model: Path
    n_prompt: int
    n_decode: int
    residency: str = "mapped"
    pin: bool = False
    peak_type: str = "q8"  # weight type whose kernels' peak prefill is compared with


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
            raise ColibriError(f"the measuring process ended with status {status}; its words are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ColibriError(answer["error"])
        return answer


@contextmanager
def _worker(settings: Settings, threads: int, seed: int) -> Iterator[_Worker]:
    wanted = {
        "model": str(settings.model),
        "threads": threads,
        "prompt": settings.n_prompt,
        "decode": settings.n_decode,
        "residency": settings.residency,
        "pin": settings.pin,
        "peak_type": settings.peak_type,
        "seed": seed,
    }
    command = [sys.executable, "-m", "colibri.analysis.worker", json.dumps(wanted)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Worker(process)
        process.communicate()
    finally:
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
        share = _cached_share(file.fileno(), os.fstat(file.fileno()).st_size)
        for _ in range(_DROPS):
            if not share or not hasattr(os, "posix_fadvise"):
                break
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = _cached_share(file.fileno(), os.fstat(file.fileno()).st_size)
            time.sleep(_PAUSE if share else 0)
        return share


def _cached_share(file: int, size: int) -> float | None:
    """Of pages spread over the file: a read that may not wait succeeds only if its page is cached."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    pages = range(0, max(1, size // _PAGE), max(1, size // _PAGE // _SAMPLES))
    cached = 0
    buffer = bytearray(1)
    for page in pages:
        try:
            cached += os.preadv(file, [buffer], page * _PAGE, os.RWF_NOWAIT) == 1
        except OSError as error:
            if error.errno == errno.EAGAIN:
                continue
            return None  # this file system cannot tell
    return cached / len(pages)
