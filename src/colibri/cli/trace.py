"""`colibri trace`: records which experts a model uses for texts.

Owns: options and their combinations, reading texts, the bar. Refuses: recording (colibri.analysis).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    resolve_model,
    step_bar,
)
from colibri.cli.texts import read_file, read_text
from colibri.errors import ModelIOError

if TYPE_CHECKING:
    from colibri.analysis.recording import Text


def trace_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The trace, such as run.trace.", show_default=False
        ),
    ],
    text: Annotated[list[str] | None, typer.Option(help="A text; may be given often.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A file with one text; may be given often.")
    ] = None,
    jsonl: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A file with a JSON object a line, each with a text; may be given often."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Where the text of such an object is.")] = "text",
    label: Annotated[str, typer.Option(help="Where it says what its text is about.")] = "domain",
    generate: Annotated[
        int,
        typer.Option(metavar="N", help="Also trace up to N tokens that the model writes after each text."),
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="For --generate; 0: greedy. Default: the model's own, else 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For --generate; repeats what is drawn.")] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Gate logits too: 4 bytes for every expert.")
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens evaluated together; 1: each token by itself, as in decoding.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Most positions of a sequence; longer texts are cut into several.")
    ] = None,
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
    """Record which experts are chosen, for every token and layer, into a file (docs/TRACE.md)."""
    from colibri.analysis.recording import record
    from colibri.arguments import Opening
    from colibri.engine import load
    from colibri.sampling import Sampling

    if not generate:
        for name, value in (("temperature", temperature), ("seed", seed)):
            if value is not None:
                raise typer.BadParameter(f"--{name} has no effect without --generate: nothing is drawn")
    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
        "chunk": chunk,
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
    options: dict[str, Any] = {"temperature": temperature, "seed": seed}
    Sampling(**options)  # wrong values are told before a model is converted or loaded
    Opening(**opening)
    texts = _texts(text or [], file or [], jsonl or [], field, label)
    if not texts:
        raise typer.BadParameter("no text: give one with --text, or files with --file or --jsonl")
    if not output.parent.is_dir() or output.is_dir():
        why = "it is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise ModelIOError(f"Cannot write {output}: {why}.")
    with load(resolve_model(model, {}), **opening) as opened, step_bar("tracing") as bar:
        recorded = record(
            opened,
            texts,
            output,
            generate=generate,
            logits=logits,
            progress=lambda done, total: bar(done, total, texts[min(done, total - 1)].where),
            **options,
        )
    note(
        f"{output}: {counted(recorded.tokens, 'token')} of {counted(recorded.sequences, 'sequence')}, "
        f"{bytes_text(output.stat().st_size)}"
    )


def _texts(texts: list[str], files: list[Path], lines: list[Path], field: str, label: str) -> list[Text]:
    from colibri.analysis.recording import Text, texts_of_lines

    found = [Text(text, None, f"--text {number}") for number, text in enumerate(texts, 1)]
    found += [Text(read_text(path), None, str(path)) for path in files]
    for path in lines:
        found += texts_of_lines(path, read_file(path).splitlines(), field, label)
    return found
