"""Finds, for every entry of the target file, the source tensors that it is made of.

Owns: the spellings of experts, and the account of source tensors: each is used once or left out for a
stated reason.
Refuses: absent, unknown, misshapen and ambiguous tensors, by name, before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from colibri.config import Config
from colibri.convert import fp8
from colibri.convert.checkpoint import Checkpoint, SourceTensor, View, refuse_dtype
from colibri.convert.decoder import IGNORED_SUFFIXES, Cut, Decoder, ExpertNames, Names
from colibri.convert.keys import home
from colibri.entries import Entry
from colibri.errors import ConversionError

Tensors = dict[str, SourceTensor]  # by name without wrappers

_LAYER = re.compile(r"(?:layers|blk)\.(\d+)\.")
_SLICE = re.compile(r"(.+)\[(\d)::(\d)\]")
_HEAD = re.compile(r"\.(\d+)$")
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)")


def resolve(
    checkpoint: Checkpoint,
    names: Names,
    experts: ExpertNames | None,
    entries: Sequence[Entry],
    config: Config,
    decoder: Decoder,
    forms: Sequence[fp8.Form] = fp8.UNSAID,
) -> tuple[dict[str, tuple[View, ...]], dict[str, str]]:
    """(views by entry name, tensors that are left out and why). `forms`: of the scales of FP8 tensors."""
    tensors, tied = checkpoint.tensors, bool(config["tied_output"])
    shorts = {tensor.name: short for short, tensor in tensors.items()}
    found: dict[str, tuple[View, ...]] = {}
    missing: list[str] = []
    n_encoder = config["n_encoder_layers"]
    for entry in entries:
        pattern, layer, head = pattern_of(entry.name, n_encoder)
        if pattern in decoder.made:
            continue
        if entry.kind == "expert":
            assert experts is not None
            at = () if not n_encoder else (0,) if pattern.startswith("encoder.") else (1,)
            blocks = [experts.blocks[i] for i in at] or experts.blocks
            blocks = [block.replace("{N}", layer) for block in blocks]
            views = _expert(tensors, experts, blocks, entry, config["n_experts"], missing)
        else:
            sources = [*decoder.sources.get(entry.name, ())]
            sources = sources or _sources(names, pattern, entry.name, layer, tied)
            found_layer = _LAYER.match(entry.name) if ".experts_" in entry.name else None
            count = config["n_experts"][int(found_layer[1])] if found_layer else 1
            cut = decoder.cuts.get(entry.name, decoder.cuts.get(pattern))
            views = _plain(tensors, sources, entry, missing, cut, head, count)
            if pattern in decoder.affine:
                views = [replace(view, affine=decoder.affine[pattern]) for view in views]
            if pattern in decoder.logs:
                views = [replace(view, log=True) for view in views]
        found[entry.name] = tuple(
            fp8.scaled(view, tensors, shorts[view.tensor.name], forms) for view in views
        )
    for entry in entries:
        for view in found.get(entry.name, ()):
            refuse_dtype(view)
    used = {view.tensor.name for one in found.values() for view in one}
    used |= {tensor.name for one in found.values() for view in one for tensor in scales_of(view)}
    left_out: dict[str, str] = {}
    unknown: list[str] = []
    for short, tensor in tensors.items():
        if tensor.name not in used and short not in decoder.read:
            why = _reason(short, config, decoder)
            if why:
                left_out[tensor.name] = why
            else:
                unknown.append(tensor.name)
    _refuse(checkpoint, missing, unknown, tied)
    return found, left_out


def scales_of(view: View) -> list[SourceTensor]:
    """Tensors that are read beside the view's own."""
    return ([view.scales] if view.scales else []) + ([view.grid.tensor] if view.grid else [])


def _reason(short: str, config: Config, decoder: Decoder) -> str:
    """Why the model goes without this tensor; empty if it should not."""
    layer = _LAYER.match(short)
    if layer is not None and 0 <= int(layer[1]) - config["n_layers"] < decoder.extra_layers:
        return f"stands in layer {layer[1]}, behind the model's last one, to predict tokens further on"
    if short.startswith("mtp."):
        return "predicts tokens further on, beside the model's own layers"
    if short in decoder.equal:
        return "is the embedding once more"
    if short.startswith(decoder.left_out):
        return "belongs to another part than the one that reads and writes text"
    if short.endswith(IGNORED_SUFFIXES):
        return "is computed from config.json"
    if config["tied_output"] and (short == "lm_head.weight" or fp8.is_scale(short, "lm_head.weight")):
        return "is the output head, which is tied to the embedding"
    if fp8.OF_ACTIVATIONS.fullmatch(short):
        return "scales activations to FP8, which stay wider here"
    return ""


