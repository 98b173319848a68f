"""`colibri profile`: where a model's time goes, by phase, layer and expert.

Owns: options, tables, JSON. Refuses: measuring, drawing and writing the chart (colibri.analysis).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.report import (
    ExpertPolicy,
    ExpertSlots,
    KvType,
    LockMemory,
    MemoryLimit,
    NumaNode,
    PinThreads,
    Prefetch,
    ReadLanes,
    ResidencyKind,
    bytes_text,
    counted,
    note,
    print_tables,
    resolve_model,
)

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.analysis.instructions import Instructions
    from colibri.analysis.phases import Part, Report

_SHOWN = 3  # experts of a layer


def profile_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of the prompt; none: 64, or what the model has positions for."),
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Tokens decoded after it; none: 64, or half of the positions.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the number that the engine chooses.")
    ] = None,
    memory: MemoryLimit = None,
    residency: ResidencyKind = "auto",
    expert_slots: ExpertSlots = None,
    expert_policy: ExpertPolicy = None,
    lanes: ReadLanes = None,
    prefetch: Prefetch = None,
    kv_type: KvType = "f32",
    pin: PinThreads = False,
    numa: NumaNode = None,
    mlock: LockMemory = False,
    chart: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Also draw the times into this file; an SVG is replaced."),
    ] = None,
    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions",
            help="Also count instructions of a decoded token, with perf or valgrind (slow), on one thread.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure time by phase, layer and expert, in prefill and in decode."""
    from colibri.analysis import chart as charts
    from colibri.analysis import instructions as counter
    from colibri.analysis import phases, runs
    from colibri.arguments import Opening

    # Everything that can be wrong is told before the first measurement.
    opening = Opening(
        threads=threads,
        memory=memory,
        residency=residency,
        expert_slots=expert_slots,
        expert_policy=expert_policy,
        lanes=lanes,
        prefetch=prefetch,
        kv_type=kv_type,
        pin=pin,
        numa=numa,
        mlock=mlock,
    )
    runs.lengths(1 << 30, prompt, decode, default_prompt=1, default_decode=1)
    if chart is not None:
        charts.check_file(chart)
    if instructions:
        counter.tools()
    path = resolve_model(model, {})
    report = phases.profile(path, opening, prompt, decode)
    tokens = min(report.parts[1].timed.tokens, 8)
    if as_json:
        more = {"instructions": counter.count(path, tokens).data()} if instructions else {}
        print(json.dumps(report.data() | more, indent=1, ensure_ascii=False))
    else:
        print_tables(_phase_table(report), *map(_layer_table, report.parts))
    if chart is not None:
        charts.draw(report, chart)
        note(f"{chart}: written")
    if instructions and not as_json:
        print_tables(_instruction_table(counter.count(path, tokens)))


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")


def _phase_table(report: Report) -> Table:
    """Microseconds a token, share and waiting of each phase, prefill beside decode."""
    threads = counted(report.threads, "thread")
    slots = f", {report.expert_slots} experts in slots" if report.expert_slots else ""
    where = f"{threads}, {report.isa}, {report.residency}{slots}"
    table = _table(f"{report.path.name}, {where}: time by phase, us per token")
    table.add_column("phase")
    for part in report.parts:
        for name in (f"{part.name} {part.timed.tokens}", "share", "of it waiting"):
            table.add_column(name, justify="right")
    for at, phase in enumerate(report.parts[0].timed.profile.phases):
        cells: list[str] = []
        for part in report.parts:
            profile = part.timed.profile
            ns, waited = int(profile.phase_ns[:, at].sum()), int(profile.wait_ns[:, at].sum())
            cells += _cells(ns, waited, part)
        table.add_row(phase, *cells)
    outside = [cell for part in report.parts for cell in (*_cells(part.outside_engine_ns, 0, part)[:2], "")]
    table.add_row("outside the engine", *outside)
    table.add_section()
    cells = []
    for part in report.parts:
        cells += _cells(part.ns, int(part.timed.profile.wait_ns.sum()), part)
    table.add_row("all", *cells)
    table.add_row("tok/s", *_first_of_three(f"{p.timed.tokens / p.timed.seconds:.1f}" for p in report.parts))
    texts = (f"{p.data()['outside_matrices_us_per_token']:.1f}" for p in report.parts)
    table.add_row("in the engine, outside matrices", *_first_of_three(texts))
    if report.residency == "streamed":
        table.add_section()
        traffic = [part.timed.traffic for part in report.parts]
        table.add_row("found in slots", *_first_of_three(f"{one.hit_rate:.1%}" for one in traffic))
        reads = (bytes_text(round(one.bytes_per_token)) for one in traffic)
        table.add_row("read from disk per token", *_first_of_three(reads))
        waits = (f"{1e6 * one.wait_seconds / one.tokens:.1f}" for one in traffic)
        table.add_row("waited for it", *_first_of_three(waits))
        table.add_row("prefetch", *_first_of_three(one.prefetch.state for one in traffic))
    return table


