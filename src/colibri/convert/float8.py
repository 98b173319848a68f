"""Numbers of 8 bits in safetensors files: e4m3, e5m2, and e8m0, a power of two that scales them.

Owns: the value of each byte, and reading such tensors as bytes, which safetensors does not give to numpy.
Refuses: nothing; checkpoint.py has had the file's header checked.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

WEIGHTS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
EXPONENTS = ("F8_E8M0", "U8")  # of scales; some writers know no dtype for them


@cache
def values(dtype: str) -> Float32:
    """float32 of each of the 256 bytes, exactly."""
    import ml_dtypes

    name = WEIGHTS.get(dtype, "float8_e8m0fnu")
    numbers: Float32 = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
    return numbers


def header(file: Path) -> dict[str, Any]:
    """Byte range of each tensor of a safetensors file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        entries: dict[str, Any] = json.loads(stream.read(size))
    return {
        name: (8 + size + entry["data_offsets"][0], entry["shape"])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def stored_bytes(file: Path, place: tuple[int, list[int]]) -> Bytes:
    """A tensor of one byte an element, mapped."""
    offset, shape = place
    if 0 in shape:
        return np.zeros(shape, np.uint8)
    return np.memmap(file, np.uint8, "r", offset, tuple(shape))
