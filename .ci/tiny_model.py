"""Writes a tiny random model for the C checks that are slow on the demo model: valgrind, sanitizers, QEMU.

Run by .ci/run with the Python of ./.venv: PYTHONPATH=tests python tiny_model.py OUT.colibri
"""

import sys
import tempfile
from pathlib import Path

import checkpoints
from colibri.convert import convert


def main(out: Path) -> None:
    """Two layers of four experts, two of them used, in q8."""
    with tempfile.TemporaryDirectory() as folder:
        report = convert(checkpoints.FAMILIES["mixtral"](Path(folder) / "checkpoint"), out, "q8")
    print(f"{report.path.name}: {report.path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
