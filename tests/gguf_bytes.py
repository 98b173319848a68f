"""Writes GGUF files for tests, whole or broken on purpose: every number can be replaced by a wrong one.

Owns: the format's bytes, written without the gguf package, which serves as the other opinion.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7}
CODES |= {"u64": 10, "i64": 11, "f64": 12}
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# By number; "-": no type, or none that tests write.
_NAMES = """
    F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 - Q2_K Q3_K Q4_K Q5_K Q6_K - IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL
    IQ3_S IQ2_S IQ4_XS - - I32 - - IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4
"""
TYPES = {name: number for number, name in enumerate(_NAMES.split()) if name != "-"}


@dataclass
class Tensor:
    """`shape`: outermost dimension first, as the elements count; `data`: its bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Wrong:
    """What is written in place of the right values."""

    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    n_dims: dict[str, int] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(found: Any) -> bytes:
    """A type and a value: int as u32 or i64, float as f32, list and array as arrays; (type, value) as it
    says."""
    if isinstance(found, tuple):
        code = CODES[found[0]]
        return struct.pack("<I" + FORMATS[code], code, found[1])
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, int):
        return struct.pack("<II", 4, found) if 0 <= found < 2**32 else struct.pack("<Iq", 11, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str | bytes):
        return struct.pack("<I", 8) + text(found)
    if isinstance(found, np.ndarray):
        code = CODES[f"{found.dtype.kind}{8 * found.itemsize}"]
        return struct.pack("<IIQ", 9, code, len(found)) + found.tobytes()
    assert isinstance(found, list)
    if found and isinstance(found[0], str):
        return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(map(text, found))
    kinds = {type(one) for one in found}
    code = 6 if float in kinds else 7 if bool in kinds else 5
    return struct.pack(f"<IIQ{len(found)}{FORMATS[code]}", 9, code, len(found), *found)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, wrong: Wrong | None = None
) -> bytes:
    tensors, wrong = tensors or {}, wrong or Wrong()
    alignment = metadata.get("general.alignment", 32)
    step = alignment if isinstance(alignment, int) and 0 < alignment <= 1 << 20 else 32
    counts = (
        len(tensors) if wrong.n_tensors is None else wrong.n_tensors,
        len(metadata) if wrong.n_keys is None else wrong.n_keys,
    )
    head = wrong.magic + struct.pack("<IQQ", wrong.version, *counts)
    head += b"".join(text(key) + value(found) for key, found in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % step)
        dims: Sequence[int] = wrong.dims.get(name, tensor.shape)
        head += text(name) + struct.pack(f"<I{len(dims)}Q", wrong.n_dims.get(name, len(dims)), *dims[::-1])
        type, offset = wrong.types.get(name, TYPES[tensor.type]), wrong.offsets.get(name, len(data))
        head += struct.pack("<IQ", type, offset)
        data += tensor.data
    return head + bytes(-len(head) % step) + data
