"""The pictures of a report as PNG files, drawn by matplotlib (`pip install 'colibri-moe[report]'`).

Owns: which pictures there are. Refuses: measuring; a screen, which is never opened.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from colibri.analysis import coactivation
from colibri.analysis.array_file import Array
from colibri.analysis.measures import LayerMeasures, Measures
from colibri.aside import write_whole
from colibri.errors import UnsupportedError

_MOST_LAYERS = 16  # of small pictures beside each other


def check_library() -> None:
    """An error that names the command, unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "png: pictures are drawn by matplotlib, which is not installed: pip install 'colibri-moe[report]'"
        ) from error


def write(measures: Measures, directory: Path) -> list[Path]:
    """Draws every picture into a directory that is there; returns their files."""
    check_library()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = []
    for name, width, height, draw in _pictures(measures):
        figure = Figure(figsize=(width, height), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        draw(figure)
        data = io.BytesIO()
        canvas.print_png(data)
        files.append(directory / f"{name}.png")
        write_whole(files[-1], data.getvalue())
    return files


def _pictures(measures: Measures) -> Iterator[tuple[str, float, float, Callable[[Any], None]]]:
    """(name, width and height in inches, what draws it on a figure)."""
    layers = measures.layers
    height = 1.8 + 0.16 * len(layers)
    yield "load", 10, max(3, height), lambda figure: _load(figure, layers)
    yield "balance", 8, 6, lambda figure: _balance(figure, layers)
    yield "cache", 7, 4.5, lambda figure: _cache(figure, measures)
    paired = [one for one in layers if one.load.n_used > 1]
    if paired:
        yield "coactivation", 10, 10, lambda figure: _pairs(figure, paired)
    if any(one.domains is not None for one in layers):
        yield "domains", 9, 4, lambda figure: _domains(figure, measures)
    if measures.visits is not None:
        yield "time", 10, max(3, height), lambda figure: _time(figure, measures)


def _map(figure: Any, axes: Any, values: Array, limit: float, label: str) -> None:
    """log2 of values around 1, in colours of less and more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log2(values)
    image = axes.imshow(
        np.clip(shown, -limit, limit),
        cmap="PuOr_r",
        vmin=-limit,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
    )
    figure.colorbar(image, ax=axes, label=label)


def _wide(layers: list[LayerMeasures], of: Callable[[LayerMeasures], Array]) -> Array:
    """[n_layers, most experts], NaN where a layer has fewer."""
    found = np.full((len(layers), max(one.load.n_experts for one in layers)), np.nan)
    for at, one in enumerate(layers):
        found[at, : one.load.n_experts] = of(one)
    return found


def _by_layer(axes: Any, layers: list[LayerMeasures]) -> None:
    step = -(-len(layers) // 32)
    axes.set_yticks(range(0, len(layers), step), [one.layer for one in layers[::step]])
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")


def _load(figure: Any, layers: list[LayerMeasures]) -> None:
    axes = figure.subplots()
    values = _wide(layers, lambda one: one.load.counts / max(float(one.load.counts.mean()), 1e-12))
    _map(figure, axes, values, 3, "log2 of load by an even share")
    _by_layer(axes, layers)
    axes.set_title("Load by layer and expert")


def _balance(figure: Any, layers: list[LayerMeasures]) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    numbers = [one.layer for one in layers]
    upper.plot(numbers, [one.load.effective_experts for one in layers], "o-", label="effective experts")
    upper.plot(numbers, [one.load.n_experts for one in layers], ":", label="experts")
    upper.plot(numbers, [one.load.n_used for one in layers], "--", label="experts of a token")
    upper.set_ylim(bottom=0)
    lower.plot(numbers, [one.load.variation for one in layers], "o-", label="variation of the load")
    lower.plot(numbers, [one.load.noise for one in layers], "--", label="noise")
    lower.plot(numbers, [one.load.top_share for one in layers], "s:", label="share of the most loaded")
    lower.set_xlabel("layer")
    for axes in (upper, lower):
        axes.legend()
        axes.grid(alpha=0.3)


def _cache(figure: Any, measures: Measures) -> None:
    axes = figure.subplots()
    styles = {"lru": "o-", "lfru": "s--", "belady": "^:"}
    for policy, rates in measures.curve.hit_rates.items():
        axes.plot(measures.curve.slots, [100 * rate for rate in rates], styles[policy], label=policy)
    axes.set_xlabel(f"experts held, of {measures.decoding.accesses.n_experts}")
    axes.set_ylabel("hit rate, %")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)
    axes.legend()


def _pairs(figure: Any, layers: list[LayerMeasures]) -> None:
    """Some layers, evenly chosen."""
    which = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _MOST_LAYERS)).round().astype(int))
    across = int(np.ceil(np.sqrt(len(which))))
    grid = figure.subplots(-(-len(which) // across), across, squeeze=False).ravel()
    for axes, at in zip(grid, which.tolist(), strict=False):
        one = layers[at]
        lifts = coactivation.lift(one.pairs, one.load.n_rows)
        _map(figure, axes, lifts / coactivation.chance(one.load.n_experts, one.load.n_used), 3, "log2")
        axes.set_title(f"layer {one.layer}")
    for axes in grid[len(which) :]:
        axes.set_axis_off()
    figure.suptitle("How often pairs of experts are chosen together: log2 of times chance")


def _domains(figure: Any, measures: Measures) -> None:
    """Of the layer whose choices say most."""
    from colibri.analysis.specialisation import preferences

    told = [(one.layer, one.domains) for one in measures.layers if one.domains is not None]
    layer, found = max(told, key=lambda one: one[1].bits)
    axes = figure.subplots()
    _map(figure, axes, preferences(found), 2, "log2 of share by share of all")
    labels = measures.trace.header.labels
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("expert")
    axes.set_title(f"layer {layer}: {found.bits:.3f} of {found.entropy:.2f} bits a choice")


def _time(figure: Any, measures: Measures) -> None:
    visits = measures.visits
    assert visits is not None
    axes = figure.subplots()
    values = _wide(measures.layers, lambda one: visits.ns[one.layer, : one.load.n_experts] / 1e6)
    image = axes.imshow(values, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="ms, all threads together")
    _by_layer(axes, measures.layers)
    axes.set_title("Time of experts")
