"""`colibri inspect`: what a model file holds.

Owns: the report as text and as JSON. Refuses: reading the file itself (colibri.inspection).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.report import bytes_text, note, progress_bar, resolve_model

if TYPE_CHECKING:
    from colibri.entries import Entry
    from colibri.inspection import Description, Verification


def inspect_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help='A .colibri file, a Hugging Face directory, a GGUF file, or "demo".',
            show_default=False,
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Compare all data with their checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show config, tensors and bytes of a model."""
    from colibri.inspection import describe
    from colibri.inspection import verify as check

    path = resolve_model(model, {})
    description = describe(path)
    verification = None
    if verify:
        with progress_bar("verifying") as progress:
            verification = check(path, progress)
    if as_json:
        print(json.dumps(_as_data(description, verification), indent=1, ensure_ascii=False))
    else:
        print("\n".join(_as_text(description, verification)))
    if verification is not None and verification.damaged:
        note(
            f"colibri: {path}: {len(verification.damaged)} of {verification.entries} entries do not match "
            f"their checksums: {', '.join(verification.damaged[:5])}. Copy or convert the model again."
        )
        raise typer.Exit(1)


def _as_data(found: Description, verification: Verification | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "path": str(found.path),
        "bytes": found.bytes,
        "parameters": found.parameters,
        "active_parameters": found.active_parameters,
        "bytes_by_class": found.bytes_by_class,
        "bytes_by_type": found.types,
        "config": found.config,
        "source": found.source,
        "generation": found.generation,
        "entries": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "rows": entry.rows,
                "cols": entry.cols,
                "types": entry.types,
                "bytes": entry.bytes,
                "offset": entry.offset,
            }
            for entry in found.entries
        ],
    }
    if verification is not None:
        data["damaged"] = verification.damaged
    return data


def _as_text(found: Description, verification: Verification | None) -> Iterator[str]:
    source = found.source
    yield f"{found.path}: {bytes_text(found.bytes)}"
    yield (
        f"{found.parameters:,} parameters, {found.active_parameters:,} used per token; converted from "
        f"{source.get('name', 'an unnamed checkpoint')} ({source.get('model_type', 'unknown')}, "
        f"{source.get('type', 'unknown')}) with rules of version {source.get('converter', 'unknown')}"
    )
    yield "\nconfig"
    for name, value in found.config.items():
        yield f"  {name:18} {_per_layer(value) if isinstance(value, list) else value}"
    yield "\nbytes"
    classes = {name: count for name, count in found.bytes_by_class.items() if count}
    for name, count in classes.items():
        yield f"  {name:18} {bytes_text(count):>11}  {count / max(1, found.bytes):6.1%}"
    for name, count in found.types.items():
        yield f"  as {name:15} {bytes_text(count):>11}"
    yield "\ntensors"
    for name, entry, count in _grouped(found.entries):
        shape = "" if entry.kind == "blob" else f"[{entry.rows}, {entry.cols}]"
        types = "/".join(dict.fromkeys(filter(None, entry.types)))
        total = bytes_text(entry.bytes * count)
        yield f"  {name:34} {entry.kind:7} {shape:16} {types:9} {total:>11}"
    if verification is not None and not verification.damaged:
        yield f"\nverified: all {verification.entries} entries match their checksums"


def _per_layer(values: list[Any]) -> str:
    """Runs of equal values: "0, then 8 x 23"."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return (
        ", then ".join(f"{value} x {count}" if count > 1 else f"{value}" for value, count in runs)
        + " (per layer)"
    )


def _grouped(entries: tuple[Entry, ...]) -> Iterator[tuple[str, Entry, int]]:
    """(name, entry, count): experts of one layer that are alike share a line."""

    def alike(entry: Entry) -> object:
        if entry.kind != "expert":
            return entry.name
        return entry.name.rpartition(".")[0], entry.rows, entry.cols, entry.types

    for _, run in groupby(entries, alike):
        group = list(run)
        first, last = group[0], group[-1]
        name = first.name if first is last else f"{first.name} to {last.name.rpartition('.')[2]}"
        yield name, first, len(group)
