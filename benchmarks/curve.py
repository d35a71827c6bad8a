"""Plots how the reward of a run rose.

python benchmarks/curve.py RUN_FOLDER OUTPUT.svg [--window 50]
"""

from __future__ import annotations

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Means of so many values next to each other, or of all where there are fewer."""
    return np.convolve(values, np.full(size := min(window, len(values)), 1 / size), mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward of a run's rollouts against its steps.")
    parser.add_argument("run", help="folder with the run's event file")
    parser.add_argument("output", help="picture to write")
    parser.add_argument("--window", type=int, default=50, help="logged steps in the running mean")
    args = parser.parse_args()

    events = EventAccumulator(args.run, size_guidance={"scalars": 0})
    events.Reload()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for tag, label, color in (
        ("objective/f_best", "best rollout of a step", "#d08770"),
        ("objective/f", "mean of a step's rollouts", "#5e81ac"),
    ):
        points = events.Scalars(tag)
        steps = np.array([point.step for point in points])
        values = np.array([point.value for point in points])
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(running_mean(steps, args.window), running_mean(values, args.window), color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("f within the step's slice, calibrated")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
