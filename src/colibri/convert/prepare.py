"""What a conversion will do: every key, tensor and type settled and checked, before a byte is written.

Owns: the order of those checks, and that what will be written can be loaded. Refuses: choices without effect.
What is wrong with a source is said by the module that sees it; writing is pipeline.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri.config import Config, complete_config
from colibri.convert import embedded, fp8
from colibri.convert.checkpoint import Checkpoint, ReadRows, View, widen
from colibri.convert.decoder import Decoder
from colibri.convert.gguf.layout import layout_of
from colibri.convert.keys import Keys
from colibri.convert.origins import Reading
from colibri.convert.registry import Family, family_of
from colibri.convert.targets import with_encoder
from colibri.convert.tensors import resolve
from colibri.convert.tokenizer_files import tokenizer_file
from colibri.convert.trial import open_head, read_texts
from colibri.convert.types import EntryTypes, check_types, chosen_types, entry_types
from colibri.entries import Entry, WeightTypes, expected_entries
from colibri.errors import ArgumentError, ConversionError, ModelFileError
from colibri.expert_bits import types_by_entry
from colibri.layout import lay_out
from colibri.quantize import KEPT

HEAD = "lm_head.weight"
# Raise it when the same source gives other bytes: cached conversions are then made anew.
CONVERTER_VERSION = "2"


@dataclass(frozen=True, slots=True)
class Request:
    """The choices that convert() takes beside its files, by the same names."""

    type: str | None = None
    experts: str | None = None
    dense: str | None = None
    output: str | None = None
    context: int | None = None
    requantize: bool = False
    require_tokenizer: bool = True
    expert_bits: Mapping[str, list[str]] | None = None  # types by layer and expert


@dataclass(frozen=True, slots=True)
class Plan:
    checkpoint: Checkpoint
    keys: Keys
    family: Family
    decoder: Decoder
    forms: tuple[fp8.Form, ...]  # of FP8 scales
    config: Config  # complete
    types: EntryTypes
    entries: list[Entry]  # without blobs and offsets
    views: dict[str, tuple[View, ...]]  # by entry
    left_out: dict[str, str]  # tensors and why
    blobs: dict[str, bytes]
    notes: list[str]  # for the user

    @property
    def reading(self) -> Reading:
        return Reading(self.family, self.checkpoint.config, self.keys)


def prepare(checkpoint: Checkpoint, request: Request, read: ReadRows) -> Plan:
    """Reads config.json and every header, of tensor data only what a tied head is compared with."""
    chosen = chosen_types(checkpoint, request.type, request.experts, request.dense, request.output)
    keys = Keys(checkpoint.config, checkpoint.config_path, request.context, checkpoint.key_names)
    family = family_of(keys)
    forms = fp8.read_forms(keys)
    decoder = family.read_config(keys)
    names, experts = family.TENSORS, family.EXPERTS
    if checkpoint.gguf is not None:
        names, experts, decoder = layout_of(checkpoint.gguf, family, decoder)
    decoder = decoder._replace(made={"rope_inv_freq": decoder.inv_freq, **decoder.made})
    keys.finish()
    config = decoder.config
    if not any(config.get("n_experts", ())):
        if request.experts is not None:
            raise ArgumentError(
                f"experts={request.experts!r} has no effect: {checkpoint.path} has no experts"
            )
        chosen = replace(chosen, experts="")
    parts = embedded.read_embedded(
        checkpoint, config["n_vocab"], family.BOS_DEFAULT, family.EOS_DEFAULT, request.require_tokenizer
    )
    config["n_vocab_used"] = parts.n_vocab_used
    notes = [*checkpoint.notes, *keys.notes, *parts.notes]
    _require_equal(checkpoint, decoder.equal, config, forms, read)
    notes += _untie_if_different(checkpoint, family.TENSORS["embedding"], config, forms, read)
    try:
        full = complete_config(config, ModelFileError)
        if full["n_encoder_layers"]:
            parts.blobs["generation.json"] = with_encoder(
                checkpoint, parts.blobs, decoder.start_id, full["n_vocab"]
            )
        layout = lay_out(full, "f32", parts.blobs)  # which types there are follows from what is found
        open_head(layout)
    except ModelFileError as error:
        raise Reading(family, checkpoint.config, keys).error(error) from error
    tokenizer = tokenizer_file(checkpoint.path)
    read_texts(checkpoint.place(tokenizer.name if tokenizer else "tokenizer.json"), parts.blobs, full)
    entries = list(layout.entries[: layout.n_tensors])
    views, left_out = resolve(checkpoint, names, experts, entries, full, decoder, forms)
    types = entry_types(chosen, entries, views)
    if request.expert_bits is not None:
        planned = types_by_entry(request.expert_bits, full)
        types = replace(types, stored={**types.stored, **planned})
    entries = expected_entries(full, types)
    stored = check_types(entries, views, request.requantize)
    notes += _stored_otherwise(views, chosen, stored) + _left_out(left_out)
    if chosen.experts == KEPT and request.experts is None and request.type is not None:
        notes.append(f"experts stay {KEPT}, as they are stored; --experts {request.type} makes them so")
    model_type = checkpoint.config["model_type"]
    source = embedded.source_json(checkpoint, model_type, str(types), CONVERTER_VERSION)
    return Plan(
        checkpoint=checkpoint,
        keys=keys,
        family=family,
        decoder=decoder,
        forms=forms,
        config=full,
        types=types,
        entries=entries,
        views=views,
        left_out=left_out,
        blobs=parts.blobs | {"source.json": source},
        notes=notes,
    )


def _stored_otherwise(
    views: dict[str, tuple[View, ...]], types: WeightTypes, stored: dict[tuple[str, str, bool], int]
) -> list[str]:
    notes = [
        f"matrices in {dtype}, {count} of them, are stored as {type}, which "
        + ("holds them without loss" if whole else "rounds them")
        for (dtype, type, whole), count in stored.items()
    ]
    count = len({view.tensor.name for one in views.values() for view in one if view.grid})
    if count:
        notes.append(f"{count} tensors in FP8 are multiplied with their scales and stored as {types}")
    return notes


def _left_out(tensors: dict[str, str]) -> list[str]:
    """A note for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in tensors.items():
        by_reason.setdefault(why, []).append(name)
    return [f"left out, since it {why}: {_some(names)}" for why, names in by_reason.items()]


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def _untie_if_different(
    checkpoint: Checkpoint,
    embedding: Sequence[str],
    config: dict[str, Any],
    forms: Sequence[fp8.Form],
    read: ReadRows,
) -> list[str]:
    """tie_word_embeddings is true and both tensors exist: Transformers ties them only if they are equal."""
    found = [name for name in embedding if name in checkpoint.tensors][:1]
    if not config["tied_output"] or not found or HEAD not in checkpoint.tensors:
        return []
    if _equal(checkpoint, (found[0], HEAD), config, forms, read):
        return []
    config["tied_output"] = 0
    return ["tie_word_embeddings is true, but lm_head.weight differs from the embedding: both are kept"]


