"""`colibri report`: what the experts of a model did in a trace, as a page, pictures, tables, sentences.

Owns: options, finding the model that a trace was recorded with. Refuses: measuring and drawing
(colibri.analysis).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.report import note, resolve_model, step_bar
from colibri.errors import ModelIOError

if TYPE_CHECKING:
    from colibri.analysis.findings import Finding
    from colibri.analysis.trace import Trace
    from colibri.format import Container


def report_trace(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="What `colibri trace` wrote.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The page, such as report.html.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model of the trace, for texts and weights. None: the file of its name beside the trace "
            "or in this directory, or the demo.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Pictures too (colibri-moe[report]).", show_default=False),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The figures as tables too.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings and figures as one JSON object.")
    ] = False,
) -> None:
    """Show what the experts of a model did in a trace: findings in words, a page, pictures, tables
    (docs/MICROSCOPE.md)."""
    from colibri.analysis import page, pictures, tables
    from colibri.analysis.findings import by_kind, findings
    from colibri.analysis.measures import measure
    from colibri.analysis.trace import Trace
    from colibri.format import read_container

    if output is not None:
        page.check_file(output)
    if png is not None:
        pictures.check_library()
    opened = Trace(trace)
    container = _beside(opened) if model is None else read_container(resolve_model(model, {}))
    with step_bar("measuring") as bar:
        measures = measure(opened, container, bar)
    found = findings(measures)
    if container is None:
        note("texts of tokens and weights of experts are left out: --model names the model of the trace")
    for directory in filter(None, (png, csv)):
        _make(directory)
    if output is not None:
        page.write(measures, found, output)
    if png is not None:
        pictures.write(measures, png)
    if csv is not None:
        tables.write(measures, found, csv)
    if as_json:
        told = {"findings": [one.data() for one in found], **measures.data()}
        print(json.dumps(told, indent=1, ensure_ascii=False))
        return
    for first, others in by_kind(found):
        for one in first:
            print(f"{one.severity:<8} {one.text}")
        if others:
            print(f"{'':<8} … and {len(others)} more of this kind: {_layers(others)}")
    if not found:
        print("nothing stands out")


def _layers(found: list[Finding]) -> str:
    return "layers " + ", ".join(str(layer) for layer in sorted({one.layer or 0 for one in found}))


def _beside(trace: Trace) -> Container | None:
    """The model file, if it lies where one would look for it."""
    from colibri.analysis.rewriting import model_hash
    from colibri.cache import resolve
    from colibri.errors import ColibriError
    from colibri.format import read_container

    name = Path(str(trace.header.model.get("name", ""))).name
    places = [trace.path.resolve().parent / name, Path(name), resolve("demo", None)]
    for place in places:
        try:
            container = read_container(place) if place.is_file() else None
            if container is not None and model_hash(container) == trace.header.model.get("sha256"):
                return container
        except (ColibriError, OSError, ValueError):
            continue  # another file of this name
    return None


def _make(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise ModelIOError(f"Cannot make the directory {directory}: {error.strerror or error}.") from error
