"""How fast a file is read past the page cache, as streamed experts are read: so many threads, each with one
piece under way, pieces in an order that no read-ahead can guess.

Owns: the probe. It reads with O_DIRECT into page-aligned memory; where the file system refuses that, through
the page cache, which is asked to forget each piece beforehand: what it says then is an upper bound.
Refuses: writing, and files of less than a page.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from colibri.errors import ModelIOError

PIECE_BYTES = 1 << 20  # that the engine reads at a time, at most
_SECONDS, _MOST_BYTES = 1.0, 1 << 30


@dataclass(frozen=True, slots=True)
class Disk:
    """One probe."""

    gb_per_s: float  # 1e9 bytes, all lanes together
    lanes: int
    piece_bytes: int
    bytes: int  # that were read
    direct: bool  # past the page cache

    @property
    def method(self) -> str:
        """In words."""
        way = "O_DIRECT" if self.direct else "through the page cache, which may hold some of it"
        return f"pieces of {self.piece_bytes} bytes, {self.lanes} at a time, {way}"


def measure(path: Path, lanes: int, piece_bytes: int = PIECE_BYTES) -> Disk:
    """Reads pieces from all over the file for a second, or 1 GiB. A short file is read again and again."""
    try:
        size = path.stat().st_size
        piece = min(max(1, piece_bytes // mmap.PAGESIZE), size // mmap.PAGESIZE) * mmap.PAGESIZE
        if piece == 0:
            raise ModelIOError(f"{path}: expected a file of at least {mmap.PAGESIZE} bytes, found {size}.")
        offsets = list(range(0, size - piece + 1, piece))
        # Other places each time: those of the last probe may lie in a cache of the disk.
        random.shuffle(offsets)
        direct = _reads_direct(path)
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            done, seconds = _read(file, offsets, piece, lanes, direct)
        finally:
            os.close(file)
    except OSError as error:
        if isinstance(error, ModelIOError):
            raise
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
    return Disk(done / seconds / 1e9, lanes, piece, done, direct)


def _reads_direct(path: Path) -> bool:
    """Whether the file system takes O_DIRECT, told by one page."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            return os.preadv(file, [page], 0) == mmap.PAGESIZE
    except OSError:
        return False
    finally:
        os.close(file)


def _read(file: int, offsets: list[int], piece: int, lanes: int, direct: bool) -> tuple[int, float]:
    """Bytes and seconds."""
    lock, taken, started = threading.Lock(), 0, time.perf_counter()

    def lane(_number: int) -> int:
        nonlocal taken
        done = 0
        with mmap.mmap(-1, piece) as memory:
            while True:
                with lock:
                    at, taken = taken, taken + 1
                if at * piece >= _MOST_BYTES or time.perf_counter() - started > _SECONDS:
                    return done
                offset = offsets[at % len(offsets)]
                if not direct and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, offset, piece, os.POSIX_FADV_DONTNEED)
                done += os.preadv(file, [memory], offset)

    with ThreadPoolExecutor(lanes) as pool:
        done = sum(pool.map(lane, range(lanes)))
    return done, time.perf_counter() - started
