"""Writes and reads the `.colibri` container (docs/FORMAT.md): header, directory, tensors, blobs.

Owns: checksums, and that a target file is either whole or untouched.
Refuses: sizes that contradict the config (entries.py says which tensors there must be), anything outside the
file. Where things lie is layout.py's, weight layouts are quantize.py's; what a config field means is the
engine's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from colibri.config import CONFIG_AT, Config, decode_config
from colibri.entries import KINDS, Entry, Types, expected_entries, iter_tensors
from colibri.errors import ConversionError, ModelFileError, ModelIOError, UnsupportedError
from colibri.layout import (
    ALIGNMENT,
    CRC_AT,
    ENTRY,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    PAGE,
    aligned,
    head_bytes,
    lay_out,
)
from colibri.quantize import TYPE_NAMES

__all__ = [
    "Container",
    "Entry",
    "Writer",
    "damaged_entries",
    "expected_entries",
    "is_container",
    "read_blobs",
    "read_container",
    "read_entry",
    "read_json_blob",
]

Progress = Callable[[int, int, str], object]  # (done bytes, total bytes, name)

_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Container:
    """What the head of a file says, checked: data bytes are not read yet."""

    path: Path
    bytes: int
    config: Config
    entries: tuple[Entry, ...]


class Writer:
    """Writes one file, entry after entry, under a temporary name beside the target; leaving the `with`
    block without an error completes it and renames it. After an error, Ctrl-C included, nothing is left and
    an older target is untouched. Only a killed process can leave a `.colibri-*.part` file, which the next
    Writer in that directory removes: it is known by its lock, which ended with the process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        types: Types,
        blobs: Mapping[str, bytes] | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._blobs = dict(blobs or {})
        self._layout = lay_out(config, types, self._blobs)
        self.config, self.bytes = self._layout.config, self._layout.bytes
        self.entries = list(self._layout.entries)
        self.tensors = self._layout.entries[: self._layout.n_tensors]
        self._next = 0
        self._part: Path | None = None
        self._piece = bytearray()  # what has not been given to the system yet

    def __enter__(self) -> Writer:
        parent = self.path.parent
        try:
            _remove_abandoned(parent)
            free = shutil.disk_usage(parent).free
            if free < self.bytes:
                raise ModelIOError(
                    f"{self.path} needs {self.bytes:,} bytes, but only {free:,} are free there. Choose "
                    "another disk."
                )
            while self._part is None or not self._part.exists():  # removed between its making and its lock?
                part = parent / f".colibri-{secrets.token_hex(8)}.part"
                self._file = part.open("xb", buffering=0)
                self._part = part
                _lock(self._file.fileno(), fcntl.LOCK_EX)
            self._write(b"", self._layout.data)
        except OSError as error:
            self._abandon()
            raise _io_error("write", self.path, error) from error
        except BaseException:
            self._abandon()
            raise
        return self

    def write(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """The data of the next entry; names must come in the order of `tensors`."""
        entry = self.entries[self._next]
        if name != entry.name:
            raise ConversionError(
                f"Entries are written in canonical order: expected {entry.name}, got {name}."
            )
        done, crc = 0, 0
        try:
            self._write(b"", entry.offset)
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                done += len(view)
                if done > entry.bytes:
                    break
                crc = zlib.crc32(view, crc)
                self._write(view)
        except OSError as error:
            if isinstance(error, ModelIOError):
                raise
            raise _io_error("write", self.path, error) from error
        if done != entry.bytes:
            raise ConversionError(
                f"Entry {name}: {entry.bytes} bytes were announced, {done} or more were given."
            )
        self.entries[self._next] = replace(entry, crc=crc)
        self._next += 1

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._finish()
        except OSError as error:
            self._abandon()
            raise _io_error("write", self.path, error) from error
        except BaseException:
            self._abandon()
            raise

    def _write(self, data: bytes | memoryview, pad_to: int = 0) -> None:
        """Writes data, then zeros up to the file offset `pad_to`.

        The system gets whole pieces at multiples of their size: where its page cache knows large pages, the
        file then lies there in pages of 2 MiB, which are read faster (docs/PERFORMANCE.md)."""
        gap = max(0, pad_to - self._file.tell() - len(self._piece) - len(data))
        zeros = (bytes(min(_PIECE, gap - at)) for at in range(0, gap, _PIECE))
        for part in (data, *zeros):
            view = memoryview(part)
            for at in range(0, len(view), _PIECE):  # never more than two pieces are held
                self._piece += view[at : at + _PIECE]
                if len(self._piece) >= _PIECE:
                    self._flush(_PIECE)

    def _flush(self, n: int) -> None:
        """Writes the first n bytes of what is held."""
        with memoryview(self._piece) as held:
            done = 0
            while done < n:
                done += self._file.write(held[done:n])
        del self._piece[:n]

    def _finish(self) -> None:
        for name, data in self._blobs.items():
            self.write(name, [data])
        if self._next != len(self.entries):
            raise ConversionError(f"Entry {self.entries[self._next].name} was never written.")
        self._write(b"", self.bytes)
        self._flush(len(self._piece))
        self._file.seek(0)
        self._write(head_bytes(self._layout, self.entries))
        self._flush(len(self._piece))
        os.fsync(self._file.fileno())
        assert self._part is not None
        os.replace(self._part, self.path)  # before the lock ends: nobody takes it for abandoned
        self._part = None
        self._file.close()
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _abandon(self) -> None:
        if self._part is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)
            self._part = None


