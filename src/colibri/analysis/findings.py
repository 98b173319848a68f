"""What is wrong, or worth knowing, about a model's routers, in words, with the figure behind each.

A fault says that experts are wasted; a warning that something is uneven, which healthy models are often too;
a note says what experts are for. Thresholds, and where they are from:

    TOP_SHARE    an expert that more than 90 % of the rows choose: a layer has collapsed
    FEW_EXPERTS  so has one whose effective experts are fewer than k + 0.1 (E - k): nine tenths of the way
                 from all alike (E) to the same k for every row
    VARIATION    0.3, of the load's standard deviation by its mean, after what chance shows is taken off
                 (sqrt(cv^2 - noise^2)): a warning, no fault
    ENOUGH       expected choices of an expert, n k / E, from which on one that was never chosen is dead: one
                 with a tenth of its even share would be missed with a probability of e^-5 = 0.7 %
    ALIKE        0.99, cosine of the weights of two experts: copies, give or take rounding
    TELLING      1 %: what choices have to say of a label's entropy, beyond chance, to be worth a note
    PAIR         3 times: how much more often than by chance a pair goes together, to be worth a note; and 6
                 standard deviations of what chance gives (a Poisson count), since there are many pairs

Owns: thresholds and sentences. Refuses: measuring (measures.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from colibri.analysis import coactivation
from colibri.analysis.drift import bin_names
from colibri.analysis.information import Information
from colibri.analysis.load import Load
from colibri.analysis.measures import LayerMeasures, Measures
from colibri.analysis.specialisation import CLASSES, preferences

TOP_SHARE = 0.9
FEW_EXPERTS = 0.1
VARIATION = 0.3
ENOUGH = 50.0
ALIKE = 0.99
TELLING = 0.01
PAIR, PAIR_DEVIATIONS = 3.0, 6.0
SHOWN = 6  # of one kind, before the others are folded away
_LISTED = 8  # experts or pairs that a sentence names


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence. kind: collapse, dead, identical (faults), imbalance (a warning), short, domains, classes,
    drift, pairs, cache (notes)."""

    kind: str
    severity: str  # fault, warning, note
    layer: int | None
    text: str
    value: float  # the figure that the sentence is about

    def data(self) -> dict[str, Any]:
        return asdict(self)


def findings(measures: Measures) -> list[Finding]:
    """Faults first, by layer; then warnings, the worst first; then notes, one of a kind, of the layer that
    says most."""
    labels = measures.trace.header.labels
    found = [one for layer in measures.layers for one in (*_of_load(layer), *_of_weights(layer))]
    of_bins = [f"positions {name}" for name in bin_names(_most_bins(measures))]
    told: list[tuple[str, str, Sequence[str]]] = [
        ("domains", "the domain of a text", labels),
        ("classes", "the kind of token", CLASSES),
        ("drift", "the position in a text", of_bins),
    ]
    for kind, what, names in told:
        found += _telling(measures, kind, what, names)
    found += [*_of_pairs(measures), *_of_cache(measures)]
    order = ("fault", "warning", "note")
    worst = {id(one): -one.value if one.kind == "imbalance" else 0.0 for one in found}
    return sorted(found, key=lambda one: (order.index(one.severity), worst[id(one)]))


def by_kind(found: Sequence[Finding]) -> Iterator[tuple[list[Finding], list[Finding]]]:
    """Kind by kind, in the order of the first ones: (those to show, those to fold away)."""
    for kind in dict.fromkeys(one.kind for one in found):
        alike = [one for one in found if one.kind == kind]
        yield alike[:SHOWN], alike[SHOWN:]


def _most_bins(measures: Measures) -> int:
    return max((len(one.drift.table) for one in measures.layers), default=0)


def _of_load(one: LayerMeasures) -> Iterator[Finding]:
    load, where = one.load, f"layer {one.layer}"
    if load.n_experts == load.n_used or not load.n_rows:
        return
    collapsed = _collapse(load)
    if collapsed is not None:
        text, value = collapsed
        yield Finding("collapse", "fault", one.layer, f"{where}: {text}", value)
    if load.unused:
        yield _unused(one.layer, load)
    real = math.sqrt(max(0.0, load.variation**2 - load.noise**2))
    if real > VARIATION and collapsed is None:
        least = int(load.counts.argmin())
        text = (
            f"{where}: the load is uneven: its standard deviation is {load.variation:.2f} of its mean (above "
            f"{VARIATION}); expert {load.top} takes {_percent(load.top_share)} of tokens, expert "
            f"{least} takes {_percent(float(load.shares[least]))}; an even share is "
            f"{_percent(load.n_used / load.n_experts)}"
        )
        yield Finding("imbalance", "warning", one.layer, text, load.variation)


def _collapse(load: Load) -> tuple[str, float] | None:
    """(sentence, figure) of a layer that has enough rows to say so."""
    if load.n_rows < ENOUGH:
        return None
    if load.top_share > TOP_SHARE:
        most = np.flatnonzero(load.shares > TOP_SHARE).tolist()
        who = f"expert {most[0]} takes"
        if len(most) > 1:
            who = f"experts {_listed(most)} each take up to"
        return f"{who} {_percent(load.top_share)} of tokens", load.top_share
    effective = load.effective_experts
    if effective < load.n_used + FEW_EXPERTS * (load.n_experts - load.n_used):
        of = f"{load.n_experts} (a token chooses {load.n_used})"
        return f"the load is that of {effective:.2f} experts, of {of}", effective
    return None


