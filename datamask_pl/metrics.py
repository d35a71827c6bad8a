"""What is logged of the steps, held on the device until it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor


class StepMetrics:
    """Means, maxima and counts since the last reset, one scalar a name.

    A name ending in `_best` is a maximum, `groups_without_spread` counts over the whole run, all others are means.
    Every rank holds the same numbers, so nothing is reduced over ranks.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._num_updates: dict[str, int] = {}
        self._num_samples = 0
        self._seconds = 0.0

    def update(self, values: dict[str, Tensor]) -> None:
        """Adds one step's numbers, float64 scalars by name."""
        for name, value in values.items():
            total = self._totals.get(name)
            if total is None:
                self._totals[name] = value
            else:
                self._totals[name] = torch.maximum(total, value) if _is_maximum(name) else total + value
            self._num_updates[name] = self._num_updates.get(name, 0) + 1

    def update_speed(self, num_samples: int, seconds: float) -> None:
        """Adds the samples that a step read and the time it took."""
        self._num_samples += num_samples
        self._seconds += seconds

    def compute(self) -> dict[str, float]:
        """The numbers as floats; waits for the device, once for all of them."""
        numbers: dict[str, float] = {}
        if self._totals:
            devices = {value.device for value in self._totals.values() if value.device.type != "cpu"}
            device = devices.pop() if devices else torch.device("cpu")
            totals = torch.stack([value.to(device, torch.float64) for value in self._totals.values()]).tolist()
            for name, total in zip(self._totals, totals, strict=True):
                is_mean = not _is_maximum(name) and not _is_count(name)
                numbers[name] = total / self._num_updates[name] if is_mean else total
        if self._seconds > 0:
            numbers["speed/samples_per_second"] = self._num_samples / self._seconds
        return numbers

    def reset(self) -> None:
        """Starts the next interval."""
        self._totals = {name: total for name, total in self._totals.items() if _is_count(name)}
        self._num_updates = {}
        self._num_samples, self._seconds = 0, 0.0


def _is_maximum(name: str) -> bool:
    return name.endswith("_best")


def _is_count(name: str) -> bool:
    return name.endswith("groups_without_spread")
