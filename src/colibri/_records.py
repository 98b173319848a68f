"""What the library gives and takes, as Python values: one class for each C struct.

Owns: names, fields and shapes. Refuses: the library itself (_native.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    kv_type: int = 0
    prefetch: int = 0


_TRAFFIC = ("hits", "misses", "bytes_read", "wait_ns", "asked", "asked_used")
_GATE = np.dtype(
    [("state", "i4"), ("trials", "i4"), ("evaluations", "u8", 2), ("ns", "u8", 2), ("median_ns", "u8", 2)]
)


class Counters:
    """What a context adds to as long as it lives: colibri_traffic of each layer, and colibri_gate."""

    def __init__(self, n_layers: int) -> None:
        self.traffic = np.zeros((n_layers, len(_TRAFFIC)), np.uint64)
        self.gate = np.zeros((), _GATE)

    def by_layer(self) -> dict[str, Counts]:
        """Copies [n_layers], by the names of the fields."""
        return dict(zip(_TRAFFIC, self.traffic.T.copy(), strict=True))


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


class RoutingView:
    """colibri_routing as an observer gets it: what the router of one layer decided for the rows of one chunk.
    Valid during the call only; data() and rows() copy."""

    __slots__ = ("layer", "n_experts", "n_experts_used", "n_rows", "_buffer", "_found")

    def __init__(self, found: Any, buffer: Callable[[Any, int], Any]) -> None:
        """found: the C struct. buffer(pointer, bytes): the memory there."""
        self.layer: int = found.layer
        self.n_rows: int = found.n_rows
        self.n_experts: int = found.n_experts
        self.n_experts_used: int = found.n_experts_used
        self._found, self._buffer = found, buffer

    def data(self, name: str, columns: int = 1) -> bytes:
        """One of the arrays [n_rows, columns], as bytes: a third of a microsecond where an array costs
        several."""
        return self._buffer(getattr(self._found, name), 4 * self.n_rows * columns)[:]  # type: ignore[no-any-return]

    def rows(self) -> RoutingRows:
        """All of it."""
        n, e, k = self.n_rows, self.n_experts, self.n_experts_used
        return RoutingRows(
            self.layer,
            np.frombuffer(self.data("sequences"), np.int32),
            np.frombuffer(self.data("positions"), np.int32),
            np.frombuffer(self.data("logits", e), np.float32).reshape(n, e),
            np.frombuffer(self.data("experts", k), np.int32).reshape(n, k),
            np.frombuffer(self.data("weights", k), np.float32).reshape(n, k),
        )


class RoutingRows(NamedTuple):
    """What a RoutingView shows, copied; the arrays are read-only."""

    layer: int
    sequences: Ids  # [n_rows]
    positions: Ids  # [n_rows]
    logits: Floats  # [n_rows, n_experts]
    experts: Ids  # [n_rows, n_experts_used] best first
    weights: Floats  # [n_rows, n_experts_used]


class ExpertOutputs(NamedTuple):
    """colibri_expert as an observer gets it: what one routed expert said of the rows of a chunk that chose
    it. What it adds to a row is weight times output (of a model that weights what experts read, too)."""

    layer: int
    expert: int
    sequences: Ids  # [n_rows] of each row
    positions: Ids  # [n_rows]
    weights: Floats  # [n_rows] as in RoutingRows; 0: beyond what the expert takes
    outputs: Floats  # [n_rows, n_embd] a view: copy what should last, the next expert is written over it

    @classmethod
    def of(cls, found: Any, buffer: Callable[[Any, int], Any], outputs: Floats) -> ExpertOutputs:
        """found: the C struct. buffer(pointer, bytes): the memory there. outputs: where it wrote them."""

        def copied(name: str, count: int, type: Any = np.int32) -> Any:
            return np.frombuffer(buffer(getattr(found, name), 4 * count)[:], type)

        n = found.n_rows
        rows = copied("rows", n)
        last = int(rows[-1]) + 1
        return cls(
            found.layer,
            found.expert,
            copied("sequences", last)[rows],
            copied("positions", last)[rows],
            copied("weights", n, np.float32),
            outputs[:n],
        )


class Recording:
    """colibri_recording: arrays that evaluations append to, and views of what is there. rows: room for so
    many; layers: those with experts."""

    def __init__(self, rows: int, layers: int, used: int, experts: int, *, logits: bool) -> None:
        """experts: the most that a layer has. used: chosen for a token."""
        self.rows, choices = rows, rows * layers
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "chunks": np.empty((rows, 2), np.int32),
            "ids": np.empty(rows, np.int32),
            "positions": np.empty(rows, np.int32),
            "sequences": np.empty(rows, np.int32),
            "experts": np.empty((choices, used), np.int32),
            "weights": np.empty((choices, used), np.float32),
            "logits": np.empty((choices if logits else 0, experts), np.float32),
            "visit_ns": np.empty(choices * used, np.uint32),
            "visit_read": np.empty(choices * used, np.uint8),
        }


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
RoutingObserver = Callable[[RoutingView], object]


class ExpertObserver(NamedTuple):
    """Who sees what experts say, and where they write it."""

    see: Callable[[ExpertOutputs], object]
    outputs: Floats  # [chunk of Params, n_embd]
