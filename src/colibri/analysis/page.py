"""A report as one page: findings and figures as text, pictures drawn by its own script from data inside it.

Owns: what of the measures goes into the page, how many texts, that nothing in them can end the data block or
become mark-up, and what the file may be written over. The page loads nothing: its policy allows no network
and no script but its own, by hash. Refuses: measuring; drawing (page.js, page.css).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from colibri.analysis import coactivation, reuse
from colibri.analysis.array_file import Array
from colibri.analysis.drift import bin_names
from colibri.analysis.findings import Finding, by_kind
from colibri.analysis.information import Information
from colibri.analysis.measures import LayerMeasures, Measures
from colibri.analysis.specialisation import CLASSES
from colibri.aside import check_place, write_whole
from colibri.errors import ArgumentError

MARK = '<meta name="generator" content="colibri report">'
MOST_ROWS = 6000  # tokens whose choices are in the page
MOST_CHOICES = 3 << 20  # of these tokens, in all layers
NONE = 65535  # a layer that a row does not pass
_LIFT_SPAN = 3.0  # log2: from an eighth to eight times
_SEVERITIES = {"fault": "Fault", "warning": "Warning", "note": "Note"}


def check_file(file: Path) -> None:
    """An error unless a report may be written there: a new file, or an older report."""
    if file.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"output: expected a file name that ends in .html, found {str(file)!r}")
    check_place(file)
    if file.exists():
        with file.open("rb") as opened:
            head = opened.read(4096)
        if head and MARK.encode() not in head:
            raise ArgumentError(f"output: {file} exists and is no report, so it is left as it is")


def write(measures: Measures, found: Sequence[Finding], file: Path) -> None:
    """Writes the page aside, then takes the name."""
    check_file(file)
    write_whole(file, page(measures, found))


def page(measures: Measures, found: Sequence[Finding]) -> str:
    """The whole page."""
    here = files("colibri.analysis")
    script, style = (here.joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    body = here.joinpath("page.html").read_text("utf-8")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}"
    name = str(measures.trace.header.model.get("name", "a model"))
    parts = {
        "policy": escape(policy),
        "mark": MARK,
        "title": escape(name),
        "summary": escape(_summary(measures)),
        "findings": _findings(found),
        "balance": _balance(measures.layers),
        "missing": "".join(f"<li>{escape(text)}</li>" for text in _missing(measures)),
        "style": style,
        "data": _embedded(page_data(measures)),
        "script": script,
    }
    for part, text in parts.items():
        before, mark, after = body.partition(f"<!--{part}-->")
        assert mark, part
        body = before + text + after
    return body.encode("utf-8", "replace").decode()  # names may hold halves of characters


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Any) -> str:
    """JSON that no HTML parser sees the end of: every <, > and & is written as an escape of JSON."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- text


def _summary(measures: Measures) -> str:
    layers, trace = measures.layers, measures.trace
    experts = sorted({one.load.n_experts for one in layers})
    of = f"{experts[0]}" if len(experts) == 1 else f"{experts[0]} to {experts[-1]}"
    return (
        f"{trace.n_rows:,} tokens of {len(trace.array('sequence_labels')):,} texts; {len(layers)} layers of "
        f"{of} experts, of which a token chooses {trace.header.n_experts_used}; recorded in {trace.path.name}"
    )


def _missing(measures: Measures) -> Iterable[str]:
    if measures.container is None:
        yield "Texts of tokens, kinds of tokens and similarity of weights: give the model with --model."
    elif measures.tokens is None:
        yield "Texts and kinds of tokens: the model file has no tokenizer."
    if len(measures.trace.header.labels) < 2:
        yield "Specialisation by domain: trace JSON Lines whose objects have a domain (--jsonl, --label)."
    if measures.visits is None:
        yield "Time of experts and reads: the trace has none."


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return "<p>Nothing stands out.</p>"
    shown: list[str] = []
    for first, others in by_kind(found):
        shown += map(_finding, first)
        if others:
            more = f"{len(others)} more of this kind ({escape(others[0].kind)})"
            folded = "".join(map(_finding, others))
            shown.append(f"<li><details><summary>{more}</summary><ul>{folded}</ul></details></li>")
    return f'<ul class="findings">{"".join(shown)}</ul>'


def _finding(one: Finding) -> str:
    to = "" if one.layer is None else f' <a href="#layer" data-layer="{one.layer}">show layer {one.layer}</a>'
    return (
        f'<li class="{one.severity}"><strong>{_SEVERITIES[one.severity]}</strong> '
        f"<span>{escape(one.text)}</span>{to}</li>"
    )


