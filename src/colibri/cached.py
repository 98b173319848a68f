"""The conversions that are kept: where, which there are, how much they may take.

Owns: $COLIBRI_CACHE (else ~/.cache/colibri), $COLIBRI_CACHE_LIMIT, and what goes first before it would be
passed: what has not been used for longest. Refuses: files larger than the limit, touching anything but
.colibri files of that directory. What a conversion is called is for cache.py to say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from colibri.errors import ArgumentError, ModelIOError
from colibri.memory import bytes_of
from colibri.paths import listed

DEFAULT_LIMIT = 100 << 30


@dataclass(frozen=True, slots=True)
class Kept:
    path: Path
    bytes: int
    used: datetime  # made or opened for the last time, local time


def cache_directory() -> Path:
    """$COLIBRI_CACHE, or ~/.cache/colibri."""
    chosen = os.environ.get("COLIBRI_CACHE")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "colibri"
    except RuntimeError as error:
        raise ModelIOError(f"There is no home directory for the cache: {error} Set COLIBRI_CACHE.") from error


def cache_limit() -> int:
    """Bytes that the kept files may take: $COLIBRI_CACHE_LIMIT, such as 20GiB, or 100 GiB."""
    text = os.environ.get("COLIBRI_CACHE_LIMIT")
    return bytes_of("COLIBRI_CACHE_LIMIT", text) if text else DEFAULT_LIMIT


def kept_models() -> list[Kept]:
    """All of them, the one that was used last first."""
    found = []
    directory = cache_directory()
    for path in (directory / name for name in listed(directory) if name.endswith(".colibri")):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            status = path.stat()
            used = datetime.fromtimestamp(max(status.st_atime, status.st_mtime))
            found.append(Kept(path, status.st_size, used))
    return sorted(found, key=lambda one: (one.used, one.path), reverse=True)


def mark_used(path: Path) -> None:
    """Access times of a file system may be off, or a day late."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def make_room(size: int) -> list[Kept]:
    """Removes what was unused for longest until a file of `size` bytes may be added under the limit. What was
    removed. A program that has such a file open keeps it until it ends."""
    kept, limit = kept_models(), cache_limit()
    if size > limit:
        raise ArgumentError(
            f"COLIBRI_CACHE_LIMIT: the cache may take {limit:,} bytes, and the file alone that would be kept "
            f"takes {size:,}; raise the limit, or make a file of your own with colibri convert"
        )
    excess = size + sum(one.bytes for one in kept) - limit
    removed = []
    while excess > 0 and kept:
        removed.append(kept.pop())
        excess -= removed[-1].bytes
    return remove(removed)


@contextlib.contextmanager
def alone(directory: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """One at a time adds files, in all processes: what is under way counts for the limit before it is there.
    `waiting` is called if another one does. The lock ends with its process; a file system may have none."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(lock)


def remove(models: Iterable[Kept]) -> list[Kept]:
    """What was there and is gone now."""
    removed = []
    for one in models:
        try:
            one.path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelIOError(f"Cannot remove {one.path}: {error.strerror or error}.") from error
        removed.append(one)
    return removed
