"""FP8 checkpoints: what their quantization_config says, and which scale belongs to which weight.

Owns: the methods that store weights in 8-bit floats beside scales, the names and shapes of those scales.
Refuses: other methods, fields that change the numbers, weights without their scale, scales that do not fit.
A weight is its stored number times its scale, also where a name calls the scale inverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colibri.convert.checkpoint import Grid, SourceTensor, View
from colibri.convert.float8 import EXPONENTS, WEIGHTS
from colibri.convert.keys import Keys
from colibri.errors import ConversionError
from colibri.quantize import KEPT

# One scale for a tensor, for each of its outputs, or for a block of so many rows and columns.
Form = str | tuple[int, int]
TENSOR, CHANNEL = "tensor", "channel"
UNSAID: tuple[Form, ...] = (TENSOR, CHANNEL, (128, 128))

Known = dict[str, Any]  # field to None, a tuple of values that it may have, or the fields inside


def _free(names: str) -> Known:
    """Fields that have no part in what a weight is: which layers were left out, how activations and the KV
    cache were rounded where it ran before."""
    return dict.fromkeys(names.split())


_LEFT_OUT = "modules_to_not_convert ignored_layers ignore exclude_modules kv_cache_scheme "
FIELDS: dict[str, Known] = {  # by method
    "fp8": {
        **_free(_LEFT_OUT + "activation_scheme modules_to_convert dequantize weight_block_size"),
        "fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    },
    "fbgemm_fp8": _free(_LEFT_OUT + "activation_scale_ub"),
    "modelopt": {
        **_free(_LEFT_OUT + "config_groups producer kv_cache_quant_algo"),
        "quant_algo": ("FP8",),
    },
    "compressed-tensors": {
        **_free(_LEFT_OUT + "config_groups global_compression_ratio quantization_status version"),
        **_free("run_compressed dequantize use_optimized_inference"),
        "format": ("float-quantized", "naive-quantized", "mixed-precision", "dense"),
        "sparsity_config": {
            **_free("global_sparsity ignore registry_requires_subclass sparsity_structure targets"),
            "format": ("dense",),
        },
        "transform_config": {},
    },
}
_GROUP: Known = {
    **_free("targets weights input_activations output_activations"),
    "format": ("float-quantized", "naive-quantized"),
}
_WEIGHTS: Known = {
    **_free("strategy block_structure group_size observer observer_kwargs scale_dtype zp_dtype"),
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": (False,),
}
_NEXT = (
    "Only FP8 weights of types e4m3fn and e5m2 with plain scales are read: convert the original checkpoint."
)

# Endings of a scale's name: behind the whole name of its weight, or in the place of ".weight".
_BEHIND = ("_scale_inv", "_scale")
_INSTEAD = (".scale_inv", ".scale", ".qscale_weight")
_OF_STACK = (".weight_scale_inv", ".weight_scale")  # a stack's name has no ".weight"
OF_ACTIVATIONS = re.compile(
    r".*[._](input_scale|activation_scale|output_scale|[qkv]_scale|kv_scale|qscale_act)"
)


def read_forms(keys: Keys) -> tuple[Form, ...]:
    """What scales may be of. Experts in MXFP4 are the family's to read."""
    settings = keys.values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if settings is None or method == KEPT:
        return UNSAID
    if not isinstance(method, str) or method not in FIELDS:
        known = ", ".join(sorted(FIELDS))
        raise keys.error("quantization_config", f"null, or quant_method {known} or {KEPT}", _NEXT)
    keys.raw("quantization_config")
    assert isinstance(settings, dict)
    _check(keys, settings, {"quant_method": None} | FIELDS[method], "quantization_config")
    if settings.get("config_groups") or method == "compressed-tensors":
        return _forms_of_groups(keys, settings.get("config_groups") or {})
    if method == "fp8" and settings.get("weight_block_size") is not None:
        return (_block(keys, settings["weight_block_size"], "quantization_config.weight_block_size"),)
    return UNSAID if method == "fp8" else (TENSOR, CHANNEL)


def _check(keys: Keys, found: Any, known: Known, at: str) -> None:
    if not isinstance(found, dict):
        raise _error(keys, at, found, "an object")
    for name, value in found.items():
        if name not in known:
            if value not in (None, [], {}, ""):
                raise _error(keys, f"{at}.{name}", value, f"only {', '.join(known)}")
            continue
        allowed = known[name]
        if isinstance(allowed, dict):
            _check(keys, value or {}, allowed, f"{at}.{name}")
        elif allowed is not None and value is not None and value not in allowed:
            raise _error(keys, f"{at}.{name}", value, " or ".join(map(repr, allowed)))


