"""`colibri bench`: how fast a model runs on this machine, and how near that is to what the machine can do.

Owns: options and their combinations, the report as a table and as JSON. Refuses: measuring
(colibri.analysis).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.report import (
    DenseType,
    ExpertPolicy,
    ExpertSlots,
    ExpertsType,
    KvType,
    LockMemory,
    MemoryLimit,
    NumaNode,
    OutputType,
    PinThreads,
    Prefetch,
    ReadLanes,
    Requantize,
    ResidencyKind,
    bytes_text,
    counted,
    note,
    print_tables,
    progress_bar,
    resolve_model,
    step_bar,
)

if TYPE_CHECKING:
    from rich.table import Table

    from colibri.analysis.bench import Plan, Report

_Row = tuple[str, Callable[[dict[str, Any]], str]]


def bench_model(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".'
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of MODEL, random weights of a known size, written once into the cache: olmoe-7b, "
            "qwen3-moe-1b, mixtral-tiny.",
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of the prompt; none: 512, or what the model has positions for."),
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Tokens decoded after it; none: 64, or half of the positions.")
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Thread counts; none: the one that the engine chooses.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Turns of each thread count, interleaved.")] = 5,
    type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Weight type of a directory, a GGUF file or --synthetic: f32, bf16, q8, q6 or q4.",
        ),
    ] = None,
    experts: ExpertsType = None,
    dense: DenseType = None,
    output: OutputType = None,
    requantize: Requantize = False,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill, decode, start and memory; every turn is a fresh process."""
    from colibri.analysis import bench, machine

    chosen: dict[str, Any] = {
        "memory": memory,
        "residency": residency,
        "expert_slots": expert_slots,
        "expert_policy": expert_policy,
        "lanes": lanes,
        "prefetch": prefetch,
        "kv_type": None if kv_type == "f32" else kv_type,
        "pin": pin or None,
        "numa": numa,
        "mlock": mlock or None,
    }
    options = {name: value for name, value in chosen.items() if value is not None}
    plan = bench.Plan(prompt, decode, _thread_counts(threads), repeat, options)
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    path = _model_file(model, synthetic, types, requantize, plan)
    if machine.is_busy():
        note(
            f"note: the machine is not quiet: load {machine.load():.1f} on {machine.cpus()} processors. Take "
            "the figures as a trial only."
        )
    with step_bar("measuring") as progress:
        report = bench.bench(path, plan, progress)
    if as_json:
        print(json.dumps(report.data(), indent=1, ensure_ascii=False))
        return
    print_tables(_table(report))
    print("\n".join(_remarks(report)))


def _thread_counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise typer.BadParameter(f"--threads: expected numbers with commas between them, found {text!r}")
    return [int(word) for word in words]


def _model_file(
    model: str | None, synthetic: str | None, types: dict[str, str | None], requantize: bool, plan: Plan
) -> Path:
    if synthetic is None:
        if model is None:
            raise typer.BadParameter("nothing to measure: give a MODEL, or a size with --synthetic NAME")
        return resolve_model(model, types, requantize)
    if requantize:
        raise typer.BadParameter("--requantize has no effect with --synthetic: leave it out")
    if model is not None:
        raise typer.BadParameter(
            f"--synthetic {synthetic} and MODEL {model} are two models: give one of them"
        )
    from colibri.analysis.synthetic import cached, shape_of
    from colibri.entries import weight_types

    plan.lengths(shape_of(synthetic).context_length)
    chosen = weight_types(**types)
    with progress_bar(f"writing {synthetic}") as progress:
        return cached(synthetic, chosen, progress=progress, notify=note)


