"""What commands show on stderr, and the model argument that two of them share.

Owns: notes, sizes as text, the progress bar, resolving MODEL. Refuses: stdout, which belongs to results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int, str], object]  # done bytes, total bytes, name of the entry

ExpertsType = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Another type for routed experts.", show_default=False)
]
DenseType = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Another type for attention, shared experts and dense feed-forward.",
        show_default=False,
    ),
]
OutputType = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Another type for embedding and output head.", show_default=False),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize", help="Round weights of GGUF that are below 4 bits or not linear a second time."
    ),
]

MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Most that this process may hold, such as 4GiB; what does not fit is streamed from disk.",
        show_default=False,
    ),
]
ResidencyKind = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="mapped: weights in the page cache; resident: a private copy in huge pages; streamed: experts "
        "are read when they are chosen; auto: mapped where all fits, else streamed.",
    ),
]
ExpertSlots = Annotated[
    int | None,
    typer.Option(help="Streamed experts that are held at a time; none: as many as memory allows."),
]
ExpertPolicy = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY", help="Whose slot another expert takes: lfru (default), lru.", show_default=False
    ),
]
ReadLanes = Annotated[int | None, typer.Option("--lanes", help="Reads of experts at the same time; none: 4.")]
Prefetch = Annotated[
    bool | None,
    typer.Option(
        "--prefetch/--no-prefetch",
        help="Read streamed experts ahead that the next layer is likely to choose; none: where it proves "
        "quicker. Of mapped weights: read all of them ahead; none: yes.",
        show_default=False,
    ),
]
KvType = Annotated[
    str,
    typer.Option(
        "--kv-type", metavar="TYPE", help="Of the KV cache: f32, or f16, which is rounded and half as large."
    ),
]
PinThreads = Annotated[
    bool, typer.Option("--pin", help="Keep each thread but the first on a physical core of its own.")
]
NumaNode = Annotated[
    int | None,
    typer.Option("--numa", metavar="NODE", help="Run threads on this NUMA node and take memory there."),
]
LockMemory = Annotated[
    bool, typer.Option("--mlock", help="Never let the system swap out or drop what this process uses.")
]


def note(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """ "1 turn", "2 turns" """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def for_command_line(text: str, options: Mapping[str, str]) -> str:
    """An error's text with options in the place of Python's parameters: "threads: expected" and "pin=True"
    become "--threads: expected" and "--pin". options: those of the command, by parameter."""

    def first(match: re.Match[str]) -> str:
        return options.get(match[0], match[0])

    def assigned(match: re.Match[str]) -> str:
        name, value = options.get(match[1]), match[2].strip("'\"")
        if name is None:
            return match[0]
        if value in ("True", "False"):
            return name if value == "True" else name.replace("--", "--no-", 1)
        return f"{name} {value}"

    text = re.sub(r"^[a-z_]+(?=:| has no effect)", first, text)
    return re.sub(r"\b([a-z_]+)=('[^']*'|[\w.-]+)", assigned, text)


def bytes_text(count: int) -> str:
    """1536 becomes "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar with bytes and the time left, on a terminal, from the first progress on; without one, nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def update(done: int, total: int, _name: str) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield update


@contextmanager
def step_bar(what: str) -> Iterator[Progress]:
    """A bar that counts steps and names the current one, on a terminal; without one, nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what}: {name}")

        yield update


def print_tables(*tables: Table) -> None:
    """Tables of rich on stdout, as wide as they need where there is no terminal."""
    from rich.console import Console

    terminal = Console(markup=False, highlight=False, emoji=False)
    for table in tables:
        for column in table.columns:
            # No figure and no word is ever cut, whatever that costs in width.
            whole = column.justify == "right"
            texts = (piece for cell in column.cells for piece in ([cell] if whole else str(cell).split()))
            column.min_width = max(map(len, map(str, texts)), default=0)
        width = terminal.width if terminal.is_terminal else 200
        width = max(width, terminal.measure(table, options=terminal.options.update(max_width=1000)).minimum)
        Console(markup=False, highlight=False, emoji=False, width=width).print(table)


def resolve_model(model: str, types: Mapping[str, str | None], requantize: bool = False) -> Path:
    """The `.colibri` file that MODEL stands for; a checkpoint is converted once, with a bar. types: what was
    given for --type, --experts, --dense and --output."""
    from colibri.cache import resolve

    with progress_bar("converting") as progress:
        return resolve(
            model,
            types.get("type"),
            progress,
            note,
            experts=types.get("experts"),
            dense=types.get("dense"),
            output=types.get("output"),
            requantize=requantize,
        )
