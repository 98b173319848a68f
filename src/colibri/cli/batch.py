"""`colibri batch`: answers a file of requests.

Owns: options, loading, progress. Refuses: answers (server/batch.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

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
    counted,
    note,
    resolve_model,
    step_bar,
)
from colibri.cli.serve import load_served, need_extra


def batch_requests(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="A request a line.", show_default=False)],
    output: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="An answer a line.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option(help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".')
    ],
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; none: that of its file.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", "--max-model-len", help="Most positions of a text.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", "--max-num-seqs", help="Texts written at the same time.")
    ] = 8,
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the physical cores this process may use.")
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
) -> None:
    """Answer a file of requests, in their order: lines as OpenAI's batches have them, or bodies alone. A run
    that was interrupted goes on where it was."""
    from colibri.arguments import Opening
    from colibri.aside import check_place

    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
        "max_batch": max_batch,
        "memory": memory,
        "residency": residency,
        "expert_slots": expert_slots,
        "expert_policy": expert_policy,
        "lanes": lanes,
        "prefetch": prefetch,
        "kv_type": kv_type,
        "pin": pin,
        "numa": numa,
        "mlock": mlock,
    }
    Opening(**opening)  # wrong values are told before a model is converted or loaded
    check_place(output)
    need_extra()
    from colibri.server.batch import lines_of, run
    from colibri.server.served import Models

    n = sum(1 for _ in lines_of(source))
    file = resolve_model(model, {})
    served = load_served(served_model_name or file.stem, file, opening, max_waiting=1 << 20, prefill_rows=256)
    try:
        with step_bar("answering") as bar:
            work = run(
                Models([served]), source, output, 2 * max_batch, lambda at, all: bar(at, all, f"line {at}")
            )
            now, before = asyncio.run(work)
    finally:
        served.engine.close()
        served.model.close()
    earlier = f", {before} of them by an earlier run" if before else ""
    note(f"{output}: {counted(now + before, 'answer')} to {counted(n, 'request')}{earlier}")
