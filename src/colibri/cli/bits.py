"""`colibri bits`: proposes the weight type of each expert, under a budget, by a trace.

Owns: options, the bar, the summary. Refuses: choosing (colibri.analysis.bits)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from colibri.cli.report import bytes_text, resolve_model, step_bar
from colibri.errors import ArgumentError


def propose_bits(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='A .colibri file, or "demo".', show_default=False)
    ],
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="A trace of the model (colibri trace).", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The plan, such as plan.json.", show_default=False
        ),
    ],
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of the whole file, such as 4.8M.")
    ] = None,
    average: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="Instead: most bits of an expert's weight on average."),
    ] = None,
) -> None:
    """Propose more bits for the experts that are used most (docs/PRUNING.md); colibri convert --expert-bits
    follows the plan."""
    from colibri.analysis.bits import propose
    from colibri.analysis.pruning import uses_of_trace
    from colibri.analysis.trace import Trace
    from colibri.aside import check_place, write_whole
    from colibri.format import read_container
    from colibri.memory import bytes_of

    if (budget is None) == (average is None):
        raise typer.BadParameter("give either --budget or --average")
    if average is not None and not 0 < average <= 32:
        raise ArgumentError(f"average: expected bits above 0, at most 32, found {average}")
    size = None if budget is None else bytes_of("budget", budget)
    check_place(output)
    container = read_container(resolve_model(model, {}))
    masses = uses_of_trace(Trace(trace), container).masses
    with step_bar("measuring errors") as bar:
        found = propose(container, masses, budget=size, average=average, progress=bar)
    write_whole(output, json.dumps(found.as_json(container), indent=1) + "\n")
    counts = Counter(type for types in found.types.values() for type in types)
    print("experts          " + ", ".join(f"{n} {type}" for type, n in sorted(counts.items(), reverse=True)))
    print(f"bits a weight    {found.average:.2f} on average, of experts")
    print(f"bytes            {bytes_text(found.bytes_before)} before, {bytes_text(found.bytes)} after")
