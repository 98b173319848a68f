"""Routing traces that are damaged, cut short or hostile are refused by name, or read as they were."""

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.analysis.trace import Trace
from colibri.errors import ModelIOError, TraceError
from test_trace import trace_file as trace_file


def rewritten(
    path: Path, name: str, change: Callable[[bytes], bytes], kind: int = zipfile.ZIP_STORED
) -> Path:
    """The trace with one member changed, its checksum right."""
    out = path.with_name("changed.trace")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", kind) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename != name:
                new.writestr(info.filename, data)
            elif (other := change(data)) != b"":
                new.writestr(name, other)
    return out


def header_with(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | fields).encode()


def last_byte(value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-1] + bytes([value])


def read_all(path: Path) -> None:
    for _ in Trace(path).steps():
        pass


DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("header.json", lambda data: b"", "no header.json"),
    ("header.json", lambda data: data[:-2], "not JSON"),
    ("header.json", lambda data: b"[" * 100_000, "not JSON"),
    ("header.json", lambda data: b"[]", "does not say"),
    ("header.json", header_with(format="else"), "does not say"),
    ("header.json", header_with(version=2), "version 2; this Colibri reads version 1"),
    *(
        ("header.json", header_with(**fields), "makes no sense")
        for fields in (
            {"n_layers": 3},
            {"n_layers": "2"},
            {"n_layers": True},
            {"n_encoder_layers": 3},
            {"n_experts": [4, -4]},
            {"n_experts": [0, 0]},
            {"n_experts": [1, 4]},
            {"n_experts": None},
            {"n_experts_used": 0},
            {"labels": [1]},
            {"model": None},
            {"logits": 1},
        )
    ),
    ("header.json", header_with(n_experts=[4, 400]), "expected <i8"),
    ("header.json", header_with(n_experts_used=1), "experts: expected"),
    ("header.json", header_with(labels=[]), "sequence_labels: expected numbers from -1 to -1"),
    ("header.json", header_with(n_encoder_layers=1), "experts: expected"),
    ("experts.npy", lambda data: b"", "no experts.npy"),
    ("experts.npy", last_byte(4), "in a layer of 4 experts"),
    ("experts.npy", lambda data: data[:-1], "its bytes are not those"),
    ("experts.npy", lambda data: data.replace(b"|u1", b"|O8"), "experts"),
    ("experts.npy", lambda data: data.replace(b"|u1", b"|i1"), "found \\|i1"),
    ("experts.npy", lambda data: data.replace(b"False", b"True").replace(b"}", b"} "), "experts: expected"),
    ("experts.npy", lambda data: b"\x93NUMPY\2\0" + data[8:], "is no array"),
    ("experts.npy", lambda data: b"nothing", "is no array"),
    ("experts.npy", lambda data: data[:10] + b"(" * 100 + data[110:], "is no array"),
    ("experts.npy", lambda data: data.replace(b"|u1", b"|u\x9c"), "is no array"),
    ("experts.npy", lambda data: data.replace(b", 2)", b"2 2)"), "is no array"),
    ("chunks.npy", lambda data: data[:-8] + b"\0\0\0\0" + data[-4:], "at least 1 row"),
    ("chunks.npy", last_byte(1), "stack 0 or 1"),
    ("chunks.npy", lambda data: data[:-5] + b"\x7f" + data[-4:], "expected [0-9]+ rows"),
    ("sequences.npy", last_byte(9), "sequences: expected numbers from 0 to 2"),
    ("expert_bytes.npy", last_byte(255), "expert_bytes: expected numbers"),
    ("logits.npy", lambda data: data.replace(b"<f4", b"<i4"), "logits: expected <f4"),
]


@pytest.mark.parametrize("at", range(len(DAMAGES)))
def test_a_damaged_trace_is_refused(trace_file: Path, at: int) -> None:
    name, change, words = DAMAGES[at]
    with pytest.raises(TraceError, match=words):
        read_all(rewritten(trace_file, name, change))


def test_the_unchanged_trace_is_read(trace_file: Path) -> None:
    read_all(rewritten(trace_file, "", lambda data: data))


def test_compressed_arrays_are_refused(trace_file: Path) -> None:
    with pytest.raises(TraceError, match="is compressed"):
        read_all(rewritten(trace_file, "", lambda data: data, zipfile.ZIP_DEFLATED))


def test_a_cut_file_is_refused(trace_file: Path, tmp_path: Path) -> None:
    data = trace_file.read_bytes()
    for n in [0, 1, 30, *range(100, len(data), 997), len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:n])
        with pytest.raises(TraceError):
            read_all(tmp_path / "cut")
    with pytest.raises(ModelIOError, match="Cannot read"):
        Trace(tmp_path / "none")
    with pytest.raises(ModelIOError, match="Cannot read"):
        Trace(tmp_path)


def test_a_changed_byte_is_found_or_harmless(trace_file: Path, tmp_path: Path) -> None:
    """No byte of the file can make the reader fail otherwise than by its own error, or read other numbers."""
    data = trace_file.read_bytes()
    expected = [step.experts.tolist() for step in Trace(trace_file).steps()]
    rng = np.random.default_rng(0)
    found = 0
    for at in rng.integers(0, len(data), 400).tolist():
        (tmp_path / "changed").write_bytes(
            data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        )
        try:
            steps = [step.experts.tolist() for step in Trace(tmp_path / "changed").steps()]
        except TraceError:
            found += 1
        else:
            assert steps == expected
    assert found > 200


def numbers_of(trace: Trace) -> Iterator[int]:
    for step in trace.steps():
        yield from step.experts.ravel().tolist()


def test_a_view_of_the_file_is_not_writable(trace_file: Path) -> None:
    trace = Trace(trace_file)
    assert set(numbers_of(trace)) <= set(range(4))
    with pytest.raises(ValueError, match="read-only"):
        trace.array("experts")[0] = 9
