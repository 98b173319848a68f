"""Files of texts that commands are given.

Owns: reading them, the options that say which, and shares. Refuses: JSON Lines (analysis.recording)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.errors import ArgumentError, ModelIOError

if TYPE_CHECKING:
    from colibri.analysis.evaluation import Passage

TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="FILE", help="A file with one text; may be given often."),
]
LineFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="A file with a JSON object a line, each with a text; may be given often."
    ),
]
TextField = Annotated[str, typer.Option(help="Where the text of such an object is.")]
SourceField = Annotated[
    str | None,
    typer.Option(help="Where its source is, for a model with an encoder.", show_default=False),
]


def passages(
    text: Sequence[Path] | None, jsonl: Sequence[Path] | None, field: str, source_field: str | None
) -> list[Passage]:
    """All texts, in the order of the files."""
    from colibri.analysis.evaluation import Passage
    from colibri.analysis.recording import texts_of_lines

    if source_field is not None and not jsonl:
        raise ArgumentError(f"source_field={source_field!r} has no effect without --jsonl")
    found = [Passage(read_text(path), None, str(path)) for path in text or ()]
    for path in jsonl or ():
        lines = read_file(path).splitlines()
        texts = list(texts_of_lines(path, lines, field, ""))
        if source_field is None:
            found += [Passage(one.text, None, one.where) for one in texts]
        else:
            sources = texts_of_lines(path, lines, source_field, "")
            found += [Passage(a.text, b.text, a.where) for a, b in zip(texts, sources, strict=True)]
    if not found:
        raise typer.BadParameter("no text: give files with --text or --jsonl")
    return found


def file_passages(path: Path, field: str, source_field: str | None) -> list[Passage]:
    """Of one file: JSON Lines if its name ends with .jsonl, else one text."""
    if path.suffix == ".jsonl":
        return passages(None, [path], field, source_field)
    return passages([path], None, field, None)


def share(name: str, given: str) -> float:
    """ "75%" is 0.75."""
    with contextlib.suppress(ValueError):
        if given.endswith("%") and 0 < (found := float(given[:-1]) / 100) < 1:
            return found
    raise ArgumentError(f"{name}: expected a share above 0% and below 100%, such as 75%, found {given!r}")


def read_text(path: Path) -> str:
    data = read_file(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{path}: expected UTF-8, found byte {data[error.start]:#04x} at offset {error.start}"
        ) from None


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
