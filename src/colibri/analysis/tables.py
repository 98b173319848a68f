"""The figures of a report as CSV files, one a kind, for spreadsheets and data frames.

Owns: their names and columns (docs/MICROSCOPE.md). Refuses: measuring.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colibri.analysis import coactivation
from colibri.analysis.drift import bin_names
from colibri.analysis.findings import Finding
from colibri.analysis.information import Information
from colibri.analysis.measures import Measures
from colibri.analysis.specialisation import CLASSES, preferences
from colibri.aside import write_whole

Row = Sequence[Any]
_PAIRS = 100  # of a layer


def write(measures: Measures, found: Sequence[Finding], directory: Path) -> list[Path]:
    """Writes every table into a directory that is there; returns their files."""
    tables: dict[str, tuple[Sequence[str], Iterable[Row]]] = {
        "findings": (
            ("kind", "severity", "layer", "value", "text"),
            ((one.kind, one.severity, one.layer, one.value, one.text) for one in found),
        ),
        "layers": (_LAYER_COLUMNS, _layers(measures)),
        "load": (("layer", "expert", "tokens", "share", "mass", "visits", "ns", "reads"), _load(measures)),
        "pairs": (("layer", "first", "second", "tokens", "lift", "usage", "weights"), _pairs(measures)),
        "cache": (("slots", *measures.curve.hit_rates), _cache(measures)),
    }
    labels = measures.trace.header.labels
    bins = bin_names(max((len(one.drift.table) for one in measures.layers), default=0))
    named: dict[str, Sequence[str]] = {"domains": labels, "classes": CLASSES, "drift": bins}
    for name, names in named.items():
        rows = list(_about(measures, name, names))
        if rows:
            tables[name] = (("layer", "label", "expert", "choices", "lift"), rows)
    files = []
    for name, (columns, body) in tables.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(body)
        files.append(directory / f"{name}.csv")
        write_whole(files[-1], text.getvalue().encode("utf-8", "replace"))
    return files


_LAYER_COLUMNS = (
    *("layer", "tokens", "n_experts", "n_experts_used", "entropy", "effective_experts", "variation", "noise"),
    *("maximal_violation", "top_expert", "top_share", "unused", "domain_bits", "class_bits", "drift_bits"),
)


def _layers(measures: Measures) -> Iterator[Row]:
    for one in measures.layers:
        load = one.load
        about: tuple[Information | None, ...] = (one.domains, one.classes, one.drift)
        yield (
            *(one.layer, load.n_rows, load.n_experts, load.n_used, load.entropy, load.effective_experts),
            *(load.variation, load.noise, load.maximal_violation, load.top, load.top_share, len(load.unused)),
            *(None if found is None else found.bits for found in about),
        )


def _load(measures: Measures) -> Iterator[Row]:
    visits = measures.visits
    for one in measures.layers:
        for expert in range(one.load.n_experts):
            at = one.layer, expert
            times: Row = (None,) * 3
            if visits is not None:
                times = int(visits.visits[at]), int(visits.ns[at]), int(visits.reads[at])
            share, mass = float(one.load.shares[expert]), float(one.load.mass[expert])
            yield (*at, int(one.load.counts[expert]), share, mass, *times)


def _pairs(measures: Measures) -> Iterator[Row]:
    """The strongest of each layer."""
    for one in measures.layers:
        for pair in coactivation.strongest(one.pairs, one.load.n_rows, _PAIRS):
            at = pair.first, pair.second
            weights = None if one.weights is None else float(one.weights[at])
            yield (one.layer, *pair, float(one.usage[at]), weights)


def _about(measures: Measures, name: str, names: Sequence[str]) -> Iterator[Row]:
    for one in measures.layers:
        found: Information | None = getattr(one, name)
        if found is None:
            continue
        lifts = preferences(found)
        for label in range(len(found.table)):
            for expert in range(one.load.n_experts):
                if found.table[label].any():
                    count, lift = int(found.table[label, expert]), float(lifts[label, expert])
                    yield one.layer, names[label], expert, count, lift


def _cache(measures: Measures) -> Iterator[Row]:
    rates = measures.curve.hit_rates
    for at, slots in enumerate(measures.curve.slots):
        yield (slots, *(rate[at] for rate in rates.values()))
