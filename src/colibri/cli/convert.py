"""`colibri convert`: a Hugging Face directory to a `.colibri` file.

Owns: options and the summary. Refuses: deciding what a checkpoint means (colibri.convert).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colibri.cli.report import (
    DenseType,
    ExpertsType,
    OutputType,
    bytes_text,
    for_command_line,
    note,
    progress_bar,
)


def convert_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Directory with config.json, *.safetensors and tokenizer.json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The .colibri file to write.", show_default=False)
    ],
    type: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Weight type: f32, bf16, q8 (default) or q4.", show_default=False),
    ] = None,
    experts: ExpertsType = None,
    dense: DenseType = None,
    output: OutputType = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Longest text the file is for (default: as config.json says).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a checkpoint into one file that is enough to run. Ctrl-C leaves nothing behind."""
    from colibri.convert import convert

    try:
        with progress_bar(source.name) as progress:
            report = convert(
                source,
                out,
                type,
                experts=experts,
                dense=dense,
                output=output,
                context=context,
                progress=progress,
            )
    except KeyboardInterrupt:
        note("colibri: stopped; nothing was written")
        raise typer.Exit(130) from None
    for remark in report.notes:
        note(f"note: {for_command_line(remark, {'context': '--context'})}")
    note(f"{report.path}: {bytes_text(report.bytes)}, {report.type}, {report.seconds:.1f} s")
