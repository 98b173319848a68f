"""Where a model's weights are: what "auto" becomes, and how they get there.

Owns: the choice between mapped, resident and streamed; the thread that reads ahead; what streamed experts
cost (Traffic). Refuses: copying; the library does it, and no choice here changes a result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from colibri import _native as native
from colibri._native import Counters, Counts
from colibri.arguments import POLICIES, PREFETCHES, RESIDENCIES, Opening
from colibri.errors import ArgumentError, CancelledError, MemoryPlanError
from colibri.memory import available_bytes, resident_bytes

_log = logging.getLogger("colibri")
_SHARE = 0.9  # of the memory that the machine has left, which experts may take where no limit is given
_BY_LAYER = ("hits", "misses", "bytes_read", "wait_ns", "asked", "asked_used")
_STATES = ("undecided", "on", "off")  # colibri_prefetch


@dataclass(frozen=True, slots=True)
class Way:
    """Evaluations of a few rows, as decoding is, with prefetch on or off."""

    evaluations: int
    ns: int  # that they took
    trial_median_ns: int  # of one, in the last trial; 0: there was none


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Whether experts that the next layer is likely to choose are read ahead, and why: now and then both ways
    take turns, and what had the lower median is kept."""

    state: str  # what is kept now: "on", "off", "undecided"
    trials: int  # that were decided
    off: Way
    on: Way

    @classmethod
    def of(cls, counters: Counters) -> Prefetch:
        gate = counters.gate
        off, on = (
            Way(int(gate["evaluations"][at]), int(gate["ns"][at]), int(gate["median_ns"][at]))
            for at in range(2)
        )
        return cls(_STATES[int(gate["state"])], int(gate["trials"]), off, on)

    def since(self, earlier: Prefetch) -> Prefetch:
        """Counts that were added after an earlier one; state and medians stay those of now."""
        off, on = (
            Way(now.evaluations - before.evaluations, now.ns - before.ns, now.trial_median_ns)
            for now, before in ((self.off, earlier.off), (self.on, earlier.on))
        )
        return Prefetch(self.state, self.trials - earlier.trials, off, on)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What streamed experts have cost since the model was opened. A use is of one expert by the rows that
    are evaluated together in one layer."""

    tokens: int  # rows evaluated
    hits: Counts  # [n_layers] uses of experts that were in a slot
    misses: Counts  # [n_layers] that had to be read
    bytes_read: Counts  # [n_layers]
    wait_ns: Counts  # [n_layers] nanoseconds that evaluations waited for reads
    asked: Counts  # [n_layers] experts that were asked for ahead
    asked_used: Counts  # [n_layers] of these, that came to use
    prefetch: Prefetch

    @classmethod
    def of(cls, tokens: int, counters: Counters) -> Traffic:
        return cls(tokens, **counters.by_layer(), prefetch=Prefetch.of(counters))

    @property
    def uses(self) -> int:
        """Of all layers."""
        return int(self.hits.sum() + self.misses.sum())

    @property
    def hit_rate(self) -> float:
        """Of all layers; 0 before the first use."""
        return int(self.hits.sum()) / self.uses if self.uses else 0.0

    @property
    def bytes_per_token(self) -> float:
        return int(self.bytes_read.sum()) / self.tokens if self.tokens else 0.0

    @property
    def wait_seconds(self) -> float:
        """Of all layers."""
        return int(self.wait_ns.sum()) / 1e9

    @property
    def asked_rate(self) -> float:
        """Of the experts that were asked for ahead, the share that came to use; 0 before the first."""
        asked = int(self.asked.sum())
        return int(self.asked_used.sum()) / asked if asked else 0.0

    def since(self, earlier: Traffic) -> Traffic:
        """What was added after an earlier one."""
        layers = {name: getattr(self, name) - getattr(earlier, name) for name in _BY_LAYER}
        return Traffic(self.tokens - earlier.tokens, **layers, prefetch=self.prefetch.since(earlier.prefetch))

    def totals(self) -> dict[str, Any]:
        """For JSON: all layers together."""
        return {
            "tokens": self.tokens,
            "hit_rate": self.hit_rate,
            "bytes_per_token": self.bytes_per_token,
            "wait_seconds": self.wait_seconds,
            "prefetch": {
                **asdict(self.prefetch),
                "asked": int(self.asked.sum()),
                "asked_used": int(self.asked_used.sum()),
            },
        }

    def as_dict(self) -> dict[str, object]:
        """For JSON: totals, and lists by layer."""
        return {**self.totals(), "layers": {name: getattr(self, name).tolist() for name in _BY_LAYER}}


def decide(
    model: native.ModelHandle, chosen: Opening, params: native.Params, n_experts: int
) -> tuple[str, native.Params]:
    """The residency, and the parameters with as many slots as it takes; n_experts: of all layers together.
    Raises MemoryPlanError where the limit is too low."""
    kind, limit = chosen.residency, chosen.memory_limit()
    if chosen.expert_slots is not None or (kind == "streamed" and n_experts == 0):
        _check_slots(chosen.expert_slots, n_experts)
        kind = "streamed"
    params = replace(
        params,
        memory_limit=limit,
        expert_slots=chosen.expert_slots or 0,
        expert_policy=POLICIES[chosen.expert_policy or "lfru"],
        prefetch=PREFETCHES[chosen.prefetch],
    )
    if kind in ("mapped", "resident"):
        params = replace(params, memory_limit=0)
        _check_whole(kind, native.plan(model, params), limit)
        return kind, params
    if limit == 0 and chosen.expert_slots is None and (free := available_bytes()) is not None:
        params = replace(params, memory_limit=int(_SHARE * free) + resident_bytes())
    try:
        slots = native.plan(model, params).expert_slots
        if kind == "streamed" and slots == 0:
            slots = _most_slots(model, params, n_experts)
    except MemoryPlanError as error:
        if kind == "streamed" or limit:  # the library calls the limit by another name
            raise MemoryPlanError(str(error).replace("memory_limit:", "memory:", 1)) from None
        _log.warning("more than memory holds, so the system reads pages as they are needed: %s", error)
        slots = 0
    if slots == 0:
        for name in ("expert_policy", "lanes"):
            if (value := getattr(chosen, name)) is not None:
                raise ArgumentError(
                    f"{name}={value!r} has no effect: no expert is streamed, since the model fits in memory, "
                    "has no experts, or not even one has room; leave it out, or give residency='streamed'"
                )
    return "streamed" if slots else "mapped", replace(params, expert_slots=slots, memory_limit=0)


def _most_slots(model: native.ModelHandle, params: native.Params, n_experts: int) -> int:
    """The library gives slots only where the whole does not fit without them: as many as the limit allows."""
    limit = params.memory_limit or 2**63
    few, many = 1, n_experts
    while few < many:
        slots = (few + many + 1) // 2
        total = native.plan(model, replace(params, expert_slots=slots, memory_limit=0)).total_bytes
        few, many = (slots, many) if total <= limit else (few, slots - 1)
    native.plan(model, replace(params, expert_slots=few))  # refuses even one, and says what is needed
    return few


def _check_slots(slots: int | None, n_experts: int) -> None:
    if n_experts == 0:
        raise ArgumentError(
            "residency='streamed' has no effect: the model has no routed experts; choose 'mapped' or "
            "'resident'"
        )
    if slots is not None and slots > n_experts:
        raise ArgumentError(
            f"expert_slots: expected 1 to {n_experts}, the experts of all layers, found {slots}"
        )


def _check_whole(kind: str, plan: native.MemoryPlan, limit: int) -> None:
    if limit and plan.total_bytes > limit:
        raise MemoryPlanError(
            f"memory: residency={kind!r} needs {plan.total_bytes:,} bytes, the limit is {limit:,}; raise it, "
            "or leave residency out: what does not fit is streamed"
        )


def bring_in(
    model: native.ModelHandle, kind: str, chosen: Opening, params: native.Params
) -> Callable[[], None]:
    """Copies the weights now ("resident", "streamed"), or starts to read them ahead ("mapped", unless
    prefetch is off). What it returns ends the reading; call it before the model is closed, from any
    thread."""
    progress = chosen.progress or _ignore
    if kind != "mapped":
        if kind == "resident":
            check_room(native.plan(model, params))
        native.fetch(model, RESIDENCIES[kind], progress)
        return _nothing
    if chosen.prefetch is False:
        return _nothing
    stop = threading.Event()
    thread = threading.Thread(
        target=_read_ahead, args=(model, stop, progress), name="colibri-prefetch", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # no thread can be had (a limit): pages come when they are read
        _log.info("weights are not read ahead: %s", error)
        return _nothing

    def end() -> None:
        stop.set()
        if thread is not threading.current_thread():  # progress may close the model; it ends later then
            thread.join()

    return end


def check_room(plan: native.MemoryPlan) -> None:
    """Raises MemoryPlanError where a copy of the weights does not fit beside the context."""
    weights, available = plan.weights_mapped + plan.weights_resident, available_bytes()
    if available is not None and weights + plan.context_bytes > available:
        raise MemoryPlanError(
            f"residency='resident' takes {weights:,} bytes for the weights, {plan.context_bytes:,} for the "
            f"context; available are {available:,}. Choose residency='mapped', or a smaller context"
        )


def _read_ahead(
    model: native.ModelHandle, stop: threading.Event, progress: Callable[[int, int], object]
) -> None:
    def report(done: int, total: int) -> None:
        progress(done, total)
        if stop.is_set():
            raise CancelledError("the model was closed")

    try:
        native.fetch(model, RESIDENCIES["mapped"], report)
    except CancelledError:
        pass
    except MemoryPlanError as error:  # larger than memory: pages come when they are read
        _log.info("weights are not read ahead: %s", error)
    except Exception:
        _log.exception("progress raised: weights are not read ahead further")


def _ignore(_done: int, _total: int) -> None:
    pass


def _nothing() -> None:
    pass
