"""The picture of the suite: f against seconds, a panel a case."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"ours": "#bf616a", "greedy": "#2e3440", "the paper's estimator": "#5e81ac"}
OTHERS = ["#d08770", "#ebcb8b", "#a3be8c", "#88c0d0", "#b48ead", "#8fbcbb", "#7b6d8d", "#a9746e"]
MARKERS = ["s", "^", "v", "D", "P", "X", "<", ">"]


def plot(results: dict[str, dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """Draws every competitor's points; those far below are drawn as arrows at the lower edge.

    Args:
        results: by case and competitor, as the suite has them.
        floors: f of a random mask, by case.
        path: the picture, .svg or .png.
    """
    num_columns = min(2, len(results))
    num_rows = math.ceil(len(results) / num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(7.6 * num_columns, 4.6 * num_rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (case, by_name) in zip(axes.flat, results.items(), strict=False):
        _panel(axis, case, {name: result["points"] for name, result in by_name.items() if "points" in result}, floors)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axis: Any, case: str, points: dict[str, list[dict[str, Any]]], floors: dict[str, float]) -> None:
    kind, _, weight = case.partition(":")
    best = max(point["f"] for found in points.values() for point in found)
    height = max(best - floors[case], 1e-12)
    low, high = best - 0.3 * height, best + 0.02 * height
    styles = iter(zip(OTHERS, MARKERS, strict=True))
    for name, found in points.items():
        color, marker = (COLORS[name], "o") if name in COLORS else next(styles)
        found = sorted(found, key=lambda point: point["seconds"])
        seconds = [max(point["seconds"], 1e-3) for point in found]
        values = [point["f"] for point in found]
        label = name if values[-1] >= low else f"{name}: {values[-1]:.4g}"
        shown = [max(value, low + 0.012 * height) for value in values]
        is_below = [value < low for value in values]
        axis.plot(seconds, shown, color=color, linewidth=1.3, alpha=0.9)
        axis.plot([], [], color=color, marker=marker, linestyle="-" if len(found) > 1 else "", label=label)
        for x, y, below in zip(seconds, shown, is_below, strict=True):
            axis.plot(x, y, color=color, marker=r"$\downarrow$" if below else marker, markersize=9 if below else 6)
        if name == "ours":
            for point, x, y in zip(found, seconds, shown, strict=True):
                axis.annotate(point["label"], (x, y), xytext=(7, -8), textcoords="offset points", fontsize=7)
    if "greedy" in points:
        axis.axhline(points["greedy"][-1]["f"], color=COLORS["greedy"], linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.margins(x=0.1)
    axis.set_ylim(low, high)
    axis.set_title(f"{kind.replace('_', ' ')}, quality_weight {float(weight):g}", fontsize=11)
    axis.set_xlabel("seconds")
    axis.set_ylabel("f")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False)
