"""Brings a model's weights into memory: ahead into the page cache, or at once into private memory.

Owns: the names of the kinds, the thread that fetches. Refuses: copying; the library does it, and no choice
here changes a result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from colibri import _native as native
from colibri.errors import ArgumentError, CancelledError, MemoryPlanError

Progress = Callable[[int, int], object]  # bytes done, bytes in all

RESIDENCIES = {"mapped": 0, "resident": 1}  # colibri_residency

_log = logging.getLogger("colibri")


def checked(residency: str, prefetch: bool) -> str:
    """The name itself; an unknown one, or a choice without effect, is refused."""
    if residency not in RESIDENCIES:
        raise ArgumentError(f"residency: expected one of {', '.join(RESIDENCIES)}, found {residency!r}")
    if residency == "resident" and not prefetch:
        raise ArgumentError(
            "prefetch=False has no effect with residency='resident', which copies the file at once"
        )
    return residency


def bring_in(
    model: native.ModelHandle, residency: str, prefetch: bool, progress: Progress | None
) -> Callable[[], None]:
    """Copies the weights now ("resident"), or starts to read them ahead ("mapped", unless prefetch is off).
    What it returns ends the reading; call it before the model is closed."""
    if residency == "resident":
        native.fetch(model, RESIDENCIES[residency], lambda done, total: progress and progress(done, total))
        return _nothing
    if not prefetch:
        return _nothing
    stop = threading.Event()
    thread = threading.Thread(
        target=_read_ahead, args=(model, stop, progress), name="colibri-prefetch", daemon=True
    )
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def _read_ahead(model: native.ModelHandle, stop: threading.Event, progress: Progress | None) -> None:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        if stop.is_set():
            raise CancelledError("the model was closed")

    try:
        native.fetch(model, RESIDENCIES["mapped"], report)
    except CancelledError:
        pass
    except MemoryPlanError as error:  # larger than memory: pages come when they are read
        _log.info("weights are not read ahead: %s", error)


def _nothing() -> None:
    pass
