"""A zip of .npy arrays that lie in the file as they are: arrays are views of the mapped file.

Owns: that nothing of a damaged or hostile file is used: places, sizes, types, shapes and checksums are
checked before the first number is read. Refuses: what arrays mean (trace.py), writing (trace_writer.py).
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from colibri.errors import ModelIOError, TraceError

_LOCAL = struct.Struct("<4s22xHH")  # of a member's local header: signature, lengths of name and extra field
# What stands in the header of an array behind magic, version and length; Python is never evaluated.
_NPY = re.compile(
    rb"\{'descr': '([<>|=][A-Za-z][0-9]{1,6})', 'fortran_order': (False|True), "
    rb"'shape': \(((?:[0-9]{1,18}, ?){0,4}(?:[0-9]{1,18})?)\), \} *\n"
)

Array = npt.NDArray[Any]


class ArrayFile:
    """An open file. Arrays that it gives out keep the mapping alive."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._members = self._directory(file)
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelIOError(f"Cannot read {self.path}: {error.strerror or error}.") from error

    def fail(self, what: str) -> NoReturn:
        raise TraceError(f"{self.path}: {what}; the file is damaged, record the trace again")

    def text(self, name: str, largest: int) -> bytes:
        """A member that is no array, of at most so many bytes."""
        if len(self._bytes(name)) > largest:
            self.fail(f"{name} has more than {largest} bytes")
        return bytes(self._checked(name))

    def rows(self, name: str, dtype: str, row: tuple[int, ...]) -> int:
        """How many rows of a type and a shape an array has; its numbers are not read."""
        return self._layout(name, dtype, row)[0][0]

    def array(self, name: str, dtype: str, row: tuple[int, ...]) -> Array:
        """An array [n, *row], compared with its checksum."""
        shape, begin = self._layout(name, dtype, row)
        return np.frombuffer(self._checked(f"{name}.npy")[begin:], dtype).reshape(shape)

    def _layout(self, name: str, dtype: str, row: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """(shape, bytes of the .npy header) of an array, which is as long as they say."""
        data = self._bytes(f"{name}.npy")
        begin = 10 + int.from_bytes(data[8:10], "little")
        head = bytes(data[10:begin])
        match = _NPY.fullmatch(head) if bytes(data[:8]) == b"\x93NUMPY\1\0" else None
        if match is None:
            self.fail(f"{name}.npy is no array of .npy version 1.0")
        found, by_columns = match[1].decode(), match[2] == b"True"
        shape = tuple(int(number) for number in match[3].split(b",") if number.strip())
        if found != dtype or not shape or shape[1:] != row or (by_columns and row):
            want = f"{dtype} [n{''.join(f', {columns}' for columns in row)}]"
            self.fail(f"{name}: expected {want}, found {found} {list(shape)}")
        if len(data) - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            self.fail(f"{name}: its bytes are not those of {list(shape)} numbers")
        return shape, begin

    def _directory(self, file: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                members = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, RuntimeError, struct.error) as error:
            raise TraceError(
                f"{self.path} is no routing trace, or it is cut short: expected a zip of arrays, as `colibri "
                f"trace` writes it ({error})"
            ) from error
        for name, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                self.fail(f"{name} is compressed; arrays of a trace are stored as they are")
            if info.header_offset < 0 or info.header_offset + _LOCAL.size + info.file_size > size:
                self.fail(f"{name} leaves the file of {size} bytes")
        return members

    def _bytes(self, name: str) -> memoryview:
        """The bytes of a member, where they lie."""
        info = self._members.get(name)
        if info is None:
            raise TraceError(
                f"{self.path} is no routing trace: it has no {name}. `colibri trace MODEL -o FILE` makes one."
            )
        signature, name_bytes, extra = _LOCAL.unpack_from(self._data, info.header_offset)
        begin = info.header_offset + _LOCAL.size + name_bytes + extra
        if signature != b"PK\x03\x04" or begin + info.file_size > len(self._data):
            self.fail(f"{name} leaves the file of {len(self._data)} bytes")
        return memoryview(self._data)[begin : begin + info.file_size]

    def _checked(self, name: str) -> memoryview:
        data = self._bytes(name)
        if zlib.crc32(data) != self._members[name].CRC:
            self.fail(f"{name} does not match its checksum")
        return data
