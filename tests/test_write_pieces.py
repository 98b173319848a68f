"""How a model file reaches the system: in whole pieces, at multiples of their size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri.format
from colibri.config import complete_config
from colibri.format import Writer, read_container
from test_format import CONFIG, write


class Counted:
    """A file that notes where each write begins and what it gets, and takes less than it is given."""

    def __init__(self, file: Any, short: int) -> None:
        self.file, self.short, self.writes = file, short, list[tuple[int, int]]()

    def write(self, data: Any) -> int:
        at, n = self.file.tell(), len(data)
        done = self.file.write(data[: self.short or n])
        self.writes.append((at, done))
        return int(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("piece", [4096, 1 << 14, 1 << 22])
@pytest.mark.parametrize("short", [0, 1000])
def test_pieces_are_whole_and_the_file_is_the_same(
    tmp_path: Path, piece: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(tmp_path / "expected.colibri").read_bytes()
    monkeypatch.setattr(colibri.format, "_PIECE", piece)
    made: list[Counted] = []
    enter = Writer.__enter__

    def counted(self: Writer) -> Writer:
        found = enter(self)
        made.append(Counted(self._file, short))
        self._file = made[0]  # type: ignore[assignment]
        return found

    monkeypatch.setattr(Writer, "__enter__", counted)
    path = write(tmp_path / "pieces.colibri")
    assert path.read_bytes() == expected
    writes = made[0].writes
    body = writes[: next(at for at in range(len(writes) - 1, 0, -1) if writes[at][0] == 0)]  # then the head
    if not short:
        assert all(at % piece == 0 for at, _ in body)
        assert all(n % piece == 0 for _, n in body[:-1])


def test_little_is_held(tmp_path: Path) -> None:
    """Whatever one chunk has, and however long a gap is, two pieces are held at most."""
    config = complete_config(CONFIG)
    with Writer(tmp_path / "model.colibri", config, "f32", {}) as writer:
        most = 0
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
            most = max(most, len(writer._piece))
    assert most <= 2 * colibri.format._PIECE
    assert read_container(tmp_path / "model.colibri").bytes == writer.bytes
    assert np.fromfile(tmp_path / "model.colibri", np.uint8).size == writer.bytes
