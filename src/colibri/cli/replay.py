"""`colibri replay`: what caches of several sizes and policies would have read for a trace.

Owns: options, tables, JSON. Refuses: simulating (colibri.analysis).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from colibri.cli.report import bytes_text, counted, print_tables, step_bar

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.analysis.replay import Demand, Outcome
    from colibri.analysis.trace import Trace


def replay_trace(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="What `colibri trace` wrote.", show_default=False)
    ],
    slots: Annotated[
        str,
        typer.Option(
            metavar="N|P%[,...]", help="Sizes of the cache: experts, or a share of all experts of all layers."
        ),
    ] = "10%,25%,50%",
    policy: Annotated[
        str, typer.Option(metavar="NAME[,...]", help="lru, lfru; Belady's optimum is always beside them.")
    ] = "lru,lfru",
    chunk: Annotated[
        int | None,
        typer.Option(
            help="As if at most N tokens had been evaluated together; 1: as in decoding. None: as recorded."
        ),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Hit rates by layer too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate expert caches on a recorded trace: hit rates and bytes read, beside the optimum."""
    from colibri.analysis import replay as simulator
    from colibri.analysis.trace import Trace

    policies = list(dict.fromkeys(name.strip() for name in policy.split(",")))
    policies = [name for name in policies if name != "belady"] + ["belady"]
    opened = Trace(trace)
    counts = simulator.slot_counts(slots.split(","), sum(opened.header.n_experts))
    found = simulator.demand(opened, chunk)
    with step_bar("replaying") as bar:
        outcomes = simulator.replay(found, list(dict.fromkeys(counts)), policies, bar)
    if as_json:
        print(json.dumps(_as_data(opened, found, chunk, layers, outcomes), indent=1, ensure_ascii=False))
        return
    print(_head(opened, found))
    print_tables(_table(found, outcomes), *(_layer_tables(opened, outcomes) if layers else ()))


def _moe_layers(trace: Trace) -> list[int]:
    return [layer for layer, experts in enumerate(trace.header.n_experts) if experts]


def _as_data(
    trace: Trace, found: Demand, chunk: int | None, layers: bool, outcomes: list[Outcome]
) -> dict[str, object]:
    n = found.accesses.n_experts
    numbers = _moe_layers(trace) if layers else None
    return {
        "trace": str(trace.path),
        "model": trace.header.model,
        "chunk": chunk,
        "tokens": found.tokens,
        "steps": len(found.accesses.ends),
        "experts": n,
        "expert_bytes": int(found.expert_bytes.sum()),
        "uses": int(found.uses.sum()),
        "outcomes": [{"share": one.slots / n} | one.data(numbers) for one in outcomes],
    }


def _head(trace: Trace, found: Demand) -> str:
    experts, layers = found.accesses.n_experts, len(_moe_layers(trace))
    uses = int(found.uses.sum())
    return (
        f"{trace.path}: {trace.header.model.get('name', 'a model')}, {counted(found.tokens, 'token')} in "
        f"{counted(len(found.accesses.ends), 'step')}; {experts} experts in {counted(layers, 'layer')}, "
        f"{bytes_text(int(found.expert_bytes.sum()))}; {uses / found.tokens:.1f} uses per token"
    )


def _by_size(outcomes: list[Outcome]) -> dict[int, list[Outcome]]:
    sizes: dict[int, list[Outcome]] = {}
    for one in outcomes:
        sizes.setdefault(one.slots, []).append(one)
    return sizes


def _new_table(title: str, columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _table(found: Demand, outcomes: list[Outcome]) -> Table:
    """A row for each size: hit rate and bytes read per token of every policy."""
    names = list(dict.fromkeys(one.policy for one in outcomes))
    columns = ["slots", "of all", *(f"{name} hits" for name in names), *(f"{name} reads" for name in names)]
    table = _new_table("hit rate, and bytes read per token", columns)
    for slots, row in _by_size(outcomes).items():
        rates = (f"{one.hit_rate:.1%}" for one in row)
        reads = (bytes_text(round(one.bytes_per_token)) for one in row)
        table.add_row(str(slots), f"{slots / found.accesses.n_experts:.0%}", *rates, *reads)
    return table


def _layer_tables(trace: Trace, outcomes: list[Outcome]) -> list[Table]:
    """For each size the hit rates by layer."""
    tables = []
    for slots, row in _by_size(outcomes).items():
        table = _new_table(
            f"{counted(slots, 'slot')}: hit rate by layer", ["layer", *(one.policy for one in row)]
        )
        for at, layer in enumerate(_moe_layers(trace)):
            rates = (one.uses[at] and 1 - one.misses[at] / one.uses[at] for one in row)
            table.add_row(str(layer), *(f"{float(rate):.1%}" for rate in rates))
        tables.append(table)
    return tables
