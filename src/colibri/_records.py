"""What the library gives and takes, as Python values: one class for each C struct.

Owns: names, fields and shapes. Refuses: the library itself (_native.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """colibri_model_info: what colibri_open found."""

    n_vocab: int
    n_vocab_used: int
    n_layers: int
    n_embd: int
    n_experts: int
    n_experts_used: int
    context_length: int
    file_bytes: int
    model_bytes: int
    isa: str


@dataclass(frozen=True, slots=True)
class Params:
    """colibri_params without the caller's memory: the library reserves it."""

    context: int
    max_batch: int
    threads: int
    chunk: int
    pin: int = 0
    memory_limit: int = 0
    expert_slots: int = 0
    expert_policy: int = 0
    lanes: int = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """colibri_memory_plan: bytes by category, known before anything is taken."""

    process: int
    weights_mapped: int
    weights_resident: int
    model: int
    expert_cache: int
    kv_cache: int
    activations: int
    sampling: int
    threads: int
    control: int
    context_bytes: int
    total_bytes: int
    slot_bytes: int
    expert_slots: int


class RoutingRows(NamedTuple):
    """colibri_routing: what the router of one layer decided for the rows of one chunk. The arrays are
    copies."""

    layer: int
    sequences: Ids  # [n_rows]
    positions: Ids  # [n_rows]
    logits: Floats  # [n_rows, n_experts]
    experts: Ids  # [n_rows, n_experts_used] best first
    weights: Floats  # [n_rows, n_experts_used]


class Input(NamedTuple):
    """colibri_input: ids to append to a sequence; `logits` [n_logits, n_vocab] receives those of the last
    ones."""

    sequence: int
    ids: Ids
    logits: Floats | None


@dataclass(frozen=True, slots=True)
class Sampler:
    """colibri_sampling."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


Progress = Callable[[int, int], object]
RoutingObserver = Callable[[RoutingRows], object]
