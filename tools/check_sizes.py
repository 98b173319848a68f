"""Prints the size of every part of the source tree beside its budget and fails past a hard limit.

Owns: the budgets. Over budget means a missing concept: split by noun. Lines are physical lines of a file; a
function runs from its return type to the closing brace in column 0. Exit status 1 past a hard limit.

    python tools/check_sizes.py [--root DIR]
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Size(NamedTuple):
    """One measured thing."""

    found: int
    where: str


class Row(NamedTuple):
    """One budget with everything that it is measured on."""

    name: str
    target: int
    hard: int
    sizes: list[Size]


ISA_FILES = {"scalar", "avx2", "avx2_vnni", "avx512", "neon", "neon_dotprod", "wasm"}
C_FOLDERS = ("core", "examples", "tests", "benchmarks")
PYTHON_FOLDERS = ("src", "tools", "tests", "benchmarks", "examples")
PROTOTYPE = re.compile(r"^[a-z][\w *]*?\b(colibri_\w+)\(", re.MULTILINE)
VARIABLE = re.compile(r'["\'](COLIBRI_[A-Z][A-Z0-9_]*)["\']')
COMMENT = re.compile(r"/\*.*?\*/|//.*")


def files(root: Path, folders: Iterable[str], *suffixes: str) -> list[Path]:
    """Source files below some folders, without what builds and tools leave there."""
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.suffix in suffixes)
    return sorted(p for p in found if "__pycache__" not in p.parts and p.name != "_ffi.py")


def read(path: Path) -> str:
    """Text of a source file."""
    return path.read_text(encoding="utf-8")


def lengths(root: Path, paths: Iterable[Path]) -> list[Size]:
    """Lines of each file."""
    return [Size(len(read(path).splitlines()), path.relative_to(root).as_posix()) for path in paths]


def functions(path: Path, name: str) -> Iterator[Size]:
    """Lines of each function of a C file: declarations begin, and bodies end with a brace, in column 0."""
    first, head, in_body = 0, "", False  # line and text of the declaration being read; is its brace open
    for number, raw in enumerate(read(path).splitlines(), 1):
        line = COMMENT.sub("", raw).rstrip()
        if in_body:
            if line.startswith("}"):
                if "(" in head and "=" not in head and first:
                    yield Size(number - first + 1, f"{name}:{first}")
                first, head, in_body = 0, "", False
            continue
        if not line or line[0] in "#/*}":
            first, head = 0, ""
            continue
        if not first and (line[0].isalpha() or line[0] == "_"):
            first = number
        head += line
        if line.endswith("{"):
            in_body = True
        elif line.endswith((";", "}")):
            first, head = 0, ""


def names(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[Size]:
    """How many different names a pattern finds in some files, and which."""
    found = sorted({name for path in paths if path.exists() for name in pattern.findall(read(path))})
    shown = ", ".join(found) if len(found) < 6 else f"{found[0]} ... {found[-1]}"
    return [Size(len(found), shown)]


def measure(root: Path) -> list[Row]:
    """Every budget with what the tree has."""
    core = files(root, ["core"], ".c", ".h")
    isa = [p for p in core if p.parent.name == "kernels" and p.stem in ISA_FILES]
    c_files = [p for p in files(root, C_FOLDERS, ".c", ".h") if p not in isa]
    python = files(root, PYTHON_FOLDERS, ".py")
    families = [p for p in python if p.parent.name == "families" and p.name != "__init__.py"]
    header = root / "include" / "colibri.h"
    bodies = [size for p in [*c_files, *isa] for size in functions(p, p.relative_to(root).as_posix())]
    variables = [*core, *(p for p in python if (root / "src") in p.parents)]
    total = Size(sum(size.found for size in lengths(root, core)), f"{len(core)} files")
    return [
        Row("colibri.h", 250, 400, lengths(root, [header] if header.exists() else [])),
        Row("C file", 350, 600, lengths(root, c_files)),
        Row("C function", 60, 60, bodies),
        Row("ISA file", 250, 400, lengths(root, isa)),
        Row("family module", 100, 160, lengths(root, families)),
        Row("Python module", 250, 450, lengths(root, [p for p in python if p not in families])),
        Row("core total", 6000, 6000, [total]),
        Row("exported functions", 25, 25, names([header], PROTOTYPE)),
        Row("environment variables", 4, 4, names(variables, VARIABLE)),
    ]


def report(rows: list[Row]) -> bool:
    """Prints the table, then whatever is past a target; whether nothing is past a hard limit."""
    print(f"{'lines or count':22} {'target':>6} {'hard':>6} {'found':>6}  largest")
    over: list[str] = []
    sound = True
    for row in rows:
        largest = max(row.sizes, default=Size(0, "none"))
        print(f"{row.name:22} {row.target:6} {row.hard:6} {largest.found:6}  {largest.where}")
        for size in sorted(row.sizes, reverse=True):
            past = next((limit for limit in (row.hard, row.target) if size.found > limit), None)
            if past is not None:
                word = "OVER THE HARD LIMIT" if past == row.hard else "over target"
                over.append(f"{word}: {row.name} {size.where}: {size.found} > {past}")
                sound = sound and past != row.hard
    for line in over:
        print(line)
    return sound


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints; 1 past a hard limit."""
    parser = argparse.ArgumentParser(description="Check the size budgets.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="source tree")
    return 0 if report(measure(parser.parse_args(arguments).root.resolve())) else 1


if __name__ == "__main__":
    sys.exit(main())
