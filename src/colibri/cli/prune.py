"""`colibri prune`: a model without the experts that matter least for given texts.

Owns: options and their combinations, bars, the summary. Refuses: choosing (colibri.analysis.pruning)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from colibri.cli.evaluate import measured
from colibri.cli.report import MemoryLimit, bytes_text, note, progress_bar, resolve_model, step_bar
from colibri.cli.texts import LineFiles, SourceField, TextField, TextFiles, file_passages, passages, share
from colibri.errors import ArgumentError


def prune_model(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help='A .colibri file, or "demo".', show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The .colibri file to write.", show_default=False
        ),
    ],
    keep: Annotated[
        str | None, typer.Option(metavar="SHARE", help="How many experts stay, of each layer: 75%.")
    ] = None,
    layer_counts: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Instead: how many stay in each layer that has experts."),
    ] = None,
    across_layers: Annotated[
        bool, typer.Option("--across-layers", help="With --keep: of all layers together, not of each.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judge by a trace of the model (colibri trace).")
    ] = None,
    text: TextFiles = None,
    jsonl: LineFiles = None,
    field: TextField = "text",
    source_field: SourceField = None,
    saliency: Annotated[
        str | None,
        typer.Option(
            help="reap: mean of weight times size of output (default with texts); mass: sum of weights "
            "(default with a trace); count: how often an expert is chosen."
        ),
    ] = None,
    eval: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show perplexity on this text, or .jsonl, before and after."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the physical cores this process may use.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Most positions of a window of text.")] = None,
    memory: MemoryLimit = None,
) -> None:
    """Remove the experts that matter least, by a trace or by texts (docs/PRUNING.md)."""
    from colibri.analysis import pruning
    from colibri.analysis.rewriting import check_output
    from colibri.analysis.trace import Trace
    from colibri.arguments import Opening
    from colibri.aside import check_place
    from colibri.engine import load
    from colibri.format import read_container

    opening: dict[str, Any] = {"threads": threads, "context": context, "memory": memory}
    by_text = bool(text or jsonl)
    if by_text == (trace is not None):
        raise typer.BadParameter("give either --trace or texts (--text, --jsonl) to judge experts by")
    if (keep is None) == (layer_counts is None):
        raise typer.BadParameter("give either --keep or --layer-counts")
    if across_layers and keep is None:
        raise typer.BadParameter("--across-layers has no effect without --keep")
    if not by_text and eval is None:
        for name, value in opening.items():
            if value is not None:
                raise ArgumentError(f"{name}={value!r} has no effect: with a trace, no model is evaluated")
    kind = saliency or ("reap" if by_text else "mass")
    if kind not in pruning.SALIENCIES:
        raise ArgumentError(f"saliency: expected one of {', '.join(pruning.SALIENCIES)}, found {kind!r}")
    Opening(**opening)
    part = None if keep is None else share("keep", keep)
    check_place(output)
    texts = passages(text, jsonl, field, source_field) if by_text else []
    judged = [] if eval is None else file_passages(eval, field, source_field)
    file = resolve_model(model, {})
    check_output(file, output)
    container = read_container(file)
    config, before = container.config, None
    if not any(config["n_experts"]):
        raise ArgumentError(f"{file} has no routed experts, so there is nothing to remove")
    counts = None if part is None else pruning.layer_counts(config, part)
    if layer_counts is not None:
        counts = pruning.check_counts(config, _numbers(layer_counts))
    assert counts is not None
    uses = None if trace is None else pruning.uses_of_trace(Trace(trace), container)
    if uses is not None:
        uses.saliency(kind)  # what a trace cannot say is told before anything is evaluated
    try:
        if by_text or judged:
            with load(file, **opening) as opened:
                if by_text:
                    with step_bar("watching experts") as bar:
                        uses, _ = pruning.uses_of_texts(
                            opened, texts, lambda done, total: bar(done, total, file.name)
                        )
                before = measured(opened, judged) if judged else None
        assert uses is not None
        importance = uses.saliency(kind)
        if across_layers:
            assert part is not None
            counts = pruning.counts_across(config, part, importance)
        kept = pruning.chosen(config, counts, importance)
        with progress_bar(output.name) as progress:
            pruned = pruning.prune(file, output, kept, {"saliency": kind}, progress)
        after = None
        if before is not None:
            with load(output, **opening) as opened:
                after = measured(opened, judged)
    except KeyboardInterrupt:
        note("colibri: stopped")
        raise typer.Exit(130) from None
    gone = sum(map(len, pruned.removed.values()))
    left = ", ".join(str(n) for n in pruned.n_experts if n)
    print(f"removed          {gone} of {gone + sum(pruned.n_experts)} experts; left by layer: {left}")
    print(f"bytes            {bytes_text(pruned.bytes_before)} before, {bytes_text(pruned.bytes)} after")
    if before is not None and after is not None:
        print(f"perplexity       {before.perplexity:.4f} before, {after.perplexity:.4f} after")


def _numbers(given: str) -> list[int]:
    try:
        return [int(one) for one in given.split(",")]
    except ValueError:
        raise ArgumentError(f"layer_counts: expected numbers such as 12,12,8, found {given!r}") from None