def _balance(layers: Sequence[LayerMeasures]) -> str:
    """A row a layer."""

    def bits(found: Information | None) -> str:
        return "–" if found is None else f"{found.bits:.3f}" + ("" if found.above_chance else " (chance)")

    rows = []
    for one in layers:
        load = one.load
        cells = [
            f"{load.n_experts}",
            f"{load.effective_experts:.1f}",
            f"{load.variation:.2f}",
            f"{load.noise:.2f}",
            f"{load.maximal_violation:.2f}",
            f"{load.top_share:.1%} (expert {load.top})",
            f"{len(load.unused)}",
            bits(one.domains),
            bits(one.classes),
            bits(one.drift),
        ]
        head = f'<th scope="row"><a href="#layer" data-layer="{one.layer}">{one.layer}</a></th>'
        rows.append(f"<tr>{head}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "".join(rows)


# --- data


def page_data(measures: Measures) -> dict[str, Any]:
    """What the script draws."""
    most = max((len(one.drift.table) for one in measures.layers), default=0)
    return {
        "labels": list(measures.trace.header.labels),
        "classes": list(CLASSES),
        "bins": [f"position {name}" for name in bin_names(most)],
        "lift_span": _LIFT_SPAN,
        "layers": [_layer(measures, one) for one in measures.layers],
        "cache": {
            "slots": measures.curve.slots,
            "experts": measures.decoding.accesses.n_experts,
            "hit_rates": measures.curve.hit_rates,
            "accesses": measures.curve.accesses,
            "of_accesses": measures.curve.of_accesses,
        },
        "windows": [list(reuse.WINDOWS), measures.windows],
        "texts": _texts(measures),
    }


def _layer(measures: Measures, one: LayerMeasures) -> dict[str, Any]:
    load, n = one.load, one.load.n_experts
    chance = coactivation.chance(n, load.n_used)
    found: dict[str, Any] = {
        "layer": one.layer,
        "rows": load.n_rows,
        "k": load.n_used,
        "counts": load.counts.tolist(),
        "mass": np.round(load.mass, 3).tolist(),
        "lift": None,
        "usage": _triangle(one.usage, 0, 1),
        "weights": None if one.weights is None else _triangle(one.weights, -1, 1),
        "pairs": [list(pair) for pair in coactivation.strongest(one.pairs, load.n_rows)],
        "chance": chance,
    }
    if chance:
        with np.errstate(divide="ignore"):
            lifts = np.log2(coactivation.lift(one.pairs, load.n_rows) / chance)
        lifts[~coactivation.enough(one.pairs, load.n_rows)] = np.nan
        found["lift"] = _triangle(lifts, -_LIFT_SPAN, _LIFT_SPAN)
    for name in ("domains", "classes", "drift"):
        about: Information | None = getattr(one, name)
        if about is not None:
            found[name] = {
                "table": about.table.astype(np.int64).tolist(),
                "bits": about.bits,
                "entropy": about.entropy,
                "shuffled": about.shuffled,
                "above_chance": about.above_chance,
            }
    if measures.visits is not None:
        for name in ("visits", "ns", "reads"):
            found[name] = getattr(measures.visits, name)[one.layer, :n].tolist()
    return found


def _triangle(values: Array, low: float, high: float) -> str:
    """What stands above the diagonal, row by row, as bytes: 0 to 254 from low to high; 255: not known."""
    flat = np.asarray(values, np.float64)[np.triu_indices(len(values), 1)]
    scaled = np.round((np.clip(flat, low, high) - low) / (high - low) * 254)
    return _packed(np.where(np.isnan(flat), 255, scaled).astype(np.uint8))


def _packed(values: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


def _texts(measures: Measures) -> dict[str, Any]:
    """Some texts, each with the choices of its tokens in every layer."""
    trace, choices = measures.trace, measures.choices
    k, labels = trace.header.n_experts_used, trace.array("sequence_labels")
    sequences = trace.array("sequences")
    begins = np.searchsorted(sequences, np.arange(len(labels)))  # rows lie text by text
    lengths = np.bincount(sequences, minlength=len(labels))
    most = min(MOST_ROWS, max(1, MOST_CHOICES // max(1, k * len(choices))))
    shown: list[dict[str, Any]] = []
    rows: list[Array] = []
    for number in _in_turns(labels, lengths):
        room = most - sum(map(len, rows))
        if room <= 0:
            break
        own = np.arange(begins[number], begins[number] + min(int(lengths[number]), room))
        rows.append(own)
        shown.append(_text(measures, int(number), own, int(lengths[number])))
    chosen = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    experts = np.full((len(choices), len(chosen), k), NONE, np.uint16)
    weights = np.zeros(experts.shape, np.uint8)
    place = np.full(trace.n_rows, -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    for at, one in enumerate(choices):
        here = place[one.rows]
        taken = here >= 0
        experts[at, here[taken]] = one.experts[taken]
        scaled = np.clip(np.nan_to_num(one.weights[taken].astype(np.float32)), 0, 1) * 255
        weights[at, here[taken]] = np.round(scaled).astype(np.uint8)
    packed = {"experts": _packed(experts.astype("<u2")), "weights": _packed(weights)}
    return {"k": k, "rows": len(chosen), "of_texts": len(labels), "texts": shown, **packed}


def _in_turns(labels: Array, lengths: Array) -> list[int]:
    """Texts that are not empty: one of each label, then a second one …"""
    seen: dict[int, int] = {}
    order = []
    for number in np.flatnonzero(lengths).tolist():
        turn = seen[int(labels[number])] = seen.get(int(labels[number]), 0) + 1
        order.append((turn, number))
    return [number for _, number in sorted(order)]


def _text(measures: Measures, number: int, rows: Array, length: int) -> dict[str, Any]:
    trace, tokens = measures.trace, measures.tokens
    ids = trace.array("ids")[rows]
    label = int(trace.array("sequence_labels")[number])
    if tokens is None:
        texts = [f" {id}" for id in ids.tolist()]
        names, classes = [f"id {id}" for id in ids.tolist()], []
    else:
        texts = tokens.texts(ids)
        names = [tokens.name(id) for id in ids.tolist()]
        classes = [CLASSES.index(tokens.classes[id]) for id in ids.tolist()]
    return {
        "number": number,
        "label": "" if label < 0 else trace.header.labels[label],
        "prompt": int(trace.array("sequence_prompts")[number]),
        "length": length,
        "ids": ids.tolist(),
        "positions": trace.array("positions")[rows].tolist(),
        "texts": texts,
        "names": names,
        "classes": classes,
    }