def _unused(layer: int, load: Load) -> Finding:
    n, expected = len(load.unused), load.n_rows * load.n_used / load.n_experts
    who = f"expert {load.unused[0]} is" if n == 1 else f"{n} experts ({_listed(load.unused)}) are"
    if expected >= ENOUGH:
        text = f"layer {layer}: {who} never chosen in {load.n_rows} tokens: dead"
        return Finding("dead", "fault", layer, text, n)
    text = (
        f"layer {layer}: {who} not chosen in {load.n_rows} tokens; the trace is too short to call that dead: "
        f"an even share would be {expected:.0f} tokens, {ENOUGH:.0f} are wanted"
    )
    return Finding("short", "note", layer, text, n)


def _of_weights(one: LayerMeasures) -> Iterator[Finding]:
    if one.weights is None:
        return
    pairs = np.argwhere(np.triu(one.weights > ALIKE, 1)).tolist()
    if not pairs:
        return
    (first, second), n = pairs[0], len(pairs)
    cosine = float(one.weights[first, second])
    text = f"layer {one.layer}: experts {first} and {second} have the same weights (cosine {cosine:.4f})"
    if n > 1:
        named = ", ".join(f"{i} and {j}" for i, j in pairs[:_LISTED]) + (", …" if n > _LISTED else "")
        text = f"layer {one.layer}: {n} pairs of experts have the same weights (cosine > {ALIKE}): {named}"
    yield Finding("identical", "fault", one.layer, text, cosine)


def _telling(measures: Measures, kind: str, what: str, names: Sequence[str]) -> Iterator[Finding]:
    """Whether choices say anything of a label, and what, in the layer where they say most."""
    asked: list[tuple[int, Information]] = [
        (one.layer, getattr(one, kind)) for one in measures.layers if getattr(one, kind) is not None
    ]
    telling = [(layer, found) for layer, found in asked if found.above_chance and found.share >= TELLING]
    if not telling:
        return
    layer, most = max(telling, key=lambda one: one[1].bits)
    text = (
        f"layer {layer}: choices of experts depend on {what}: each says {most.bits:.3f} of "
        f"{most.entropy:.2f} bits of it ({_percent(most.share)}), beyond the {most.shuffled:.3f} "
        "that it says of shuffled ones"
    )
    if kind != "drift":
        text += _preference(most, names)
    if len(asked) > 1:
        text += f"; so in {len(telling)} of {len(asked)} layers, most in this one"
    yield Finding(kind, "note", layer, text, most.bits)


def _preference(found: Information, names: Sequence[str]) -> str:
    """The expert and the label that go together best, of labels that are there often enough."""
    lifts = np.nan_to_num(preferences(found))
    lifts[found.table.sum(1) < ENOUGH] = 0
    label, expert = (int(at) for at in np.unravel_index(int(lifts.argmax()), lifts.shape))
    if lifts[label, expert] <= 1:
        return ""
    of_expert = float(found.table[label, expert] / max(found.table[:, expert].sum(), 1))
    of_all = float(found.table[label].sum() / found.table.sum())
    return (
        f"; {_percent(of_expert)} of what expert {expert} takes is {names[label]}, which is "
        f"{_percent(of_all)} of all"
    )


def _of_pairs(measures: Measures) -> Iterator[Finding]:
    """The pair that goes together most, in any layer."""
    found = []
    for one in measures.layers:
        by_chance = coactivation.chance(one.load.n_experts, one.load.n_used)
        for pair in coactivation.strongest(one.pairs, one.load.n_rows, 1) if by_chance else ():
            times = pair.lift / by_chance
            if times > PAIR and pair.together * (1 - 1 / times) > PAIR_DEVIATIONS * math.sqrt(
                pair.together / times
            ):
                found.append((times, one.layer, pair))
    if found:
        times, layer, pair = max(found)
        text = (
            f"layer {layer}: experts {pair.first} and {pair.second} go together: in {pair.together} tokens, "
            f"{times:.1f} times as often as by chance"
        )
        yield Finding("pairs", "note", layer, text, times)


def _of_cache(measures: Measures) -> Iterator[Finding]:
    """The fewest slots that LFRU needs to find four accesses of five."""
    curve, n = measures.curve, measures.decoding.accesses.n_experts
    for slots, rate in zip(curve.slots, curve.hit_rates["lfru"], strict=True):
        if rate >= 0.8 and slots < n:
            optimum = curve.hit_rates["belady"][curve.slots.index(slots)]
            text = (
                f"a cache of {slots} of {n} experts ({_percent(slots / n)}) has {_percent(rate)} of what "
                f"decoding asks for, with LFRU; no policy has more than {_percent(optimum)}"
            )
            yield Finding("cache", "note", None, text, rate)
            return


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")


def _listed(experts: list[int]) -> str:
    return ", ".join(map(str, experts[:_LISTED])) + (", …" if len(experts) > _LISTED else "")
