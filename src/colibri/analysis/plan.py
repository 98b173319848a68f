"""What a model will take and how fast it may decode, before anything is taken: colibri.plan().

Owns: sizes worth considering, the hit rate of uniform routing, the estimate of speed. Bytes are the
library's own plan, which the context's layout is made by; where weights will lie is decided by the code that
load() uses. Refuses: promises of speed.

A decoded token takes, in seconds,

    bytes of memory / memory bandwidth  +  (1 - hit rate) x bytes of its experts / disk bandwidth

- Bytes of memory: every weight that a token needs, and keys and values of half of `context` positions, as
  analysis/cost.py counts them. An expert that was read from disk is read from memory then, too.
- Bandwidths are measured: disk.py reads this very file in pieces as large as an expert's, past the page
  cache, `lanes` at a time; bandwidth.py reads memory with as many threads as the model would use.
- Reading and computing are added. The engine reads while it computes with those experts of the layer that it
  has, so it may be faster, at most as fast as the larger of the two allows.
- Routing is uniform: every expert is as likely as any other, whatever came before. Then an expert is in the
  cache with probability slots / experts, whatever the policy. Trained routers repeat themselves: more hits.
- With fewer slots than one token uses in all layers together there is no hit: before a layer comes again, all
  others have asked for their experts. (LRU has none then; LFRU keeps few.)
- Mapped weights that do not fit in memory are read anew for every token: a token reads all of its weights in
  the same order, so the page cache drops each page before it comes again.
- What is neither weights nor keys and values is left out: of a small model the speed is an upper bound.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from colibri import _native as native
from colibri import residency as residency_rules
from colibri.analysis import bandwidth, disk
from colibri.analysis.cost import Cost, cost
from colibri.arguments import POLICIES, Opening
from colibri.cache import resolve
from colibri.memory import available_bytes
from colibri.opened import Opened, open_file

_log = logging.getLogger("colibri")
_CATEGORIES = (
    "process",
    "weights_mapped",
    "weights_resident",
    "model",
    "expert_cache",
    "kv_cache",
    "activations",
    "sampling",
    "threads",
    "control",
)
HitRate = Callable[[int], float]  # slots to the share of uses that find their expert there


@dataclass(frozen=True, slots=True)
class Size:
    """A number of slots, and what is to be expected of it."""

    name: str
    expert_slots: int
    total_bytes: int  # of everything; as a memory limit it gives so many slots
    hit_rate: float
    tok_per_s: float | None  # None: bandwidths were not measured


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of this machine, measured now; 1e9 bytes."""

    disk_gb_per_s: float
    disk_method: str
    memory_gb_per_s: float
    memory_method: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What load() with the same arguments would take. Bytes, all categories but `process` exactly; that one
    is what this process holds, and another of the same program the same but for a megabyte or so."""

    path: Path
    residency: str  # that would be chosen
    expert_slots: int  # 0: experts are read where the file is mapped, or from the copy of it
    expert_policy: str
    lanes: int
    kv_type: str
    threads: int
    context: int
    max_batch: int
    chunk: int
    memory_limit: int | None  # that was given
    available_bytes: int | None  # what the machine or the control group has left; None: not told
    floor_bytes: int  # the least memory limit that load() with the same other arguments takes
    planned_bytes: int  # the sum of the categories
    categories: dict[str, int]
    n_experts: int  # of all layers together
    experts_per_token: int  # of all layers together that decode
    slot_bytes: int
    bytes_per_token: int  # that a decoded token reads from memory, at half of the context
    expert_bytes_per_token: int  # of these, experts
    hit_rate: float | None  # expected of streamed experts; None: none is streamed
    tok_per_s: float | None  # expected of one sequence; None: bandwidths were not measured
    speeds: Speeds | None
    sizes: tuple[Size, ...]  # worth considering, smallest first; () without experts

    def as_dict(self) -> dict[str, Any]:
        """For JSON, by the same names."""
        return asdict(self) | {"path": str(self.path)}


def plan(
    path: str | os.PathLike[str],
    *,
    memory: int | str | None = None,
    context: int | None = None,
    max_batch: int = 1,
    threads: int | None = None,
    chunk: int | None = None,
    residency: str = "auto",
    expert_slots: int | None = None,
    expert_policy: str | None = None,
    lanes: int | None = None,
    prefetch: bool | None = None,
    kv_type: str = "f32",
    type: str | None = None,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    requantize: bool = False,
    measure: bool = True,
    hit_rate: HitRate | None = None,
) -> Plan:
    """Plans a model as load() with the same arguments would open it, and takes nothing but this process's
    tokenizer. A directory or a GGUF file is converted into the cache first, as load() does.

    measure: read the file and memory for two or three seconds to estimate speed. hit_rate: what is expected
    of a number of slots, such as a recorded trace tells; by default that of uniform routing. Raises
    MemoryPlanError, as load() would, where `memory` is too low: it names the number that is needed."""
    chosen = Opening(
        threads=threads,
        context=context,
        max_batch=max_batch,
        chunk=chunk,
        residency=residency,
        memory=memory,
        expert_slots=expert_slots,
        expert_policy=expert_policy,
        lanes=lanes,
        prefetch=prefetch,
        kv_type=kv_type,
    )
    file = resolve(
        path,
        type,
        notify=_log.info,
        experts=experts,
        dense=dense,
        output=output,
        requantize=requantize,
    )
    opened = open_file(file, chosen)
    try:
        return _plan(file, opened, chosen, measure, hit_rate)
    finally:
        native.close_model(opened.handle)


def _plan(path: Path, opened: Opened, chosen: Opening, measure: bool, hit_rate: HitRate | None) -> Plan:
    kind, params = residency_rules.decide(opened.handle, chosen, opened.params, opened.n_experts)
    found, available = native.plan(opened.handle, params), available_bytes()
    if kind == "resident":
        residency_rules.check_room(found)
    least = {0, min(1, opened.n_experts)} if chosen.residency == "auto" else {int(kind == "streamed")}
    least = {chosen.expert_slots} if chosen.expert_slots is not None else least
    floor = min(_with_slots(opened, params, slots).total_bytes for slots in least)
    categories = {name: getattr(found, name) for name in _CATEGORIES}
    if kind != "mapped":
        categories["weights_resident"] += categories["weights_mapped"]
        categories["weights_mapped"] = 0
    demand, n_decoding = _demand(opened.config)
    hits = hit_rate or _uniform(demand, n_decoding)
    price = cost(path, chosen.kv_type)
    speeds = _measure(path, params, found.slot_bytes) if measure else None
    fits = available is None or categories["weights_mapped"] <= available
    expected = hits(params.expert_slots) if kind == "streamed" else None
    return Plan(
        path=path,
        residency=kind,
        expert_slots=params.expert_slots,
        expert_policy=next(name for name, at in POLICIES.items() if at == params.expert_policy),
        lanes=params.lanes,
        kv_type=chosen.kv_type,
        threads=params.threads,
        context=params.context,
        max_batch=params.max_batch,
        chunk=min(params.chunk, params.context * params.max_batch),
        memory_limit=chosen.memory_limit() or None,
        available_bytes=available,
        floor_bytes=floor,
        planned_bytes=found.total_bytes,
        categories=categories,
        n_experts=opened.n_experts,
        experts_per_token=demand,
        slot_bytes=found.slot_bytes,
        bytes_per_token=round(price.decode_bytes(params.context / 2)),
        expert_bytes_per_token=price.experts_bytes,
        hit_rate=expected,
        tok_per_s=_tok_per_s(price, params, speeds, expected, fits),
        speeds=speeds,
        sizes=tuple(_sizes(opened, params, demand, hits, price, speeds)),
    )


def _demand(config: dict[str, Any]) -> tuple[int, int]:
    """Experts that one decoded token uses in all layers, and those that it chooses among."""
    layers = [count for count in config["n_experts"][config["n_encoder_layers"] :] if count]
    return config["n_experts_used"] * len(layers), sum(layers)


def _uniform(demand: int, n_experts: int) -> HitRate:
    return lambda slots: min(1.0, slots / n_experts) if n_experts and slots >= demand else 0.0


def _with_slots(opened: Opened, params: native.Params, slots: int) -> native.MemoryPlan:
    return native.plan(opened.handle, replace(params, expert_slots=slots, memory_limit=0))


def _sizes(
    opened: Opened, params: native.Params, demand: int, hits: HitRate, price: Cost, speeds: Speeds | None
) -> list[Size]:
    n = opened.n_experts
    named = [
        ("one slot", 1),
        ("one token of all layers", demand),
        ("25 %", -(-n // 4)),
        ("50 %", -(-n // 2)),
        ("all experts", n),
    ]
    by_slots: dict[int, list[str]] = {}
    for name, slots in named if n else []:
        by_slots.setdefault(slots, []).append(name)
    return [
        Size(
            ", ".join(names),
            slots,
            _with_slots(opened, params, slots).total_bytes,
            hits(slots),
            _tok_per_s(price, params, speeds, hits(slots), True),
        )
        for slots, names in sorted(by_slots.items())
    ]


def _measure(path: Path, params: native.Params, slot_bytes: int) -> Speeds:
    read = disk.measure(path, params.lanes, min(slot_bytes or disk.PIECE_BYTES, disk.PIECE_BYTES))
    memory = bandwidth.Probe().read(params.threads)
    return Speeds(read.gb_per_s, read.method, memory.gb_per_s, bandwidth.NAME)


def _tok_per_s(
    price: Cost, params: native.Params, speeds: Speeds | None, hit_rate: float | None, fits: bool
) -> float | None:
    """hit_rate None: nothing is streamed; fits: what is mapped fits in memory."""
    if speeds is None:
        return None
    read = price.decode_bytes(params.context / 2)
    missed = (1 - hit_rate) * price.experts_bytes if hit_rate is not None else 0.0
    if not fits:
        missed = price.decode_bytes(0)
    return 1e9 / (read / speeds.memory_gb_per_s + missed / speeds.disk_gb_per_s)