def _cells(ns: int, waited: int, part: Part) -> list[str]:
    return [f"{ns / part.timed.tokens / 1e3:.1f}", _share(ns, part.ns), _share(waited, ns)]


def _first_of_three(texts: Iterable[str]) -> list[str]:
    return [cell for text in texts for cell in (text, "", "")]


def _share(a: int, b: int) -> str:
    return f"{a / b:.1%}" if b else "-"


def _layer_table(part: Part) -> Table:
    """Layers with their most expensive experts."""
    profile, tokens = part.timed.profile, part.timed.tokens
    experts = "; experts: share of the layer's time (rows)" if profile.expert_ns.size else ""
    table = _table(f"{part.name}: time by layer, us per token{experts}")
    for name in ("layer", "time", "share", "of it waiting", "largest phase"):
        table.add_column(name, justify="right" if name != "largest phase" else "left")
    if profile.expert_ns.size:
        table.add_column("slowest experts")
        table.add_column("most used experts")
    traffic = part.timed.traffic
    if traffic.uses:
        table.add_column("found in slots", justify="right")
        table.add_column("waited for reads", justify="right")
    total = int(profile.phase_ns.sum())
    for row, phase_ns in enumerate(profile.phase_ns):
        ns = int(phase_ns.sum())
        name = str(row) if row < len(profile.phase_ns) - 1 else "outside"
        waited = _share(int(profile.wait_ns[row].sum()), ns)
        largest = profile.phases[int(phase_ns.argmax())]
        cells = [name, f"{ns / tokens / 1e3:.1f}", _share(ns, total), waited, largest]
        if profile.expert_ns.size:
            cells += _experts(part, row) if name != "outside" else ["", ""]
        if traffic.uses and name != "outside":
            hits, misses = int(traffic.hits[row]), int(traffic.misses[row])
            cells += [_share(hits, hits + misses), f"{int(traffic.wait_ns[row]) / tokens / 1e3:.1f}"]
        table.add_row(*cells)
    return table


def _experts(part: Part, layer: int) -> list[str]:
    slowest = part.experts(layer)
    used = sorted(slowest, key=lambda one: (-one.rows, one.number))
    return [
        ", ".join(f"{one.number}: {one.share:.1%} ({one.rows})" for one in order[:_SHOWN])
        for order in (slowest, used)
    ]


def _instruction_table(found: Instructions) -> Table:
    table = _table(f"instructions of a decoded token, by {found.tool}: {found.note}")
    table.add_column("function")
    table.add_column("instructions", justify="right")
    table.add_column("share", justify="right")
    for name, own in found.functions:
        table.add_row(name, f"{own:,.0f}", f"{own / found.per_token:.1%}" if found.per_token else "-")
    if found.functions and found.per_token:
        table.add_row("others", f"{found.others:,.0f}", f"{found.others / found.per_token:.1%}")
    table.add_row("all", f"{found.per_token:,.0f}", "100.0%")
    return table
