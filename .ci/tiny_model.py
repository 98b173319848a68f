"""Writes a tiny random model for the C checks that are slow on the demo model: valgrind, sanitizers, QEMU.

Run by .ci/run with the Python of ./.venv: PYTHONPATH=tests python tiny_model.py OUT.colibri [encoder]
"""

import sys
import tempfile
from pathlib import Path

import checkpoints
from colibri.convert import convert
from encoder_checkpoints import MAKERS


def main(out: Path, encoder: bool) -> None:
    """Two layers of four experts, two of them used, in q8; or an encoder and a decoder."""
    make = MAKERS["switch_transformers"] if encoder else checkpoints.FAMILIES["mixtral"]
    with tempfile.TemporaryDirectory() as folder:
        report = convert(make(Path(folder) / "checkpoint"), out, "q8")
    print(f"{report.path.name}: {report.path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["encoder"])
