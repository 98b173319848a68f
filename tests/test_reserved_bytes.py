"""Bytes of a file's head that docs/FORMAT.md says are 0: with one of them set, the reader in C and the one in
Python refuse the file.

Owns: the list of those bytes. Refuses: the other rules of the head (test_format.py, test_native.py).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri import _native as native
from colibri.errors import ModelFileError
from colibri.format import read_container
from test_format import CONFIG, forge, write


def reserved(data: bytes) -> Iterator[int]:
    """Every one in header, config records and the first entry of each kind, but for what pads a
    record's name and values."""
    config_bytes, directory, n_entries = struct.unpack_from("<QQI", data, 24)
    yield from range(48, 64)
    yield 64 + 3
    yield from range(64 + config_bytes, directory)
    kinds: Counter[int] = Counter()
    for at in range(directory, directory + 128 * n_entries, 128):
        kind = data[at + 88]
        kinds[kind] += 1
        if kinds[kind] > 1:
            continue
        yield from range(at + data[at : at + 64].index(0) + 1, at + 64)
        yield from range(at + 89 + {3: 3, 4: 0}.get(kind, 1), at + 92)
        yield from range(at + 96, at + 128)
        if kind == 3 and data[at + 90] == 0:  # an expert without an up
            yield at + 90


@pytest.mark.parametrize("ungated", [0, 1])
def test_no_reserved_byte_may_be_set(tmp_path: Path, ungated: int) -> None:
    path = write(tmp_path / "m.colibri", CONFIG | {"ffn_ungated": ungated}, type="f32")
    good = path.read_bytes()
    native.close_model(native.open_model(path))
    places = list(reserved(good))
    assert len(places) > 4 * 64
    for at in places:
        path.write_bytes(good)
        forge(path, at, b"\1")
        for opened in (read_container, native.open_model):
            with pytest.raises(ModelFileError):
                opened(path)
                pytest.fail(f"byte {at} is 1, but {opened.__name__} reads the file")
