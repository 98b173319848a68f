"""`colibri plan`: what a model will take and how fast it may be, before anything is taken.

Owns: options, tables, JSON. Refuses: counting and measuring (colibri.analysis.plan).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.report import (
    DenseType,
    ExpertPolicy,
    ExpertSlots,
    ExpertsType,
    KvType,
    MemoryLimit,
    OutputType,
    Prefetch,
    ReadLanes,
    Requantize,
    ResidencyKind,
    bytes_text,
    print_tables,
    resolve_model,
    step_bar,
)

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.analysis.plan import Plan


def plan_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    memory: MemoryLimit = None,
    context: Annotated[int | None, typer.Option(help="Most positions, prompt and answer together.")] = None,
    max_batch: Annotated[int, typer.Option(help="Sequences held at the same time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the physical cores this process may use.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Rows evaluated together; none: 1024.")] = None,
    residency: ResidencyKind = "auto",
    expert_slots: ExpertSlots = None,
    expert_policy: ExpertPolicy = None,
    lanes: ReadLanes = None,
    prefetch: Prefetch = None,
    kv_type: KvType = "f32",
    type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Weight type to convert a directory or a GGUF file to: f32, bf16, q8, q6, q4.",
        ),
    ] = None,
    experts: ExpertsType = None,
    dense: DenseType = None,
    output: OutputType = None,
    requantize: Requantize = False,
    measure: Annotated[
        bool, typer.Option(help="Measure disk and memory for a few seconds, to estimate speed.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model will take, by category, and how fast it may decode. A directory or a GGUF file is
    converted into the cache first, as `run` does."""
    from colibri.analysis.plan import plan
    from colibri.arguments import Opening

    Opening(  # wrong values are told before a model is converted
        threads=threads,
        context=context,
        max_batch=max_batch,
        chunk=chunk,
        residency=residency,
        memory=memory,
        expert_slots=expert_slots,
        expert_policy=expert_policy,
        lanes=lanes,
        prefetch=prefetch,
        kv_type=kv_type,
    )
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    file = resolve_model(model, types, requantize)
    with step_bar("measuring disk and memory" if measure else "planning"):
        found = plan(
            file,
            memory=memory,
            context=context,
            max_batch=max_batch,
            threads=threads,
            chunk=chunk,
            residency=residency,
            expert_slots=expert_slots,
            expert_policy=expert_policy,
            lanes=lanes,
            prefetch=prefetch,
            kv_type=kv_type,
            measure=measure,
        )
    if as_json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
        return
    slots = f", {found.expert_slots} of {found.n_experts} experts in slots" if found.expert_slots else ""
    print(f"{found.path.name}: {found.residency}{slots}")
    print_tables(_memory_table(found), *([_sizes_table(found)] if found.sizes else []))
    print("\n".join(_remarks(found)))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("memory", "", "bytes")

    def row(name: str, count: int | None) -> None:
        table.add_row(name, *(("not told", "") if count is None else (bytes_text(count), f"{count:,}")))

    for name, count in plan.categories.items():
        row(name.replace("_", " ").replace("kv", "KV"), count)
    table.add_section()
    row("planned", plan.planned_bytes)
    if plan.memory_limit is not None:
        row("limit", plan.memory_limit)
    row("least that works", plan.floor_bytes)
    row("available", plan.available_bytes)
    return table


def _sizes_table(plan: Plan) -> Table:
    table = _table("experts in slots", "slots", "memory", "hit rate", "tok/s")
    for size in plan.sizes:
        table.add_row(
            size.name,
            str(size.expert_slots),
            bytes_text(size.total_bytes),
            f"{size.hit_rate:.1%}",
            _rate(size.tok_per_s),
        )
    return table


def _rate(tok_per_s: float | None) -> str:
    return "-" if tok_per_s is None else f"{tok_per_s:.1f}"


def _remarks(plan: Plan) -> list[str]:
    """What the tables cannot say."""
    lines = []
    if plan.hit_rate is not None:
        lines.append(
            f"expected hit rate {plan.hit_rate:.1%}: routing as if by chance; trained routers give more"
        )
    if plan.n_experts:
        lines.append(
            f"a token uses {plan.experts_per_token} experts in all layers: with fewer slots there are no hits"
        )
    if plan.tok_per_s is not None and plan.speeds is not None:
        speeds = plan.speeds
        lines += [
            f"expected speed {plan.tok_per_s:.1f} tok/s at half of the context, one sequence, {plan.threads} "
            f"threads: {bytes_text(plan.bytes_per_token)} of memory a token, "
            f"{bytes_text(plan.expert_bytes_per_token)} of these experts",
            f"disk {speeds.disk_gb_per_s:.2f} GB/s ({speeds.disk_method}); memory "
            f"{speeds.memory_gb_per_s:.2f} GB/s",
        ]
    return lines