def _lock(file: int, how: int) -> bool:
    """False where another process has the lock, or the file system has none."""
    try:
        fcntl.flock(file, how)
        return True
    except OSError:
        return False


def _remove_abandoned(directory: Path) -> None:
    for part in directory.glob(".colibri-*.part"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            if _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                part.unlink()


def is_container(path: str | os.PathLike[str]) -> bool:
    """Whether it begins like a .colibri file; no pipe does, whose opening would wait for a writer."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_container(path: str | os.PathLike[str]) -> Container:
    """Header, config and directory, checked against the file's size and against each other."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            n_entries, config_bytes, directory = _check_header(path, head, size)
            head += file.read(directory + n_entries * ENTRY.size - len(head))
    except OSError as error:
        raise _io_error("read", path, error) from error
    unsigned = bytearray(head)
    struct.pack_into("<I", unsigned, CRC_AT, 0)
    stored = struct.unpack_from("<I", head, CRC_AT)[0]
    if zlib.crc32(unsigned) != stored:
        raise ModelFileError(
            f"{path}: header and directory do not match their checksum; the file is damaged."
        )
    if any(head[CONFIG_AT + config_bytes : directory]):
        raise ModelFileError(f"{path}: bytes behind the config are not 0; it is damaged, convert it again.")
    config = decode_config(head[CONFIG_AT : CONFIG_AT + config_bytes], path)
    raw = [ENTRY.unpack_from(head, directory + i * ENTRY.size) for i in range(n_entries)]
    entries = _decode_entries(path, raw, directory + n_entries * ENTRY.size, size)
    _match(path, config, entries)
    return Container(path, size, config, entries)


def _check_header(path: Path, head: bytes, size: int) -> tuple[int, int, int]:
    if head[: len(MAGIC)] != MAGIC:
        raise ModelFileError(f"{path} is not a .colibri file: it begins with {head[:8]!r}, not {MAGIC!r}.")
    if len(head) < HEADER.size:
        raise ModelFileError(
            f"{path} has {size} bytes, fewer than a header; it looks incomplete. Copy it again."
        )
    _, endian, version, file_bytes, config_bytes, directory, n_entries, _, zero = HEADER.unpack(head)
    if endian != 0x01020304 or version != LAYOUT_VERSION:
        raise UnsupportedError(
            f"{path} has layout version {version} and byte-order mark {endian:#x}; this version reads "
            f"layout {LAYOUT_VERSION}, little-endian. Convert the model again."
        )
    if file_bytes != size:
        raise ModelFileError(
            f"{path} looks incomplete: its header says {file_bytes:,} bytes, the file has {size:,}. Copy it "
            "again."
        )
    if (
        directory != aligned(CONFIG_AT + config_bytes, 64)
        or directory + n_entries * ENTRY.size > size
        or any(zero)
    ):
        raise ModelFileError(f"{path}: config or directory lie outside the file; it is damaged.")
    return n_entries, config_bytes, directory


def _decode_entries(path: Path, raw: Iterable[tuple[Any, ...]], end: int, size: int) -> tuple[Entry, ...]:
    """Entries in file order; each lies behind the one before and inside the file."""
    entries: list[Entry] = []
    names: set[str] = set()
    for name_bytes, offset, n_bytes, rows, cols, kind_id, type_ids, crc, zero in raw:
        name = name_bytes.rstrip(b"\0").decode("utf-8", "replace")
        kind = KINDS.get(kind_id, "")
        count = {"expert": 3, "blob": 0}.get(kind, 1)
        good = (
            kind and name and "\0" not in name and "\ufffd" not in name and len(name_bytes.rstrip(b"\0")) < 64
        )
        good = (
            good
            and all(
                i in TYPE_NAMES or (kind, at, i) == ("expert", 1, 0) for at, i in enumerate(type_ids[:count])
            )
            and not any(type_ids[count:])
            and not any(zero)
        )
        if not good or name in names:
            raise ModelFileError(
                f"{path}: directory entry {len(entries)} ({name!r:.70}) has a repeated or broken name, kind "
                "or weight type; the file is damaged, convert the model again."
            )
        if offset < end or offset % (PAGE if kind == "expert" else ALIGNMENT) or offset + n_bytes > size:
            raise ModelFileError(
                f"{path}: {name} ({n_bytes} bytes at {offset}) overlaps another entry, is not aligned or "
                f"leaves the file of {size} bytes; the file is damaged, convert the model again."
            )
        types = tuple(TYPE_NAMES.get(i, "") for i in type_ids[:count])
        entries.append(Entry(name, kind, rows, cols, types, n_bytes, offset, crc))
        names.add(name)
        end = offset + n_bytes
    return tuple(entries)


def _match(path: Path, config: Config, entries: tuple[Entry, ...]) -> None:
    """The tensors must be exactly those that follow from the config, in that order."""
    types = {entry.name: entry.types for entry in entries}

    def found_types(name: str) -> tuple[str, ...]:
        found = types.get(name, ())
        return found if len(found) in (1, 3) else ("f32",) * 3

    position = 0
    for want in iter_tensors(config, lambda name: (found_types(name) * 3)[:3]):
        found = entries[position] if position < len(entries) else None
        if found is None or replace(found, offset=0, crc=0) != want:
            raise ModelFileError(
                f"{path}: directory entry {position} should be {_brief(want)}, found "
                f"{_brief(found) if found else 'the end'}. Config and tensors do not fit; convert it again."
            )
        position += 1
    for entry in entries[position:]:
        if entry.kind != "blob" or entry.rows or entry.cols:
            raise ModelFileError(f"{path}: entry {entry.name} is not part of a model with this config.")


def _brief(entry: Entry) -> str:
    types = "/".join(entry.types)
    return f"{entry.kind} {entry.name} [{entry.rows}, {entry.cols}] {types} of {entry.bytes} bytes"


def read_entry(container: Container, which: str | Entry) -> bytes:
    """All bytes of one entry, or of that name, checked against its checksum."""
    entry = which
    if isinstance(entry, str):
        found = next((one for one in container.entries if one.name == which), None)
        if found is None:
            raise ModelFileError(f"{container.path} has no entry {which!r}.")
        entry = found
    data = b"".join(_chunks(container, entry))
    if zlib.crc32(data) != entry.crc:
        raise ModelFileError(f"{container.path}: {entry.name} does not match its checksum; it is damaged.")
    return data


def read_blobs(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The embedded files (tokenizer.json, generation.json, ...) by name."""
    container = read_container(path)
    return {
        entry.name: read_entry(container, entry.name) for entry in container.entries if entry.kind == "blob"
    }


def read_json_blob(blobs: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among the blobs; an empty one if there is no such blob."""
    try:
        value = json.loads(blobs.get(name, b"{}"))
    except ValueError as error:
        raise ModelFileError(
            f"The embedded {name} is not JSON ({error}); convert the model again."
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"The embedded {name} is not a JSON object; convert the model again.")
    return value


def damaged_entries(container: Container, progress: Progress | None = None) -> list[str]:
    """Reads the whole file; names of entries whose bytes do not match their checksum."""
    total = sum(entry.bytes for entry in container.entries)
    done, bad = 0, []
    for entry in container.entries:
        crc = 0
        for chunk in _chunks(container, entry):
            crc = zlib.crc32(chunk, crc)
            done += len(chunk)
            if progress:
                progress(done, total, entry.name)
        if crc != entry.crc:
            bad.append(entry.name)
    return bad


def _chunks(container: Container, entry: Entry) -> Iterator[bytes]:
    try:
        with container.path.open("rb") as file:
            file.seek(entry.offset)
            left = entry.bytes
            while left:
                chunk = file.read(min(left, _PIECE))
                if not chunk:
                    raise ModelFileError(
                        f"{container.path} ended inside {entry.name}: it changed while being read."
                    )
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise _io_error("read", container.path, error) from error


def _io_error(verb: str, path: Path, error: OSError) -> ModelIOError:
    if isinstance(error, ModelIOError):
        return error
    return ModelIOError(f"Cannot {verb} {path}: {error.strerror or error}.")
