"""What is logged of the steps, held on the device until it is asked for.

Shapes: M numbers of one kind of step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class _Numbers(Metric):
    """Numbers that are always given together, as one vector: two small products a step, whatever their number."""

    total_M: Tensor
    highest_M: Tensor
    num_updates: Tensor

    def __init__(self, num_numbers: int, device: torch.device) -> None:
        # every rank holds the same numbers
        super().__init__(sync_on_compute=False)
        zeros_M = torch.zeros(num_numbers, dtype=torch.float64)
        self.add_state("total_M", zeros_M, dist_reduce_fx=None)
        self.add_state("highest_M", torch.full_like(zeros_M, -torch.inf), dist_reduce_fx=None)
        self.add_state("num_updates", torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)
        self.to(device).set_dtype(torch.float64)

    def update(self, values_M: Tensor) -> None:
        self.total_M += values_M
        self.highest_M = torch.maximum(self.highest_M, values_M)
        self.num_updates += 1

    def compute(self) -> Tensor:
        """Means, maxima and totals: (3, M)."""
        return torch.stack([self.total_M / self.num_updates, self.highest_M, self.total_M])


class StepMetrics:
    """Means, maxima and counts since the last reset, one torchmetrics state for all numbers that come together.

    A name ending in `_best` is a maximum, `groups_without_spread` counts over the whole run, all others are means.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], _Numbers] = {}
        self._counts: dict[str, float] = {}
        self._num_samples = 0
        self._seconds = 0.0

    def update(self, values: dict[str, Tensor]) -> None:
        """Adds one step's numbers, float64 scalars by name, on the device of the step or the host."""
        if not values:
            return
        device = next((value.device for value in values.values() if value.device.type != "cpu"), torch.device("cpu"))
        names, value_M = tuple(values), torch.stack([value.to(device) for value in values.values()])
        if names not in self._numbers:
            self._numbers[names] = _Numbers(len(names), value_M.device)
        self._numbers[names].update(value_M)

    def update_speed(self, num_samples: int, seconds: float) -> None:
        """Adds the samples that a step read and the time it took."""
        self._num_samples += num_samples
        self._seconds += seconds

    def compute(self) -> dict[str, float]:
        """The numbers as floats; waits for the device once for all that came together."""
        result = dict(self._counts)
        for names, numbers in self._numbers.items():
            if not numbers.update_called:
                continue
            for name, mean, highest, total in zip(names, *numbers.compute().tolist(), strict=True):
                if _is_count(name):
                    result[name] = result.get(name, 0.0) + total
                else:
                    result[name] = highest if name.endswith("_best") else mean
        if self._seconds > 0:
            result["speed/samples_per_second"] = self._num_samples / self._seconds
        return result

    def reset(self) -> None:
        """Starts the next interval."""
        self._counts = {name: count for name, count in self.compute().items() if _is_count(name)}
        for numbers in self._numbers.values():
            numbers.reset()
        self._num_samples, self._seconds = 0, 0.0


def _is_count(name: str) -> bool:
    return name.endswith("groups_without_spread")
