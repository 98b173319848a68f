"""A profile as an icicle: engine, then prefill and decode, layers, phases, experts; width is time.

Owns: one standalone SVG without scripts or references; titles appear when the pointer rests on a box; what it
may be written over. Refuses: measuring. Boxes too narrow to see are left out, and the title of what holds
them tells the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from colibri.analysis.phases import Part, Report
from colibri.aside import check_place, write_whole
from colibri.errors import ArgumentError

_WIDTH, _ROW, _MARGIN, _HEAD = 1600.0, 22, 10, 34
_NARROWEST = 0.3  # of a box, in pixels
_LETTER = 6.6  # width of a character
_COLOURS = {  # by phase; matrices are warm, what is around them cool
    "qkv": "#f2b56b",
    "attn_out": "#eda256",
    "gate_up": "#e8865a",
    "down": "#e06c55",
    "output": "#d9a441",
    "attend": "#7fb7d6",
    "router": "#8fc9a3",
}
_OTHER_PHASE, _PLAIN, _EXPERT = "#b9c4cf", "#dfe3e8", "#f3d9c4"
_EXPERT_PHASES = ("gate_up", "down")


@dataclass(frozen=True, slots=True)
class Box:
    """A box and what is below it; nanoseconds. Children may take less than their box, never more."""

    name: str
    title: str
    ns: float
    colour: str
    children: tuple[Box, ...] = ()


def tree(report: Report) -> Box:
    """The whole profile as boxes."""
    parts = tuple(_part(part) for part in report.parts)
    total = sum(part.ns for part in parts)
    name = f"colibri, threads {report.threads}, {report.isa}"
    return Box(name, f"{name}: {_ms(total)}", total, _PLAIN, parts)


def _part(part: Part) -> Box:
    profile = part.timed.profile
    layers = []
    for row in range(len(profile.phase_ns)):
        inside = row < len(profile.phase_ns) - 1
        phases = tuple(_phases(part, row))
        ns = sum(phase.ns for phase in phases)
        name = f"layer {row}" if inside else "outside the layers"
        waited = int(profile.wait_ns[row].sum())
        layers.append(Box(name, f"{part.name}, {name}: {_ms(ns)}, waited {_ms(waited)}", ns, _PLAIN, phases))
    ns = sum(layer.ns for layer in layers)
    title = (
        f"{part.name}: {part.timed.tokens} tokens, {_ms(ns)}, {ns / part.timed.tokens / 1e3:.1f} us a token"
    )
    return Box(part.name, title, ns, _PLAIN, tuple(layers))


def _phases(part: Part, row: int) -> Iterator[Box]:
    """The phases of a layer. Ticks of experts are those of both matrix phases, so each shows their shares."""
    profile = part.timed.profile
    experts = part.experts(row) if row < len(profile.expert_ns) else []
    for at, name in enumerate(profile.phases):
        ns, waited = int(profile.phase_ns[row, at]), int(profile.wait_ns[row, at])
        if not ns:
            continue
        below: tuple[Box, ...] = ()
        if name in _EXPERT_PHASES:
            below = tuple(
                Box(
                    f"{one.number}",
                    f"layer {row}, expert {one.number}: {one.share:.1%} of the experts' time, "
                    f"{one.rows} rows",
                    ns * one.share,
                    _EXPERT,
                )
                for one in experts
            )
        title = f"{part.name}, layer {row}, {name}: {_ms(ns)}, waited {_ms(waited)}"
        yield Box(name, title, ns, _COLOURS.get(name, _OTHER_PHASE), below)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def check_file(file: Path) -> None:
    """An error unless a chart may be written there: a new file, or an SVG picture to replace."""
    if file.suffix.lower() != ".svg":
        raise ArgumentError(f"chart: expected a file name that ends in .svg, found {str(file)!r}")
    if file.exists() and not (file.is_file() and _is_svg(file)):
        raise ArgumentError(f"chart: {file} exists and is not an SVG picture, so it is left as it is")
    check_place(file)


def _is_svg(file: Path) -> bool:
    """An empty file may become a picture too."""
    try:
        with file.open("rb") as opened:
            head = opened.read(4096)
    except OSError:
        return False
    return not head or (head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") and b"<svg" in head)


def draw(report: Report, file: Path) -> None:
    """Writes the chart beside the file, then takes the name: there is a whole picture or the older one."""
    check_file(file)
    write_whole(file, svg(report))


def svg(report: Report) -> str:
    """The chart."""
    root = tree(report)
    # XML lacks some characters that file names may have.
    title = "".join(letter if letter.isprintable() else "?" for letter in report.path.name)
    height = _HEAD + 5 * _ROW + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN:.0f}" height="{height}" '
        f'viewBox="0 0 {_WIDTH + 2 * _MARGIN:.0f} {height}" font-family="monospace" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-size="13">{escape(title)}: time by part, '
        "layer, phase, expert. Width is time; rest the pointer on a box.</text>",
    ]
    scale = _WIDTH / root.ns if root.ns else 0.0
    lines += _boxes(root, float(_MARGIN), 0, scale)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _boxes(box: Box, x: float, depth: int, scale: float) -> Iterator[str]:
    width = box.ns * scale
    if width < _NARROWEST:
        return
    y = _HEAD + depth * _ROW
    text = box.name if len(box.name) * _LETTER + 4 <= width else ""
    yield (
        f'<g><title>{escape(box.title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 1}" fill="{box.colour}" stroke="#ffffff" stroke-width="0.5"/>'
        + (f'<text x="{x + 2:.2f}" y="{y + 14}">{escape(text)}</text>' if text else "")
        + "</g>"
    )
    for child in box.children:
        yield from _boxes(child, x, depth + 1, scale)
        x += child.ns * scale