def _spread(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    def text(cell: dict[str, Any]) -> str:
        low, high = cell[f"{name}_min"], cell[f"{name}_max"]
        return f"{cell[name]:{form}} ({low:{form}} - {high:{form}})"

    return text


def _streaming(part: str, name: str, text: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda cell: text(cell["streaming"][part][name])


_ROWS: Sequence[_Row] = (
    ("prefill, tok/s", _spread("prefill_tok_per_s", ".1f")),
    ("decode, tok/s", _spread("decode_tok_per_s", ".2f")),
    ("first token after the prompt, ms", lambda c: f"{c['prompt_to_first_token_ms']:.1f}"),
    ("warm start: open to first token, ms", lambda c: f"{c['start_warm_ms']['open_to_first_token']:.1f}"),
    ("  with interpreter and imports, ms", lambda c: f"{c['start_warm_ms']['process_to_first_token']:.1f}"),
    ("read per decoded token", lambda c: bytes_text(round(c["decode_bytes_per_token"]))),
    ("  that is, GB/s", _spread("decode_gb_per_s", ".2f")),
    ("the machine reads, GB/s", _spread("read_gb_per_s", ".2f")),
    ("  share reached", lambda c: f"{c['decode_share_of_read']:.1%}"),
    ("prefill, GOP/s", lambda c: f"{c['prefill_gop_per_s']:.1f}"),
    ("the kernels in cache, GOP/s", lambda c: f"{c['peak_gop_per_s']:.1f}"),
    ("  share reached", lambda c: f"{c['prefill_share_of_peak']:.1%}"),
    ("outside matrices, us per token", lambda c: f"{c['outside_matrices_us_per_token']:.1f}"),
    ("  of these attention", lambda c: f"{c['attention_us_per_token']:.1f}"),
    ("waiting at barriers, share of decode", lambda c: f"{c['barrier_wait_share']:.2%}"),
    ("residency", lambda c: c["residency"]),
    ("planned memory", lambda c: bytes_text(c["plan_bytes"]["total_bytes"])),
    ("peak resident, Python included", lambda c: _bytes_or(c["peak_rss_bytes"], "not told by the system")),
)


_STREAMED_ROWS: Sequence[_Row] = (
    ("experts in slots", lambda c: str(c["streaming"]["expert_slots"])),
    ("prefetch, at the end of each turn", lambda c: _states(c["streaming"]["prefetch"])),
    *(
        row
        for part in ("prefill", "decode")
        for row in (
            (f"{part}: found in slots", _streaming(part, "hit_rate", lambda rate: f"{rate:.1%}")),
            (
                "  read from disk per token",
                _streaming(part, "bytes_read_per_token", lambda count: bytes_text(round(count))),
            ),
            (
                "  waited for it, ms per token",
                _streaming(part, "wait_seconds_per_token", lambda seconds: f"{1e3 * seconds:.2f}"),
            ),
        )
    ),
)


def _states(found: list[dict[str, Any]]) -> str:
    """How often which: "on 3, undecided 2"."""
    names = [one["state"] for one in found]
    return ", ".join(f"{name} {names.count(name)}" for name in ("on", "off", "undecided") if name in names)


def _bytes_or(count: int | None, otherwise: str) -> str:
    return otherwise if count is None else bytes_text(count)


def _table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    data = report.data()
    table = Table(box=box.SIMPLE_HEAD, title=f"{report.model.path.name}, {bytes_text(report.model.bytes)}")
    table.add_column(f"prompt {data['prompt_tokens']}, decode {data['decode_tokens']}")
    for cell in data["cells"]:
        table.add_column(f"{counted(cell['threads'], 'thread')}, {cell['isa']}", justify="right")
    for name, text in _ROWS:
        table.add_row(name, *(text(cell) for cell in data["cells"]))
    if any(cell["streaming"] for cell in data["cells"]):
        table.add_section()
        for name, text in _STREAMED_ROWS:
            table.add_row(name, *(text(cell) if cell["streaming"] else "" for cell in data["cells"]))
    return table


def _remarks(report: Report) -> list[str]:
    """What the table cannot say."""
    data = report.data()
    machine, cold = data["machine"], data["start_cold"]
    if cold["start_ms"] is None:
        start = f"cold start: not measured, {cold['not_measured_because']}"
    else:
        times = cold["start_ms"]
        start = (
            f"cold start, {counted(cold['threads'], 'thread')}: open to first token "
            f"{times['open_to_first_token']:.1f} ms, with interpreter and imports "
            f"{times['process_to_first_token']:.1f} ms"
        )
    lines = [
        f"medians of {counted(report.repeats, 'turn')} (smallest - largest); GB and GOP are 1e9; "
        f"{machine['cpu']}, {counted(machine['cpus'], 'processor')}",
        start,
        f"reading: {data['read_probe']['method']}; buffer {bytes_text(report.probe_buffer_bytes)}",
    ]
    if not all(cell["read_probe_is_memory_bound"] for cell in data["cells"]):
        lines.append("the probe was not limited by memory: take the share reached as an upper bound")
    return lines + _doubts(data["cells"], machine)


def _doubts(cells: list[dict[str, Any]], machine: dict[str, Any]) -> list[str]:
    """Why shares of a turn may pass 100 %, or mean less than they seem to."""
    lines = []
    token, cache = cells[0]["decode_bytes_per_token"], machine["last_level_cache_bytes"]
    if cache is not None and token <= cache:
        lines.append(
            f"what a token reads ({bytes_text(round(token))}) fits into the last-level cache "
            f"({bytes_text(cache)}): the share of reading may pass 100 %, and says little about memory"
        )
    most = max(cell["threads"] for cell in cells)
    if most > machine["cpus"]:
        lines.append(
            f"{counted(most, 'thread')} on {counted(machine['cpus'], 'processor')} wait for each other: "
            "rates and shares of that many are not the machine's"
        )
    return lines
