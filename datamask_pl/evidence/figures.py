"""Pictures of a run, for TensorBoard and for the report. The only module that needs matplotlib, which is optional.

Shapes: N samples, B bins, J clusters, 10 tenths of quality.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.evidence.histograms import Histogram

MASK_COLOR, ALL_COLOR, RANDOM_COLOR, TOP_COLOR = "#2b7de0", "#9a9a9a", "#2a9d5c", "#d97d00"
# Stands for the color of the page's text; no picture uses it for anything else.
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "legend.frameon": False,
    **{name: _INK for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")},
}
_FEW = 10
Draw = Callable[[], Figure]


@dataclass(frozen=True)
class Curve:
    """Numbers over steps.

    Attributes:
        label: for the legend; none if empty.
        step: at which they were taken, from 1.
        value: one a step.
    """

    label: str
    step: Sequence[int]
    value: Sequence[float]


def to_svg(draw: Draw, *, label: str) -> str:
    """An inline SVG element in the colors of the page around it: text takes the page's, the ground is see-through.

    Args:
        draw: makes the figure.
        label: what is to be seen, for those who do not see it; another one for each picture of a page.
    """
    buffer = io.StringIO()
    # ids are made of the salt: several pictures share a page, where each may stand once
    with rc_context({**_STYLE, "svg.hashsalt": label}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(buffer, format="svg", transparent=True, dpi=150, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # groups have plain names, to which nothing refers
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    width = re.search(r'viewBox="0 0 ([\d.]+)', text)
    assert width is not None, "matplotlib writes a viewBox"
    head = f'<svg role="img" aria-label="{escape(label)}" style="width:100%;max-width:{float(width[1]) * 4 / 3:.0f}px" '
    return re.sub(r"<svg ([^>]*?)>", lambda match: head + _without_size(match[1]) + ">", text, count=1)


def _without_size(attributes: str) -> str:
    return re.sub(r'\b(?:width|height)="[^"]*"', "", attributes)


def to_image(draw: Draw) -> NDArray[np.uint8]:
    """The picture as (height, width, 3) on white, for TensorBoard."""
    with rc_context({**_STYLE, "savefig.facecolor": "white"}):
        canvas = FigureCanvasAgg(draw())
        canvas.draw()  # type: ignore[no-untyped-call]
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def draw_quality(everything: Histogram, kept: Histogram) -> Figure:
    """Where the kept samples' quality lies among that of all."""
    figure, axes = _new_figure(6.4, 2.9)
    for counted, color, label in ((everything, ALL_COLOR, "all"), (kept, MASK_COLOR, "kept")):
        share_B = (counted.count_B / counted.count_B.sum().clamp(min=1.0)).numpy()
        axes.stairs(share_B, counted.edges.numpy(), fill=True, color=color, alpha=0.45)
        axes.stairs(share_B, counted.edges.numpy(), color=color, label=label)
    axes.set(xlabel="quality (weighted sum of the quality columns)", ylabel="share of samples")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend()
    return figure


def draw_probability(counted: Histogram) -> Figure:
    """How decided the mask is: inclusion probabilities before rounding."""
    figure, axes = _new_figure(6.4, 2.9)
    axes.stairs(counted.count_B.numpy(), counted.edges.numpy(), fill=True, color=MASK_COLOR)
    axes.set(xlabel="inclusion probability", ylabel="samples (logarithmic)", xlim=(0.0, 1.0))
    # before the scale, which has no place for nothing
    axes.set_ylim(0.8, 2.0 * max(1.0, float(counted.count_B.max())))
    axes.set_yscale("log")
    return figure


def draw_curves(panels: Mapping[str, Sequence[Curve]], marks: Mapping[str, Mapping[str, float]]) -> Figure:
    """One panel a quantity.

    Args:
        panels: curves by the name of the quantity.
        marks: levels to compare with, `mask`, `random` and `top quality`, by the name of the quantity.
    """
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(3.3 * num_columns, 2.5 * num_rows + 0.3))
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    shown: dict[str, Artist] = {}
    colors = {"mask": MASK_COLOR, "random": RANDOM_COLOR, "top quality": TOP_COLOR}
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
        shades = np.linspace(1.0, 0.35, max(1, len(curves)))
        for curve, shade in zip(curves, shades, strict=True):
            axes.plot(curve.step, curve.value, ".-", markersize=3, color=MASK_COLOR, alpha=shade, label=curve.label)
        for label, level in marks.get(name, {}).items():
            axes.axhline(level, linestyle="--", linewidth=1, color=colors[label], label=label)
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    return figure


def draw_heat_map(share_J10: Tensor, count_J10: Tensor) -> Figure:
    """Which share is kept, and of how many samples, by cluster and tenth of quality."""
    num_clusters = len(count_J10)
    share, count = share_J10.numpy(), count_J10.numpy()
    # a cell of few samples is easily all kept, and would leave the others dark
    reliable = share[count >= min(_FEW, int(count.max()))]
    figure, axes = _new_figure(8.2, 1.3 + 0.27 * num_clusters)
    image = axes.imshow(share, aspect="auto", cmap="viridis", vmin=0.0, vmax=max(float(reliable.max()), 1e-9))
    for row, column in np.ndindex(*share.shape):
        value = share[row, column]
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            is_bright = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
            color = "#000000" if is_bright else "#ffffff"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(10), [f"{10 * tenth} to {10 * tenth + 10}" for tenth in range(10)])
    axes.set_yticks(range(num_clusters), [f"{size:,}" for size in count.sum(axis=1)])
    axes.set(xlabel="quality, percentile of the block (right is best)", ylabel="cluster, by its number of samples")
    axes.spines[:].set_visible(False)
    # an arrow where cells of few samples are above the scale
    extend = "max" if np.nanmax(share) > image.norm.vmax else "neither"
    bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.02, extend=extend)
    bar.set_label("share kept")
    return figure


def draw_map(points_N2: Tensor, share_2: Tensor, masks: Mapping[str, Tensor]) -> Figure:
    """The samples in their plane of largest variance, once for each mask, bool (N,) by what it is called."""
    figure = Figure(figsize=(3.3 * len(masks), 3.5))
    panels = figure.subplots(1, len(masks), squeeze=False, sharex=True, sharey=True)[0]
    colors = [MASK_COLOR, TOP_COLOR, RANDOM_COLOR]
    points = points_N2.numpy()
    for axes, (name, mask_N), color in zip(panels, masks.items(), colors, strict=False):
        kept = mask_N.numpy()
        axes.scatter(*points[~kept].T, s=3, color=ALL_COLOR, alpha=0.35, linewidths=0, rasterized=True)
        axes.scatter(*points[kept].T, s=6, color=color, alpha=0.9, linewidths=0, rasterized=True)
        axes.set_title(f"kept by {name}")
        axes.set_xlabel(f"1st component ({float(share_2[0]):.0%} of variance)")
    panels[0].set_ylabel(f"2nd component ({float(share_2[1]):.0%})")
    return figure


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure that pyplot knows nothing of, so that nothing keeps it in memory."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()
