"""The weight type of every matrix of a conversion: as it was asked for, or as the source stores it.

Owns: what of a source stays as it is stored, and what becomes of the rest. Refuses: mxfp4 where a source has
none, types of ggml below 4 bits that would be rounded a second time unasked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from colibri.convert.checkpoint import Checkpoint, View
from colibri.convert.gguf import blocks
from colibri.entries import Entry, WeightTypes, weight_types
from colibri.errors import ArgumentError, ConversionError
from colibri.quantize import KEPT

STORED = "as stored"  # every matrix of GGUF, unless a type is asked for
# Types that are rounded to the next one of ours without a question: the error is a small part of their own.
_ORDINARY = {"Q4_1", "Q5_1", "Q2_K", "Q5_K", *blocks.HELD}


@dataclass(frozen=True, slots=True)
class EntryTypes:
    """From an entry's name to its types, one for each matrix."""

    chosen: WeightTypes
    stored: Mapping[str, tuple[str, ...]]  # of entries that are kept as stored

    def __call__(self, name: str) -> tuple[str, ...]:
        return self.stored.get(name) or self.chosen(name)

    def __str__(self) -> str:
        return str(self.chosen)


def chosen_types(
    checkpoint: Checkpoint,
    type: str | None,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
) -> WeightTypes:
    """What was asked for. Experts stored as mxfp4 stay so where nothing else is said of experts; what GGUF
    stores stays as it is where nothing is said at all."""
    chosen = weight_types(type, experts=experts, dense=dense, output=output)  # wrong ones are told first
    in_gguf = checkpoint.gguf is not None
    has_mxfp4 = _has_mxfp4(checkpoint)
    if experts == KEPT and not has_mxfp4:
        raise ConversionError(
            f"Experts can be {KEPT} only where the checkpoint stores them so; this one does not. Choose q4."
        )
    if experts is None and has_mxfp4:
        chosen = replace(chosen, experts=STORED if in_gguf else KEPT)
    if in_gguf and type is None:
        rest = {"experts": experts, "dense": dense, "output": output}
        chosen = replace(chosen, **{name: STORED for name, asked in rest.items() if asked is None})
    return chosen


def _has_mxfp4(checkpoint: Checkpoint) -> bool:
    settings = checkpoint.config.get("quantization_config")
    if isinstance(settings, dict):
        return settings.get("quant_method") == KEPT
    # Some copies of such checkpoints have lost their quantization_config.
    return any(
        name.endswith("_proj_blocks") or (tensor.dtype == "MXFP4" and "_exps" in name)
        for name, tensor in checkpoint.tensors.items()
    )


def entry_types(
    chosen: WeightTypes, entries: Sequence[Entry], views: Mapping[str, tuple[View, ...]]
) -> EntryTypes:
    """`entries`: with any types."""
    stored: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        if entry.matrices and entry.name in views and STORED in chosen(entry.name):
            kept = map(kept_type, views[entry.name])
            stored[entry.name] = tuple(next(kept) if type else "" for type in entry.types)
    return EntryTypes(chosen, stored)


def kept_type(view: View) -> str:
    """The type of ours that holds what a view of a GGUF file shows, or the one that it is rounded to best."""
    dtype = view.tensor.dtype
    found = blocks.HELD.get(dtype) or blocks.ON_GRIDS.get(dtype)
    return found if found and _are_whole(view) else blocks.next_type(dtype)


def _are_whole(view: View) -> bool:
    """Whether its blocks are those of the file."""
    dtype = view.tensor.dtype
    return dtype in blocks.PLAIN or not view.transposed and blocks.are_whole(dtype, view.columns)


def is_rounded(view: View, type: str) -> bool:
    """Whether values in a block type of ggml become others."""
    dtype = view.tensor.dtype
    packed = view.tensor.offset is not None and dtype not in blocks.PLAIN and type != "f32"
    return packed and (not _are_whole(view) or blocks.HELD.get(dtype) != type)


def is_searched(view: View, type: str) -> bool:
    """Whether scales are looked for, weight by weight, or could be."""
    on_grid = blocks.ON_GRIDS.get(view.tensor.dtype) == type and _are_whole(view)
    return view.tensor.offset is None or (is_rounded(view, type) and not on_grid)


def check_types(
    entries: Sequence[Entry], views: Mapping[str, tuple[View, ...]], requantize: bool
) -> dict[tuple[str, str, bool], int]:
    """How many matrices in each type of ggml have each type of ours, and whether without loss. `requantize`:
    all types of ggml may be rounded a second time."""
    count: Counter[tuple[str, str, bool]] = Counter()
    asked_for = False
    for entry in entries:
        for view, type in zip(views.get(entry.name, ()), filter(None, entry.types), strict=False):
            dtype = view.tensor.dtype
            if type == KEPT and view.scales is None and dtype != "MXFP4":
                raise ConversionError(
                    f"Either all experts are {KEPT} or none, but {view.tensor.name} is {dtype}. Choose "
                    "another type with --experts, or download it again."
                )
            rare = is_rounded(view, type) and dtype not in _ORDINARY
            if rare and not requantize:
                raise ConversionError(
                    f"{view.tensor.name} is {dtype}, which would be rounded a second time, to {type}. "
                    "requantize=True (colibri convert --requantize) does that; better get the model in Q4_K, "
                    "Q6_K or Q8_0."
                )
            asked_for |= rare
            if view.tensor.offset is not None and entry.matrices:
                held = type == "f32" or blocks.HELD.get(dtype) == type
                count[dtype, type, held and not is_rounded(view, type)] += 1
    if requantize and not asked_for:
        raise ArgumentError("requantize has no effect: nothing in this source needs it")
    return dict(count)
