"""A tensor of a source: its name, the file that holds it, its stored type, its shape.

Owns: that record, for safetensors and GGUF alike. Refuses: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """`name`: the one in its file; `dtype`: as safetensors (BF16, I32 ...) or ggml (Q4_K ...) call it;
    `shape`: outermost dimension first; `offset`: of its bytes from the start of a GGUF file, elsewhere
    safetensors knows.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int | None = None
