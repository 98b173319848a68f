"""What commands show on stderr, and the model argument that two of them share.

Owns: notes, sizes as text, the progress bar, resolving MODEL. Refuses: stdout, which belongs to results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

Progress = Callable[[int, int, str], object]  # done bytes, total bytes, name of the entry


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


def resolve_model(model: str, type: str | None) -> Path:
    """The `.colibri` file that MODEL stands for; a checkpoint is converted once, with a bar."""
    from colibri.cache import resolve

    if not Path(model).is_dir() or model == "demo":
        if type is not None:
            raise typer.BadParameter(
                f"--type {type} has no effect: {model} is not a Hugging Face directory, so nothing is "
                "converted"
            )
        return resolve(model)
    with progress_bar("converting") as progress:
        return resolve(model, type or "q8", progress=progress, notify=note)
