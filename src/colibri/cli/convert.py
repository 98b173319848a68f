"""`colibri convert`: a Hugging Face directory or GGUF file to a `.colibri` file, or the account of what it
would become.

Owns: options and the summary. Refuses: deciding what a checkpoint means (colibri.convert).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from colibri.cli.explain import as_text, defaults_line
from colibri.cli.report import (
    DenseType,
    ExpertsType,
    OutputType,
    Requantize,
    bytes_text,
    for_command_line,
    note,
    progress_bar,
    resolve_model,
)
from colibri.cli.texts import file_passages
from colibri.errors import ArgumentError


def convert_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Directory with config.json, *.safetensors and tokenizer.json; or a GGUF file.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="The .colibri file to write; none with --explain.", show_default=False
        ),
    ] = None,
    type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Weight type: f32, bf16, q8 (default), q6 or q4; of GGUF by default as stored.",
            show_default=False,
        ),
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
    requantize: Requantize = False,
    expert_bits: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Types expert by expert: a plan of colibri bits; SOURCE may be .colibri.",
        ),
    ] = None,
    eval: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --expert-bits: perplexity on this text, or .jsonl, before and after."
        ),
    ] = None,
    explained: Annotated[
        bool,
        typer.Option(
            "--explain", help="Write no file; show what each key and each tensor of SOURCE would become."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --explain: print JSON.")] = False,
) -> None:
    """Convert a checkpoint into one file that is enough to run. Ctrl-C leaves nothing behind.

    Matrices of a GGUF file stay as they are stored where a type here holds them without loss.
    """
    from colibri.convert import convert, explain
    from colibri.expert_bits import read_plan
    from colibri.format import is_container

    if explained and expert_bits is not None:
        raise ArgumentError("expert_bits has no effect with --explain")
    if eval is not None and expert_bits is None:
        raise ArgumentError("eval has no effect without --expert-bits")
    if explained:
        found = explain(
            source, type, experts=experts, dense=dense, output=output, context=context, requantize=requantize
        )
        print(json.dumps(found.data(), indent=1) if as_json else "\n".join(as_text(found)))
        return
    if as_json:
        raise ArgumentError("as_json has no effect without --explain")
    if out is None:
        raise ArgumentError("OUT is missing: give the name of the .colibri file to write, or --explain")
    plan = None if expert_bits is None else read_plan(expert_bits)
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    if plan is not None and is_container(source):
        others = types | {"context": context, "requantize": requantize or None}
        for name, value in others.items():
            if value is not None:
                raise ArgumentError(f"{name}={value!r} has no effect on a .colibri file: only experts change")
        _requantize(source, out, plan, eval)
        return
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
                requantize=requantize,
                progress=progress,
                expert_bits=plan,
            )
    except KeyboardInterrupt:
        note("colibri: stopped; nothing was written")
        raise typer.Exit(130) from None
    remarks = report.notes + ([defaults_line(report.defaults_used)] if report.defaults_used else [])
    for remark in remarks + report.error_notes():
        note(f"note: {for_command_line(remark, {'context': '--context'})}")
    note(f"{report.path}: {bytes_text(report.bytes)}, {report.type}, {report.seconds:.1f} s")
    if eval is not None:
        _compare(resolve_model(str(source), types, requantize), report.path, eval)


def _requantize(source: Path, out: Path, plan: Mapping[str, list[str]], eval: Path | None) -> None:
    from colibri.analysis.bits import requantize

    try:
        with progress_bar(source.name) as progress:
            size = requantize(source, out, plan, progress)
    except KeyboardInterrupt:
        note("colibri: stopped; nothing was written")
        raise typer.Exit(130) from None
    note(f"{out}: {bytes_text(size)}, was {bytes_text(source.stat().st_size)}")
    if eval is not None:
        _compare(source, out, eval)


def _compare(before: Path, after: Path, texts: Path) -> None:
    """Perplexity of both; before: with one type for all experts."""
    from colibri.cli.evaluate import measured
    from colibri.engine import load

    passages, found = file_passages(texts, "text", None), []
    for path in (before, after):
        with load(path) as model:
            found.append(measured(model, passages).perplexity)
    print(f"perplexity       {found[0]:.4f} before, {found[1]:.4f} after")
