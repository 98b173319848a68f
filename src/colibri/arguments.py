"""Checks of what a program passes to a model: counts and ids.

Owns: their bounds as texts. Refuses: sampling parameters (sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri._native import Ids
from colibri.errors import ArgumentError

IdList = Sequence[int] | npt.NDArray[np.integer[Any]]


def bounded(name: str, value: object, high: int, *, optional: bool = True) -> int | None:
    """The value itself; None stays None where it stands for the default."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= high:
        raise ArgumentError(f"{name}: expected an integer from 1 to {high}, found {value!r}")
    return int(value)


def checked_ids(ids: IdList, n_vocab: int) -> Ids:
    """Contiguous int32 [n], n at least 1, every id a row of the embedding."""
    if isinstance(ids, str | bytes):
        raise ArgumentError(
            "ids: expected a list of integers, found a text; Model.tokenizer.encode makes ids of it"
        )
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"ids: expected a list of integers, found {ids!r:.80}")
    if not array.size:
        raise ArgumentError("ids: expected at least one, found none")
    wrong = np.flatnonzero((array < 0) | (array >= n_vocab))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(f"ids[{at}]: expected 0 to {n_vocab - 1} (n_vocab - 1), found {array[at]}")
    return np.ascontiguousarray(array, np.int32)
