"""`colibri eval`: how well a model predicts texts, alone or beside a reference model.

Owns: options, bars, the lines or the JSON on stdout. Refuses: formulas (colibri.analysis.evaluation)."""

from __future__ import annotations

import json
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
    counted,
    note,
    resolve_model,
    step_bar,
)
from colibri.cli.texts import LineFiles, SourceField, TextField, TextFiles, passages

if TYPE_CHECKING:
    from colibri.analysis.evaluation import Evaluation, Passage
    from colibri.engine import Model


def evaluate_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    text: TextFiles = None,
    jsonl: LineFiles = None,
    field: TextField = "text",
    source_field: SourceField = None,
    src_lang: Annotated[
        str | None, typer.Option(help="Language of the sources, for a model that translates.")
    ] = None,
    tgt_lang: Annotated[
        str | None, typer.Option(help="Language of the texts, for a model that translates.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this model too, whose tokens are the same."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Most positions of a window; longer texts are scored in several.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="New tokens that a window scores; none: all of the context. Less is exacter and slower."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    """Perplexity and bits per byte on texts; with --reference also the Kullback-Leibler divergence from that
    model (docs/EVALUATION.md). A model with an encoder scores texts given their sources (--source-field).
    With --reference, options of memory and threads hold for each of the two models."""
    from colibri.arguments import Opening
    from colibri.engine import load

    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
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
    Opening(**opening)
    chosen: dict[str, Any] = {"stride": stride, "src_lang": src_lang, "tgt_lang": tgt_lang}
    texts = passages(text, jsonl, field, source_field)
    files = [resolve_model(one, {}) for one in (model, reference) if one is not None]
    try:
        with load(files[0], **opening) as opened:
            if len(files) == 1:
                found = measured(opened, texts, None, **chosen)
            else:
                with load(files[1], **opening) as other:
                    found = measured(opened, texts, other, **chosen)
    except KeyboardInterrupt:
        note("colibri: stopped; nothing is said of a part of the texts")
        raise typer.Exit(130) from None
    print(json.dumps(found.as_dict(), indent=1) if as_json else "\n".join(lines(found)))


def measured(
    model: Model, texts: list[Passage], reference: Model | None = None, **options: Any
) -> Evaluation:
    """evaluate() with a bar."""
    from colibri.analysis.evaluation import evaluate

    with step_bar("evaluating") as bar:
        return evaluate(
            model,
            texts,
            reference=reference,
            **options,
            progress=lambda done, total: bar(done, total, model.path.name),
        )


def lines(found: Evaluation) -> list[str]:
    """The figures, for people."""
    scored = f"{counted(found.tokens, 'token')} of {counted(found.texts, 'text')}, {found.bytes:,} bytes"
    told = [
        f"scored           {scored}",
        f"windows          context {found.context}, stride {found.stride}",
        f"perplexity       {found.perplexity:.4f}",
        f"bits per byte    {found.bits_per_byte:.4f}",
    ]
    if found.reference is not None:
        told += [
            f"of the reference perplexity {found.reference.perplexity:.4f}, "
            f"bits per byte {found.reference.bits_per_byte:.4f}",
            f"KL divergence    mean {found.kl_mean:.3g}, 99th percentile {found.kl_p99:.3g} nats a token",
            f"same best token  {100 * (found.top1_agreement or 0):.2f} %",
        ]
    return told
