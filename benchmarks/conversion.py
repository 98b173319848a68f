"""Converts GGUF files of random weights, a type at a time, and says how fast and in how much memory.

    python benchmarks/conversion.py [--types Q4_1 Q5_1 Q5_K Q2_K] [--layers 2] [--turns 3]

Owns: blocks of types that are rounded a second time, drawn around 0, and the measuring: each conversion is
a process of its own, its source is in the page cache, and the quickest of a few counts. Refuses: judging the
result, which tests/test_gguf_regrid.py does. docs/GGUF.md, "Speed and memory", has the figures.

Files go to --at (else a folder for temporary files), one source and one result at a time. The last line says
what the disk writes: a conversion that writes 1.7 times what it reads cannot be faster than that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import gguf_writer
from colibri.analysis.shapes import Shape
from gguf_writer import Bytes

TYPES = ("Q4_1", "Q5_1", "Q5_K", "Q2_K", "Q4_K", "Q8_0")
# Weights and bytes of a block.
WIDTHS = {"Q4_1": (32, 20), "Q5_1": (32, 24), "Q5_K": (256, 176), "Q2_K": (256, 84)}
UNITS = {"Q2_K": (80, 82)}  # where a block has its f16 scale and minimum; (0, 2) in the others
CODES = {"Q4_1": 7.5, "Q5_1": 15.5, "Q5_K": 15.5, "Q2_K": 1.5}  # in the middle


def drawn(dtype: str, random: np.random.Generator, rows: int, cols: int, size: float) -> Bytes:
    """[rows, bytes]: any codes around 0, scales that give weights of deviation `size`."""
    elements, width = WIDTHS[dtype]
    blocks = random.integers(0, 256, (rows, cols // elements, width), dtype=np.uint8)
    scale = size / CODES[dtype] * random.uniform(1.2, 1.8, blocks.shape[:2])
    least = -scale * CODES[dtype]
    if dtype == "Q5_K":  # steps and minima of groups, near 40 of 63
        blocks[..., 4:12] = random.integers(33, 48, (*blocks.shape[:2], 8))
        blocks[..., 12:16] = random.integers(1, 16, (*blocks.shape[:2], 4)) * 17
        scale, least = scale / 40, -least / 40
    elif dtype == "Q2_K":
        blocks[..., :16] = random.integers(7, 16, (*blocks.shape[:2], 16)) * 17
        scale, least = scale / 11, -least / 11
    for at, unit in zip(UNITS.get(dtype, (0, 2)), (scale, least), strict=True):
        blocks[..., at : at + 2] = unit.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(dtype: str, layers: int, out: Path) -> None:
    """A model of 270 million weights a layer."""
    ours = {"Q8_0": "q8", "Q4_K": "q4"}.get(dtype, dtype)
    if ours == dtype:
        gguf_writer.QUANTISED[dtype] = dtype
        gguf_writer.DRAW[dtype] = lambda *of: drawn(dtype, *of)
    shape = Shape("qwen3_moe", layers, 2048, 16, 16, 128, 40, 8, 1024, 2048)
    gguf_writer.write(f"conversion {dtype}", shape, ours, out)


def convert(source: Path, out: Path) -> dict[str, Any]:
    """In this process: seconds, of the wall and of processors, and the peak of memory."""
    from colibri.convert import convert

    before = resource.getrusage(resource.RUSAGE_SELF)
    report = convert(source, out, require_tokenizer=False)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = sum(getattr(after, part) - getattr(before, part) for part in ("ru_utime", "ru_stime"))
    # Not ru_maxrss, which a process has from the one that started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) // 1024
    return {"seconds": report.seconds, "cpu": used, "peak": peak, "bytes": report.bytes}


def measured(source: Path, out: Path, turns: int) -> dict[str, Any]:
    """The quickest of a few conversions, each a process of its own."""
    command = [sys.executable, __file__, "--one", str(source), str(out)]
    found = []
    for _ in range(turns):
        source.read_bytes()
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr)
        found.append(json.loads(run.stdout))
        out.unlink()
    return min(found, key=lambda one: one["seconds"])


def disk_speed(folder: Path, size: int = 256 << 20) -> float:
    """MB/s of a new file until it is on the disk."""
    block, at = os.urandom(1 << 20), folder / "disk"
    started = time.perf_counter()
    with at.open("wb", buffering=0) as stream:
        for _ in range(size >> 20):
            stream.write(block)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    at.unlink()
    return size / 1e6 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES[:4]), metavar="TYPE")
    parser.add_argument("--layers", type=int, default=2, help="of 270 million weights each (default: 2)")
    parser.add_argument("--turns", type=int, default=3, help="of which the quickest counts (default: 3)")
    parser.add_argument("--at", type=Path, help="the folder for files (default: one for temporary files)")
    parser.add_argument("--one", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(convert(*args.one)))
        return
    with tempfile.TemporaryDirectory(dir=args.at) as folder:
        source, out = Path(folder) / "source.gguf", Path(folder) / "out.colibri"
        print("type   source MB  seconds  MB/s  CPU s  peak MiB  file MB", flush=True)
        for dtype in args.types:
            write(dtype, args.layers, source)
            size, best = source.stat().st_size / 1e6, measured(source, out, args.turns)
            speed, made = size / best["seconds"], best["bytes"] / 1e6
            line = f"{dtype:6} {size:9.0f} {best['seconds']:8.2f} {speed:5.0f} {best['cpu']:6.2f}"
            print(f"{line} {best['peak']:9} {made:8.0f}", flush=True)
        print(f"the disk writes {disk_speed(Path(folder)):.0f} MB/s")


if __name__ == "__main__":
    main()