def _forms_of_groups(keys: Keys, groups: Any) -> tuple[Form, ...]:
    at = "quantization_config.config_groups"
    forms: list[Form] = []
    if not isinstance(groups, dict):
        raise _error(keys, at, groups, "an object")
    for name, group in groups.items():
        _check(keys, group, _GROUP, f"{at}.{name}")
        weights, here = group.get("weights"), f"{at}.{name}.weights"
        if weights is None:
            continue
        _check(keys, weights, _WEIGHTS, here)
        size = weights.get("group_size")
        strategy = weights.get("strategy") or (TENSOR if size is None else CHANNEL if size == -1 else "group")
        if strategy == "block":
            forms.append(_block(keys, weights.get("block_structure"), f"{here}.block_structure"))
        elif strategy == "group":
            forms.append(_block(keys, [1, size], f"{here}.group_size"))
        elif strategy in (TENSOR, CHANNEL):
            forms.append(strategy)
        else:
            raise _error(keys, f"{here}.strategy", strategy, "tensor, channel, group or block")
    return tuple(forms) or UNSAID


def _block(keys: Keys, found: Any, at: str) -> tuple[int, int]:
    sizes = found
    if isinstance(found, str):  # "128x128"
        sizes = [int(part) for part in found.split("x") if part.isdecimal() and len(part) < 10]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < 2**31 for one in sizes)
    ):
        raise _error(keys, at, found, "two numbers above 0, of rows and of columns")
    return sizes[0], sizes[1]


def _error(keys: Keys, at: str, found: Any, wanted: str) -> ConversionError:
    return ConversionError(f"{keys.path}: {at} = {found!r:.80}; expected {wanted}. {_NEXT}")


def _names(weight: str) -> list[str]:
    """What the scale of a weight may be called."""
    base = weight.removesuffix(".weight")
    names = [weight + end for end in _BEHIND] + [base + end for end in _INSTEAD]
    return names + [base + end for end in (_BEHIND if base != weight else _OF_STACK)]


def is_scale(short: str, weight: str) -> bool:
    return short in _names(weight)


def scaled(view: View, tensors: Mapping[str, SourceTensor], short: str, forms: Sequence[Form]) -> View:
    """The view with its scale, if its tensor is FP8. `short`: the tensor's name without wrappers."""
    tensor = view.tensor
    if tensor.dtype not in WEIGHTS or view.flat:
        return view
    names = _names(short)
    found = [tensors[name] for name in names if name in tensors]
    if not found:
        raise ConversionError(
            f"{tensor.name} in {tensor.file.name} is FP8 ({tensor.dtype}), but its scale "
            f"{tensor.name.removesuffix(short)}{names[0]} (or {', '.join(names[1:5])}) is absent. Check that "
            "the download is complete."
        )
    if len(found) > 1:
        raise ConversionError(
            f"{tensor.name} has two scales, {found[0].name} and {found[1].name}. Remove the one that does "
            "not belong to this checkpoint."
        )
    return replace(view, grid=_grid(tensor, found[0], view.transposed, forms))


def _grid(tensor: SourceTensor, scale: SourceTensor, transposed: bool, forms: Sequence[Form]) -> Grid:
    if scale.dtype not in ("F32", "F16", "BF16", *EXPONENTS):
        raise ConversionError(
            f"{scale.name} in {scale.file.name} is {scale.dtype}; expected F32, F16, BF16 or F8_E8M0."
        )
    wanted = []
    for form in forms:
        for shape, grid in _fitting(scale, tensor.shape, transposed, form):
            if scale.shape == shape:
                return grid
            wanted.append(str(list(shape)))
    step = "Check that quantization_config in config.json belongs to these weights."
    if forms is UNSAID:
        step = (
            "These are of a tensor, its outputs and blocks of 128 x 128, since config.json says no block: "
            'quantization_config {"quant_method": "fp8", "weight_block_size": [rows, columns]} would say '
            "another one."
        )
    raise ConversionError(
        f"{scale.name} in {scale.file.name} has shape {list(scale.shape)}; {tensor.name} "
        f"{list(tensor.shape)} needs {' or '.join(dict.fromkeys(wanted))}. {step}"
    )


def _fitting(
    scale: SourceTensor, shape: tuple[int, ...], transposed: bool, form: Form
) -> list[tuple[tuple[int, ...], Grid]]:
    """Shapes that the scale of a tensor [(experts,) rows, cols] may have, and what they mean."""
    lead, (rows, cols) = shape[:-2], shape[-2:]
    experts = lead[0] if lead else 1

    def grid(count: int, down: int, across: int) -> Grid:
        return Grid(scale, (count, -(-rows // down), -(-cols // across)), (down, across))

    if form == TENSOR:
        each = [(lead + (1,) * n, grid(experts, rows, cols)) for n in range(3) if lead]
        return [((1,) * n, grid(1, rows, cols)) for n in range(3)] + each
    if form == CHANNEL:
        found = grid(experts, rows, 1) if transposed else grid(experts, 1, cols)
        return [((*lead, max(found.shape[1:])), found), ((*lead, *found.shape[1:]), found)]
    assert isinstance(form, tuple)
    found = grid(experts, *form)
    return [((*lead, *found.shape[1:]), found)]
