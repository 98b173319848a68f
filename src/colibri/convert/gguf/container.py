"""Reads the header of GGUF files, version 2 and 3, whole or split: metadata, and where each tensor lies.

Owns: the byte format (the specification in docs/gguf.md of the ggml project), parts of a split, the bounds of
everything read. Refuses: by name and byte whatever a file claims beyond its size or its format, before it is
acted on. What metadata means is for the modules beside it to say; tensor data is not touched.

The gguf package's own reader maps a file and trusts its sizes; it serves for block sizes and dequantising.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from colibri.convert.gguf import blocks
from colibri.convert.source_tensor import SourceTensor
from colibri.errors import ConversionError, ModelIOError
from colibri.paths import listed

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST_STRING = 64 << 20
_LARGEST_HEADER = 1 << 30
_READ_AHEAD = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_TENSORS = 1 << 21
_LARGEST_ALIGNMENT = 1 << 20
# Value types of the format, as numpy and struct call them; 8 is a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# What lies beside a model: towers for images and sound, statistics of a quantiser, hidden files.
_BESIDE = re.compile(r"mmproj|imatrix|^\.", re.IGNORECASE)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """All parts of one model. Metadata values are int, float, bool, str, lists of str, numpy arrays of
    numbers, or lists of such."""

    path: Path  # the first part
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def find_gguf(directory: Path) -> Path | None:
    """The one model in GGUF that a directory holds, by its first part; None if it has no such file."""
    names = [name for name in listed(directory) if name.endswith(".gguf") and not _BESIDE.search(name)]
    firsts = {_PART.sub(r"\1-\3", name): name for name in reversed(names)}
    if len(firsts) > 1:
        some = sorted(firsts.values())[:5]
        more = f" and {len(firsts) - len(some)} more" if len(firsts) > len(some) else ""
        raise ConversionError(
            f"{directory} holds {len(firsts)} models in GGUF ({', '.join(some)}{more}). "
            "Give the file of one of them."
        )
    return directory / next(iter(firsts.values())) if firsts else None


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file, or any part of a split one; its other parts lie beside it under the names that say so."""
    first = _read(path)
    count = _whole(first, "split.count") or 0
    if count < 2:
        return first
    parts = list(_parts(path, first, count))
    tensors: dict[str, SourceTensor] = {}
    for part in parts:
        for name, place in part.tensors.items():
            other = tensors.setdefault(name, place)
            if other is not place:
                raise _foreign(place.file, f"its tensor {name} is also in {other.file.name}")
    total = _whole(parts[0], "split.tensors.count")
    if total != len(tensors):
        raise ConversionError(
            f"{parts[0].path}: its {count} parts hold {len(tensors)} tensors, but split.tensors.count is "
            f"{total!r}. A part belongs to another model; download all parts again."
        )
    metadata = parts[0].metadata
    return GgufFile(parts[0].path, tuple(part.path for part in parts), metadata, tensors)


def _whole(part: GgufFile, key: str) -> int | None:
    """A whole number; None where there is none, or something else."""
    found = part.metadata.get(key)
    return found if isinstance(found, int) else None


def _parts(path: Path, known: GgufFile, count: int) -> Iterator[GgufFile]:
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > 99999:
        raise ConversionError(
            f"{path} is one of {count} parts of a split model, but its name does not end in "
            f"-00001-of-{count:05d}.gguf as the others need it. Give all parts the names they were made with."
        )
    files = [path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, count + 1)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise ConversionError(
            f"{path.parent} lacks {len(absent)} of the {count} parts of this model: "
            f"{', '.join(absent[:5])}{more}. Download them into the same directory."
        )
    for number, file in enumerate(files):
        part = known if file == path else _read(file)
        found = (_whole(part, "split.count"), _whole(part, "split.no"))
        if found != (count, number):
            raise _foreign(file, f"split.count and split.no are {found}, expected {(count, number)}")
        yield part


