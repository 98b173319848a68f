"""What README.md quotes is what a run prints: its demo, its Python, its figures that no machine changes.

Owns: that equality. A figure of speed or of a whole process counts as a number of its kind; "..." and "[...]"
stand for what the README leaves out. Refuses: tables (test_model_table.py, test_compare.py) and measurements.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import colibri
from colibri import inspection
from colibri.cache import resolve
from fixtures.variants import VARIANTS
from test_tools import ROOT

README = (ROOT / "README.md").read_text("utf-8")
CORES = "threads 2"  # of the machine that the README quotes
_UNITS = ("tok/s", "MiB resident,", "MiB planned", "MiB, expert cache")  # of figures that differ
_PARTS = re.compile(rf"(\s*\.\.\.|[\d.,]+ (?:{'|'.join(_UNITS)}))")


def quoted() -> list[str]:
    """The lines that `make demo` printed."""
    block = re.search(r"What `make demo` printed.*?\n\n((?:    .*\n)+)", README)
    assert block is not None
    return [line.strip() for line in block[1].splitlines()]


def pattern(line: str) -> str:
    """What a printed line has to match."""

    def of(part: str) -> str:
        if part.strip() == "...":
            return ".*"
        unit = next((unit for unit in _UNITS if part.endswith(unit)), None)
        return rf"[\d.,]+ {unit}" if unit and _PARTS.fullmatch(part) else re.escape(part)

    return "".join(map(of, _PARTS.split(line)))


def test_the_demo_prints_what_is_quoted() -> None:
    command = re.search(r"/colibri (run demo .*)", (ROOT / "Makefile").read_text("utf-8"))
    prompt = re.search(r"^PROMPT *\?= *(.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert command is not None and prompt is not None
    arguments = shlex.split(command[1].replace("$(PROMPT)", prompt[1])) + ["--threads", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "colibri", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    lines = quoted()
    at = next(i for i, line in enumerate(lines) if line.startswith("prompt "))
    story, printed = " ".join(lines[:at]), " ".join(run.stdout.split())
    assert story.endswith(" [...]") and printed.startswith(story.removesuffix(" [...]"))
    assert CORES in "\n".join(lines)
    for line in lines[at:]:
        isa = line.replace("engine    avx2,", f"engine    {colibri.load('demo', threads=1).isa},")
        assert re.search(f"^{pattern(isa)}$", run.stderr, re.MULTILINE), (
            f"README.md quotes {line!r}; the demo printed {run.stderr!r}. Copy what it prints."
        )


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_figures_that_no_machine_changes() -> None:
    model = inspection.describe(resolve("demo"))
    with colibri.load("demo", threads=1, context=1000) as opened:
        cache = opened.memory.kv_cache / 2**20
    figures = {
        f"{model.parameters / 1e6:.1f} million parameters ({model.active_parameters / 1e6:.0f} million used",
        f"The KV cache is f32: {cache:.1f} MiB for the demo model per 1,000 positions",
        f"minimal.c), {len(Path(ROOT, 'examples/c/minimal.c').read_text().splitlines())} lines",
        f"f32 against Transformers, {len(VARIANTS)} tiny models of all decoder families",
    }
    assert [figure for figure in figures if figure not in README] == []
