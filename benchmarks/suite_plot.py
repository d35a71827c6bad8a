"""The picture of the suite: f against seconds, a panel a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator

COLORS = {"ours": "#bf616a", "ours, polished": "#bf616a", "greedy": "#2e3440", "the paper's estimator": "#5e81ac"}
OTHERS = ["#d08770", "#c99a1c", "#6f9a55", "#3d9bb3", "#9d6b96", "#5aa7a0", "#7b6d8d", "#a9746e"]
MARKERS = ["s", "^", "v", "D", "P", "X", "<", ">"]
# What is seen below the best, in units of the distance to the worst of ours or greedy.
VIEW = 1.35
# Points nearer than that in both directions share a label; in dots of the figure, which has 100 an inch.
JOINED_DOTS = 14


def plot(results: dict[str, dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """Draws every competitor's points; what is further below than greedy and ours are is an arrow at the lower edge.

    Args:
        results: by case and competitor, as the suite has them.
        floors: f of a random mask, by case.
        path: the picture, .svg or .png.
    """
    num_panels = len(results)
    figure, axes = plt.subplots(
        num_panels, 1, figsize=(9.0, 3.5 * num_panels), layout="constrained", squeeze=False, facecolor="white"
    )
    for axis, (case, by_name) in zip(axes.flat, results.items(), strict=True):
        points = {name: result["points"] for name, result in by_name.items() if "points" in result}
        _panel(axis, case, _series(points), floors[case])
    # the same points give the same file
    with plt.rc_context({"svg.hashsalt": "suite"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _series(points: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The points in order of time; ours are two series."""
    series = {name: found for name, found in points.items() if name != "ours"}
    for name, is_polished in (("ours", False), ("ours, polished", True)):
        series[name] = [point for point in points.get("ours", []) if point["label"].endswith("polished") == is_polished]
    return {name: sorted(found, key=lambda point: point["seconds"]) for name, found in series.items() if found}


def _panel(axis: Any, case: str, series: dict[str, list[dict[str, Any]]], floor: float) -> None:
    kind, _, weight = case.partition(":")
    best = max(point["f"] for found in series.values() for point in found)
    central = [point["f"] for name in ("greedy", "ours", "ours, polished") for point in series.get(name, [])]
    height = max(VIEW * (best - max(floor, min(central, default=floor))), 1e-12)
    low, high = best - height, best + 0.12 * height
    styles = iter(zip(OTHERS, MARKERS, strict=True))
    for name, found in series.items():
        color, marker = (COLORS[name], "o") if name in COLORS else next(styles)
        seconds = [max(point["seconds"], 1e-3) for point in found]
        values = [point["f"] for point in found]
        shown = [max(value, low + 0.05 * height) for value in values]
        fill = "white" if name == "ours" else color
        axis.plot(seconds, shown, color=color, linewidth=1.2, zorder=2)
        for x, y, value in zip(seconds, shown, values, strict=True):
            below = value < y
            axis.plot(x, y, marker=r"$\downarrow$" if below else marker, markersize=9 if below else 6, zorder=3,
                      color=color, markerfacecolor=color if below else fill)  # fmt: skip
        label = "ours (numbers: steps)" if name == "ours" else name
        label = label if values[-1] >= low else f"{label}: {values[-1]:.4g}"
        line = "-" if len(found) > 1 else ""
        axis.plot([], [], color=color, marker=marker, markerfacecolor=fill, linestyle=line, label=label)
    if "greedy" in series:
        axis.axhline(series["greedy"][-1]["f"], color=COLORS["greedy"], linewidth=0.8, linestyle=":", zorder=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axis.xaxis.set_minor_locator(LogLocator(subs=()))
    axis.margins(x=0.06)
    axis.set_ylim(low, high)
    for name in ("ours", "ours, polished"):
        found = series.get(name, [])
        places = [point["seconds"] for point in found], [max(point["f"], low + 0.05 * height) for point in found]
        _number_steps(axis, found, *places, is_above=name != "ours")
    axis.set_title(f"{kind.replace('_', ' ')}, quality_weight {float(weight):g}", fontsize=11, loc="left")
    axis.set_xlabel("seconds")
    axis.set_ylabel("f")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _number_steps(
    axis: Any, found: list[dict[str, Any]], seconds: list[float], shown: list[float], *, is_above: bool
) -> None:
    """Writes the number of steps at each point: above what is polished, below what is not; once where points meet."""
    to_screen, joined = axis.transData.transform, []
    for point, x, y in zip(found, seconds, shown, strict=True):
        number, place = point["label"].split()[0], to_screen((x, y))
        if joined and max(abs(place - joined[-1][2])) < JOINED_DOTS:
            joined[-1][0].append(number)
        else:
            joined.append(([number], (x, y), place))
    offset, side, anchor = ((0, 6), "center", "bottom") if is_above else ((5, -3), "left", "top")
    for numbers, place, _ in joined:
        text = axis.annotate(
            ", ".join(numbers), place, xytext=offset, textcoords="offset points", fontsize=8, ha=side, va=anchor
        )
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