def pattern_of(name: str, n_encoder: int) -> tuple[str, str, int]:
    """The name with {N} for the layer and {H} for the head, with that layer, in its stack, and that head."""
    layer, head = _LAYER.match(name), _HEAD.search(name)
    number = int(layer[1]) if layer else 0
    stack = "layers" if not n_encoder else "encoder" if number < n_encoder else "decoder"
    number -= n_encoder if stack == "decoder" else 0
    pattern = name.replace(layer[0], f"{stack}.{{N}}.", 1) if layer else name
    return (_HEAD.sub(".{H}", pattern), str(number), int(head[1])) if head else (pattern, str(number), 0)


def _sources(names: Names, pattern: str, name: str, layer: str, tied: bool) -> list[str]:
    if pattern not in names:
        raise ConversionError(f"The family has no source for {name}; this is a bug.")
    found = [source.replace("{N}", layer) for source in names[pattern]]
    # With tied embeddings either of the two may have been saved.
    return [*found, "lm_head.weight"] if name == "embedding" and tied else found


def _plain(
    tensors: Tensors,
    sources: list[str],
    entry: Entry,
    missing: list[str],
    cut: Cut | None,
    head: int,
    count: int,
) -> list[View]:
    """`count`: of experts whose vectors stand one after the other."""
    for source in sources:
        match = _SLICE.fullmatch(source)
        name, start, step = (match[1], int(match[2]), int(match[3])) if match else (source, 0, 1)
        if "{E}" in name:
            return _of_experts(tensors, name, entry, count, missing)
        if name not in tensors:
            continue
        if cut is not None:
            _check_shape(tensors[name], [cut.shape], entry.name)
            return [cut.view(tensors[name], head)]
        if entry.kind == "matrix":
            _check_shape(tensors[name], [(entry.rows, entry.cols)], entry.name)
            return [View(tensors[name], entry.rows, entry.cols)]
        numbers = entry.cols * step
        _check_shape(tensors[name], [(numbers,), (count, numbers // count)], entry.name)
        order = range(start, numbers, step) if match else ()
        return [View(tensors[name], 1, entry.cols, order=order, flat=True)]
    missing.append(" or ".join(_SLICE.sub(r"\1", source) for source in sources))
    return []


def _of_experts(tensors: Tensors, name: str, entry: Entry, count: int, missing: list[str]) -> list[View]:
    """One vector of each expert."""
    names = [name.replace("{E}", str(expert)) for expert in range(count)]
    missing.extend(one for one in names if one not in tensors)
    cols = entry.cols // count
    for one in names:
        if one in tensors:
            _check_shape(tensors[one], [(cols,)], entry.name)
    return [View(tensors[one], 1, cols, flat=True) for one in names if one in tensors]


def _expert(
    tensors: Tensors,
    names: ExpertNames,
    blocks: list[str],
    entry: Entry,
    n_experts: list[int],
    missing: list[str],
) -> list[View]:
    """gate, up and down of one expert, in whichever spelling the layer has; what is missing is noted."""
    match = _EXPERT.fullmatch(entry.name)
    assert match is not None
    expert, count = int(match[2]), n_experts[int(match[1])]
    for block in blocks:
        if names.in_turns:
            return _in_turns(tensors, block, expert, count, entry, missing)
        if f"{block}.{names.stacked[0]}" in tensors:
            return _stacked(tensors, block, names, expert, count, entry, missing)
        apart = [f"{block}.{name}" for name in names.apart]
        if apart[0] in tensors:
            return _three(tensors, apart, entry, missing, expert, count)
        single = names.of(block, expert)
        if any(name in tensors for name in single):
            return _three(tensors, single, entry, missing)
    missing.append(f"{names.of(blocks[0], expert)[0]} (or {blocks[-1]}.{names.stacked[0]})")
    return []


def _three(
    tensors: Tensors,
    names: list[str],
    entry: Entry,
    missing: list[str],
    expert: int | None = None,
    count: int = 0,
) -> list[View]:
    """gate, up and down as tensors of their own: of one expert, or stacked [count, rows, cols]."""
    views = []
    for name, (rows, cols, _) in zip(names, entry.matrices, strict=True):
        if name not in tensors:
            missing.append(name)
            continue
        _check_shape(tensors[name], [(rows, cols) if expert is None else (count, rows, cols)], entry.name)
        views.append(View(tensors[name], rows, cols, expert))
    return views


def _stacked(
    tensors: Tensors,
    block: str,
    names: ExpertNames,
    expert: int,
    count: int,
    entry: Entry,
    missing: list[str],
) -> list[View]:
    """gate_up_proj [experts, 2 n_ff, n_embd] with gate before up, and down_proj [experts, n_embd, n_ff].

    Some tools write both with the last two axes swapped; only an unequal pair of sizes can tell which it is.
    """
    gate_up, down = (tensors.get(f"{block}.{name}") for name in names.stacked)
    if gate_up is None or down is None:
        missing.append(f"{block}.{names.stacked[1]}")
        return []
    rows, cols, known = entry.rows, entry.cols, names.transposed
    for tensor, sizes in ((gate_up, (2 * rows, cols)), (down, (cols, rows))):
        shapes = {False: (count, *sizes), True: (count, *sizes[::-1])}
        _check_shape(tensor, [*shapes.values()] if known is None else [shapes[known]], entry.name)
        if known is None and sizes[0] == sizes[1]:
            raise ConversionError(
                f"{tensor.name} in {tensor.file.name} has shape {list(tensor.shape)}: its last two sizes "
                "are equal, so its shape cannot tell whether it is transposed. Save the model with "
                "save_pretrained() of Transformers, which writes one tensor per expert, and convert that."
            )
    swapped = gate_up.shape[1:] == (cols, 2 * rows) if known is None else known
    return [
        View(gate_up, rows, cols, expert, 0, swapped),
        View(gate_up, rows, cols, expert, rows, swapped),
        View(down, cols, rows, expert, 0, down.shape[1:] == (rows, cols) if known is None else known),
    ]


def _in_turns(
    tensors: Tensors, block: str, expert: int, count: int, entry: Entry, missing: list[str]
) -> list[View]:
    """gate_up_proj [experts, n_embd, 2 n_ff], gate and up in turns, and down_proj [experts, n_ff, n_embd];
    or, as mxfp4, *_blocks [experts, rows, cols / 32, 16] and *_scales [experts, rows, cols / 32]."""
    views = []
    for part, step, rows, cols in (
        ("gate_up_proj", 2, entry.rows, entry.cols),
        ("down_proj", 1, entry.cols, entry.rows),
    ):
        name = f"{block}.experts.{part}"
        names = [name]
        shapes: list[tuple[int, ...]] = [(count, cols, rows * step)]
        if f"{name}_blocks" in tensors and cols % 32 == 0:
            names = [f"{name}_blocks", f"{name}_scales"]
            shapes = [(count, rows * step, cols // 32, 16), (count, rows * step, cols // 32)]
        absent = [name for name in names if name not in tensors]
        missing.extend(name for name in absent if name not in missing)
        for name, shape in zip(names if not absent else [], shapes, strict=False):
            _check_shape(tensors[name], [shape], entry.name)
        for start in range(0 if absent else step):
            scales = tensors[names[1]] if names[1:] else None
            views.append(
                View(
                    tensors[names[0]],
                    rows,
                    cols,
                    expert,
                    transposed=scales is None,
                    order=range(start, rows * step, step) if step > 1 else (),
                    scales=scales,
                )
            )
    return views


def _check_shape(tensor: SourceTensor, allowed: Sequence[tuple[int, ...]], target: str) -> None:
    if tensor.shape not in allowed:
        keys, step = home(tensor.file if tensor.offset is not None else Path("config.json"))
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ConversionError(
            f"{tensor.name} in {tensor.file.name} has shape {list(tensor.shape)}; {keys} makes "
            f"{target} {wanted}. {step}"
        )


def _refuse(checkpoint: Checkpoint, missing: list[str], unknown: list[str], tied: bool) -> None:
    if not missing and not unknown:
        return
    texts = []
    keys, hint = home(checkpoint.config_path)
    if missing:
        texts.append(f"{_tensors(missing)} absent: {_some(missing)}")
    if unknown:
        texts.append(f"{_tensors(unknown)} not part of the model that {keys} describes: {_some(unknown)}")
    if checkpoint.gguf is None:
        hint = "Check that config.json belongs to these weights and that the download is complete."
    if missing == ["lm_head.weight"] and not tied:
        hint = (
            "If the output head is the embedding, config.json must say tie_word_embeddings: true, beside "
            "text_config where there is one, since what is inside does not count."
        )
    raise ConversionError(f"{checkpoint.path}: {'; '.join(texts)}. {hint}")


def _tensors(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
