"""What commands show on stderr, and the model argument that two of them share.

Owns: notes, sizes as text, the progress bar, resolving MODEL. Refuses: stdout, which belongs to results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

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

ResidencyKind = Annotated[
    str,
    typer.Option(
        metavar="KIND", help="mapped: weights in the page cache; resident: a private copy in huge pages."
    ),
]
PinThreads = Annotated[bool, typer.Option("--pin", help="Keep each thread on a physical core.")]


def note(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


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
    """A bar with bytes and the time left, on a terminal; without one, nothing."""
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
        task = bar.add_task(what, total=None)

        def update(done: int, total: int, _name: str) -> None:
            bar.update(task, completed=done, total=total)

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


def print_tables(*tables: object) -> None:
    """Tables of rich on stdout, as wide as they need where there is no terminal."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=200)
    for table in tables:
        console.print(table)


def resolve_model(model: str, types: Mapping[str, str | None]) -> Path:
    """The `.colibri` file that MODEL stands for; a checkpoint is converted once, with a bar. types: what was
    given for --type, --experts, --dense and --output."""
    from colibri.cache import resolve

    if not Path(model).is_dir() or model == "demo":
        for option, value in types.items():
            if value is not None:
                raise typer.BadParameter(
                    f"--{option} {value} has no effect: {model} is not a Hugging Face directory, so nothing "
                    "is converted"
                )
        return resolve(model)
    chosen = {option: value for option, value in types.items() if value is not None}
    with progress_bar("converting") as progress:
        return resolve(model, progress=progress, notify=note, **chosen)
