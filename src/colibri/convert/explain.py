"""What a conversion makes of each key of config.json and of each tensor, without writing anything.

Owns: what there is to say about each. Refuses: what prepare.py refuses. Which fields depend on a key is for
origins.py to find out. How it looks on a screen is for cli/explain.py to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colibri.config import config_schema
from colibri.convert.checkpoint import reading
from colibri.convert.origins import others
from colibri.convert.prepare import Plan, Request, prepare
from colibri.convert.source import open_source
from colibri.convert.tensors import scales_of
from colibri.entries import weight_types

PARTS = ("gate", "up", "down")  # of an expert, as its entry has them
_FROM_TOKENIZER = "n_vocab_used"


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of config.json, or one that it left out. `fields`: what depends on its value, as the file has
    it; `why`: what else there is to say, always something where there are no fields."""

    key: str
    value: Any
    fields: dict[str, Any]
    why: str = ""
    gguf_key: str = ""  # what a GGUF file calls it


@dataclass(frozen=True, slots=True)
class TensorRow:
    """`slots`: entries of the file with their types; none where the tensor is left out for the reason
    `why`."""

    name: str
    file: str
    dtype: str
    shape: list[int]
    slots: list[str]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    source: str
    model_type: str
    family: str
    keys: list[KeyRow]
    defaults: list[KeyRow]  # absent from config.json: those of the family's config class
    other_fields: dict[str, str]  # fields that no key decides, and who does
    tensors: list[TensorRow]
    made: list[str]  # entries that are no tensor of the checkpoint
    type: str
    bytes: int  # of the file's tensors
    notes: list[str]

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def explain(
    source: str | os.PathLike[str],
    type: str | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    context: int | None = None,
    requantize: bool = False,
    require_tokenizer: bool = True,
) -> Explanation:
    """The account of a conversion with these choices, which are those of convert()."""
    weight_types(type, experts=experts, dense=dense, output=output)
    checkpoint = open_source(Path(source))
    request = Request(type, experts, dense, output, context, requantize, require_tokenizer)
    with reading() as read:
        plan = prepare(checkpoint, request, read)
    keys, defaults = _keys(plan)
    decided = {field for row in keys + defaults for field in row.fields}
    name = plan.family.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    return Explanation(
        source=str(checkpoint.path),
        model_type=checkpoint.config["model_type"],
        family=name,
        keys=keys,
        defaults=defaults,
        other_fields=_other_fields(plan, decided),
        tensors=list(_tensors(plan)),
        made=[entry.name for entry in plan.entries if entry.name not in plan.views] + list(plan.blobs),
        type=str(plan.types),
        bytes=sum(entry.bytes for entry in plan.entries),
        notes=plan.notes,
    )


# ------------------------------------------------------------------ keys


def _keys(plan: Plan) -> tuple[list[KeyRow], list[KeyRow]]:
    """Rows of the keys in config.json, and of those that it leaves out."""
    source = plan.reading
    base = source.facts({})
    rows = {}
    for name, value in source.values.items():
        changed = source.changed(base, name, value, {})
        why = _why(plan, name, value, bool(changed))
        if not changed and not why:  # a change of this key alone is refused, or has to wait for another one
            for other, old in plan.checkpoint.config.items():
                if other != name and not changed and not plan.keys.reason(other):
                    for new in others(old, plan.keys.required.get(other, ()))[:3]:
                        changed |= source.changed(base, name, value, {other: new})
        fields = {field: _shown(plan, base, field) for field in [*base, *sorted(changed - base.keys())]}
        fields = {field: shown for field, shown in fields.items() if field in changed}
        rows[name] = KeyRow(
            name,
            value,
            fields,
            why or ("" if fields else "read; changes nothing here"),
            plan.keys.names.get(name, ""),
        )
    given = [row for name, row in rows.items() if name not in plan.keys.defaults]
    return given, [rows[name] for name in plan.keys.defaults]


def _why(plan: Plan, name: str, value: Any, decides: bool) -> str:
    """What there is to say about a key beside the fields that it decides."""
    if name == "model_type":
        return "names the family"
    if name == "quantization_config" and value:
        return _quantisation(plan)
    if decides:
        return ""
    reason = plan.keys.reason(name) if name in plan.checkpoint.config else ""
    if reason:
        return f"harmless: {reason}"
    if name in plan.keys.required:
        return f"checked: {' or '.join(map(repr, plan.keys.required[name]))}"
    return ""


def _quantisation(plan: Plan) -> str:
    if any(view.scales for views in plan.views.values() for view in views):
        return "experts are stored as mxfp4"
    blocks = (form if isinstance(form, str) else f"block of {form[0]} x {form[1]}" for form in plan.forms)
    return f"FP8 weights have one scale for each {' or '.join(blocks)}"


def _shown(plan: Plan, base: dict[str, Any], field: str) -> Any:
    """A field as the file has it."""
    if field == "rope_inv_freq":
        return f"{len(base[field])} frequencies"
    if field.startswith(("order of", "source of")):
        return ""
    value = plan.config.get(field, base.get(field))
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _other_fields(plan: Plan, decided: set[str]) -> dict[str, str]:
    """Fields that no key decides: what the family always has, and what the tokenizer says."""
    defaults = {field["name"]: field.get("default") for field in config_schema()}
    found = {}
    for field in plan.decoder.config:
        shown = _shown(plan, {}, field)
        if field not in decided and shown != defaults[field]:
            found[field] = f"{shown}, as every model of the family has it"
    used = plan.config[_FROM_TOKENIZER]
    return found | {_FROM_TOKENIZER: f"{used}, from the tokenizer"}


# ------------------------------------------------------------------ tensors


def _type(types: tuple[str, ...], parts: list[str]) -> str:
    return types[PARTS.index(parts[0])] if parts else types[0]


def _tensors(plan: Plan) -> Iterator[TensorRow]:
    slots: dict[str, dict[str, list[str]]] = {}  # tensor to entry to parts
    scales: dict[str, str] = {}
    types = {entry.name: entry.types for entry in plan.entries}
    for entry, views in plan.views.items():
        for part, view in enumerate(views):
            parts = slots.setdefault(view.tensor.name, {}).setdefault(entry, [])
            parts += [PARTS[part]] if len(views) > 1 else []
            for tensor in scales_of(view):
                scales[tensor.name] = view.tensor.name
    for tensor in plan.checkpoint.tensors.values():
        named = [
            f"{entry}{' ' + ', '.join(parts) if parts else ''} ({_type(types[entry], parts)})"
            for entry, parts in slots.get(tensor.name, {}).items()
        ]
        if tensor.name in scales:
            named.append(f"scales of {scales[tensor.name]}")
        why = plan.left_out.get(tensor.name, "")
        yield TensorRow(tensor.name, tensor.file.name, tensor.dtype, list(tensor.shape), named, why)
