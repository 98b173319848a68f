"""Fuzzes the reader of GGUF headers with atheris: whatever the bytes, a result or an error of ours, and soon.

    python tests/fuzz_gguf.py [-runs=1000000] [further options of libFuzzer]

Owns: the seeds, and what counts as a fault. Refuses: nothing. The seeds are files of the everyday tests, so
that a changed byte lands behind the first checks.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["colibri.convert.gguf"]):
    from colibri.convert.gguf.container import GgufFile, read_header

from colibri.errors import ColibriError
from gguf_bytes import Wrong, gguf_bytes
from test_gguf_container import HOSTILE, METADATA, TENSORS

SEEDS = [
    gguf_bytes(METADATA, TENSORS),
    gguf_bytes(METADATA | {"general.alignment": 8}, TENSORS, Wrong(version=2)),
    gguf_bytes({"a": ["x", "yy"], "b": [1, 2], "split.no": 0}, TENSORS),
    *(data for data, _ in HOSTILE.values()),
]


def one(data: bytes) -> None:
    try:
        found = read_header(io.BytesIO(data), Path("fuzzed.gguf"))
    except ColibriError as error:
        assert "fuzzed.gguf" in str(error) and len(str(error)) < 1000
        return
    _check(found, len(data))


def _check(found: GgufFile, size: int) -> None:
    """What the rest of the converter relies on."""
    for name, tensor in found.tensors.items():
        assert name == tensor.name and tensor.offset is not None and 0 < tensor.offset < size
        assert 1 <= len(tensor.shape) <= 4 and min(tensor.shape) > 0


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            (Path(corpus) / str(number)).write_bytes(seed)
        options = ["-runs=1000000", "-max_len=4096", "-timeout=5", "-rss_limit_mb=1024", *sys.argv[1:]]
        atheris.Setup([sys.argv[0], *options, corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