def _foreign(file: Path, why: str) -> ConversionError:
    return ConversionError(
        f"{file} does not belong to the other parts of this model: {why}. Download all parts again."
    )


# ------------------------------------------------------------------ one file


def _read(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            return read_header(stream, path)
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error


def read_header(stream: BinaryIO, path: Path) -> GgufFile:
    """One file or part, from its start; `path` is what tensors and errors call it."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return _Header(path, stream, size).read()


class _Header:
    """A place in a file, before whose end everything must be that is read."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path = path
        self.stream = stream
        self.size = size
        self.data = bytearray()  # from the file's start as far as it was needed
        self.at = 0

    def error(
        self, text: str, step: str = "The file is damaged or incomplete; download it again."
    ) -> Exception:
        return ConversionError(f"{self.path} (GGUF, {self.size:,} bytes): {text}. {step}")

    def pass_over(self, count: int, what: str) -> int:
        """Where the next bytes begin, all of which are in `data` then."""
        start, end = self.at, self.at + count
        if end > min(self.size, _LARGEST_HEADER):
            where = "the file's end" if end > self.size else f"{_LARGEST_HEADER >> 30} GiB of header"
            raise self.error(f"{what} at byte {start} takes {count:,} bytes, which is beyond {where}")
        while end > len(self.data):
            more = self.stream.read(max(_READ_AHEAD, end - len(self.data)))
            if not more:
                raise self.error(f"the file ended at byte {len(self.data)} while it was read")
            self.data += more
        self.at = end
        return start

    def take(self, count: int, what: str) -> bytes:
        start = self.pass_over(count, what)
        return bytes(self.data[start : self.at])

    def number(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.pass_over(layout.size, what))[0]

    def text(self, what: str) -> str:
        length = int.from_bytes(self.take(8, what), "little")
        if length > _LARGEST_STRING:
            raise self.error(
                f"{what} at byte {self.at} claims {length:,} bytes, at most {_LARGEST_STRING:,} fit"
            )
        start = self.pass_over(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8") from error

    def texts(self, count: int, what: str) -> list[str]:
        """As text() for each. Vocabularies have 300,000: those that are in memory go a short way."""
        found: list[str] = []
        data, length_of = b"", _LENGTH.unpack_from
        while len(found) < count:
            if len(self.data) != len(data):
                data = bytes(self.data)
            with contextlib.suppress(UnicodeDecodeError, struct.error):  # text() reads on, or says where
                for _ in range(count - len(found)):
                    start = self.at + _LENGTH.size
                    end = start + length_of(data, self.at)[0]
                    if end > len(data):
                        break
                    found.append(data[start:end].decode())
                    self.at = end
            if len(found) < count:
                found.append(self.text(what))
        return found

    def name(self, what: str) -> str:
        found = self.text(what)
        if not found:
            raise self.error(f"{what} before byte {self.at} is empty")
        return found

    def read(self) -> GgufFile:
        magic, version = self.take(4, "the magic"), self.number("I", "the version")
        if magic != MAGIC:
            raise self.error(f"it begins with {magic!r}, expected {MAGIC!r}", "This is no GGUF file.")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"big-endian, version {swapped}" if swapped in (1, *_VERSIONS) else f"of version {version}"
            raise self.error(
                f"it is {what}; little-endian files of version 2 and 3 can be read",
                "Get a newer conversion of this model.",
            )
        n_tensors, n_values = (
            self.number("Q", "the number of tensors"),
            self.number("Q", "the number of keys"),
        )
        # A tensor takes 8 + 1 + 4 + 8 + 4 + 8 bytes at least, a key 8 + 1 + 4 + 1.
        if n_tensors > min(self.size // 33, _MOST_TENSORS) or n_values > self.size // 14:
            raise self.error(f"it claims {n_tensors:,} tensors and {n_values:,} keys, more than it can hold")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.name("the name of a key")
            if key in metadata:
                raise self.error(f"the key {key!r:.100} occurs twice")
            metadata[key] = self.value(self.number("I", f"the type of {key}"), key)
        alignment = metadata.get("general.alignment", 32)
        good = isinstance(alignment, int) and 0 < alignment <= _LARGEST_ALIGNMENT
        if not good or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r:.40}, expected a power of two up to 2^20")
        tensors = [self.tensor() for _ in range(n_tensors)]
        start = -(-self.at // alignment) * alignment
        return GgufFile(self.path, (self.path,), metadata, self.placed(tensors, start, alignment))

    def value(self, kind: int, key: str, inner: bool = False) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise self.error(
                f"{key!r:.100} at byte {self.at} has the value type {kind}, which does not exist"
            )
        item, count = self.number("I", key), self.number("Q", key)
        if item in _NUMBERS:
            width = struct.calcsize("<" + _NUMBERS[item])
            if count > self.size:  # before it is multiplied
                raise self.error(f"{key!r:.100} at byte {self.at} claims {count:,} numbers")
            return np.frombuffer(
                self.take(count * width, key), f"<{_NUMBERS[item]}" if width > 1 else _NUMBERS[item]
            )
        if item not in (_STRING, _ARRAY) or (item == _ARRAY and inner):
            raise self.error(
                f"{key!r:.100} at byte {self.at} is an array of the type {item}, which does not exist"
            )
        if count > (self.size - self.at) // 8:
            raise self.error(
                f"{key!r:.100} at byte {self.at} claims {count:,} values, more than the file can hold"
            )
        return (
            [self.value(_ARRAY, key, True) for _ in range(count)]
            if item == _ARRAY
            else self.texts(count, key)
        )

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """(name, type, shape, offset in the data)"""
        name = self.name("the name of a tensor")
        n_dims = self.number("I", f"the number of dimensions of {name!r:.100}")
        if not 1 <= n_dims <= _MOST_DIMENSIONS:
            raise self.error(f"{name!r:.100} has {n_dims:,} dimensions, expected 1 to {_MOST_DIMENSIONS}")
        shape = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims, f"the dimensions of {name!r:.100}"))[::-1]
        type, offset = (
            self.number("I", f"the type of {name!r:.100}"),
            self.number("Q", f"the offset of {name!r:.100}"),
        )
        if min(shape) < 1 or math.prod(shape) >= 2**48:
            raise self.error(
                f"{name!r:.100} has the shape {list(shape)}, expected sizes of at least 1 and fewer "
                "than 2^48 elements"
            )
        known = blocks.names()
        if type not in known:
            raise self.error(
                f"{name!r:.100} has the ggml type {type}, which is not known",
                "It is newer than this version, or a type of a fork; get a conversion in another type.",
            )
        block = blocks.sizes()[known[type]][0]
        if shape[-1] % block:
            raise self.error(
                f"{name!r:.100} has rows of {shape[-1]} elements, but blocks of {known[type]} hold {block}"
            )
        return name, known[type], shape, offset

    def placed(
        self, tensors: list[tuple[str, str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, SourceTensor]:
        """Tensors by name, whose bytes all lie in the file and nowhere twice."""
        places: dict[str, SourceTensor] = {}
        end, before = start, "the header"
        for name, type, shape, offset in sorted(tensors, key=lambda tensor: tensor[3]):
            at, (block, width) = start + offset, blocks.sizes()[type]
            if name in places:
                raise self.error(f"the tensor {name!r:.100} occurs twice")
            if offset % alignment:
                raise self.error(f"{name!r:.100} is at byte {at}, which is not a multiple of {alignment}")
            if at < end:
                raise self.error(f"{name!r:.100} at byte {at} overlaps {before!r:.100}, which ends at {end}")
            end, before = at + math.prod(shape) // block * width, name
            if end > self.size:
                raise self.error(
                    f"{name!r:.100} ends at byte {end:,}, {end - self.size:,} beyond the end",
                    "It looks incomplete; download it again.",
                )
            places[name] = SourceTensor(name, self.path, type, shape, at)
        return {tensor[0]: places[tensor[0]] for tensor in tensors}
