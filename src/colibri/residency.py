"""Brings a model's weights into memory: ahead into the page cache, or at once into private memory.

Owns: the thread that fetches, and that a copy is begun only if the context fits beside it. Refuses: copying;
the library does it, and no choice here changes a result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from colibri import _native as native
from colibri.arguments import RESIDENCIES, Opening
from colibri.errors import CancelledError, MemoryPlanError
from colibri.memory import available_bytes

_log = logging.getLogger("colibri")


def bring_in(model: native.ModelHandle, chosen: Opening, params: native.Params) -> Callable[[], None]:
    """Copies the weights now ("resident"), or starts to read them ahead ("mapped", unless prefetch is off).
    What it returns ends the reading; call it before the model is closed, from any thread."""
    progress = chosen.progress or _ignore
    if chosen.residency == "resident":
        _check_room(native.plan(model, params))
        native.fetch(model, RESIDENCIES["resident"], progress)
        return _nothing
    if not chosen.prefetch:
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


def _check_room(plan: native.MemoryPlan) -> None:
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