def _require_equal(
    checkpoint: Checkpoint,
    names: Sequence[str],
    config: dict[str, Any],
    forms: Sequence[fp8.Form],
    read: ReadRows,
) -> None:
    found = [name for name in names if name in checkpoint.tensors]
    if found and checkpoint.tensors[found[0]].shape != (config["n_vocab"], config["n_embd"]):
        return  # which is told with the shape that it should have
    for name in found[1:]:
        if not _equal(checkpoint, (found[0], name), config, forms, read):
            first, other = checkpoint.tensors[found[0]], checkpoint.tensors[name]
            raise ConversionError(
                f"{other.name} in {other.file.name} differs from {first.name}: an encoder and a "
                "decoder with embeddings of their own are not supported."
            )


def _equal(
    checkpoint: Checkpoint,
    names: tuple[str, str],
    config: dict[str, Any],
    forms: Sequence[fp8.Form],
    read: ReadRows,
) -> bool:
    """Whether two tensors have the embedding's shape and the same numbers."""
    rows, cols = config["n_vocab"], config["n_embd"]
    if any(checkpoint.tensors[name].shape != (rows, cols) for name in names):
        return False
    first, second = (
        fp8.scaled(View(checkpoint.tensors[name], rows, cols), checkpoint.tensors, name, forms)
        for name in names
    )
    step = max(1, (1 << 20) // cols)
    return all(
        np.array_equal(widen(read(first, at, end)), widen(read(second, at, end)))
        for at in range(0, rows, step)
        for end in [min(at + step, rows)]
    )
