"""The conversions that are kept: where, which there are, how much they may take.

Owns: $COLIBRI_CACHE (else ~/.cache/colibri), $COLIBRI_CACHE_LIMIT, and what goes first when it is passed:
what has not been used for longest. Refuses: touching anything but .colibri files of that directory. What a
conversion is called is for cache.py to say.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from colibri.errors import ModelIOError
from colibri.memory import bytes_of

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
    with contextlib.suppress(FileNotFoundError):
        for path in cache_directory().glob("*.colibri"):
            with contextlib.suppress(FileNotFoundError):  # another process removes it
                status = path.stat()
                used = datetime.fromtimestamp(max(status.st_atime, status.st_mtime))
                found.append(Kept(path, status.st_size, used))
    return sorted(found, key=lambda one: (one.used, one.path), reverse=True)


def mark_used(path: Path) -> None:
    """Access times of a file system may be off, or a day late."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def make_room(new: Path) -> list[Kept]:
    """Removes what was unused for longest until the limit holds again; `new` stays whatever its size. What
    was removed. A program that has such a file open keeps it until it ends."""
    kept = [one for one in kept_models() if one.path != new]
    excess = new.stat().st_size + sum(one.bytes for one in kept) - cache_limit()
    removed = []
    while excess > 0 and kept:
        removed.append(kept.pop())
        excess -= removed[-1].bytes
    return remove(removed)


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
