"""What is logged of the steps, held on the device until it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric


class StepMetrics:
    """Means, maxima and counts since the last reset, one torchmetrics state a name.

    A name ending in `_best` is a maximum, `groups_without_spread` counts over the whole run, all others are means.
    Every rank holds the same numbers, so nothing is reduced over ranks.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._num_samples = 0
        self._seconds = 0.0

    def update(self, values: dict[str, Tensor]) -> None:
        """Adds one step's numbers, float64 scalars by name."""
        for name, value in values.items():
            if name not in self._metrics:
                self._metrics[name] = _make_metric(name, value.device)
            self._metrics[name].update(value)

    def update_speed(self, num_samples: int, seconds: float) -> None:
        """Adds the samples that a step read and the time it took."""
        self._num_samples += num_samples
        self._seconds += seconds

    def compute(self) -> dict[str, float]:
        """The numbers as floats; waits for the device."""
        numbers = {name: float(metric.compute()) for name, metric in self._metrics.items() if metric.update_called}
        if self._seconds > 0:
            numbers["speed/samples_per_second"] = self._num_samples / self._seconds
        return numbers

    def reset(self) -> None:
        """Starts the next interval."""
        for metric in self._metrics.values():
            if not isinstance(metric, SumMetric):
                metric.reset()
        self._num_samples, self._seconds = 0, 0.0


def _make_metric(name: str, device: torch.device) -> Metric:
    kind: type[MaxMetric | SumMetric | MeanMetric] = MeanMetric
    if name.endswith("_best"):
        kind = MaxMetric
    elif name.endswith("groups_without_spread"):
        kind = SumMetric
    # in this order: moving a metric makes it round what it is given to float32
    return kind(nan_strategy="disable", sync_on_compute=False).to(device).set_dtype(torch.float64)
