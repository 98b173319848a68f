"""Time of experts, and whether they had to be read, where a trace recorded it (visit_ns, visit_read).

A visit is one expert that at least one row of a chunk chose in a layer: chunk by chunk, in a chunk layer by
layer, in a layer by ascending expert. So visits are the accesses of replay.demand() as recorded.

Owns: sums by layer and expert. Refuses: recording.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri.analysis.replay import demand
from colibri.analysis.trace import Trace
from colibri.errors import TraceError

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Visits:
    """Sums, each [n_layers, most experts]."""

    visits: Integers
    ns: Integers  # of work, all threads together
    reads: Integers  # visits for which the expert was read from the file


def visits_of(trace: Trace) -> Visits | None:
    """None where a trace has no times."""
    if not {"visit_ns", "visit_read"} <= trace.header.columns().keys() or not trace.n_rows:
        return None
    return summed(trace, trace.array("visit_ns"), trace.array("visit_read"))


def summed(trace: Trace, ns: npt.NDArray[np.uint32], read: npt.NDArray[np.uint8]) -> Visits:
    """ns, read: [n_visits]."""
    found = demand(trace)
    experts = found.accesses.experts
    if len(ns) != len(experts) or len(read) != len(experts):
        raise TraceError(
            f"{trace.path}: expected {len(experts)} visits of experts, found {len(ns)} times and {len(read)} "
            "reads; the file is damaged, record the trace again"
        )
    n = found.accesses.n_experts
    sums = (np.ones(len(experts)), ns.astype(np.float64), (read != 0).astype(np.float64))
    counts = np.array(trace.header.n_experts, np.int64)
    tables = []
    for values in sums:
        table = np.zeros((len(counts), int(counts.max())), np.int64)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.bincount(experts, values, n).astype(np.int64)
        tables.append(table)
    return Visits(*tables)
