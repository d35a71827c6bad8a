"""Numbers of the steps between two log entries, held on the device until they are logged.

Shapes: S steps, M numbers of one kind of step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric


class StepMetrics:
    """Means, maxima and counts since the last reset, aggregated by torchmetrics when they are logged.

    A name that ends in `_best` is a maximum, `groups_without_spread` counts over the whole run, all others are means.
    """

    def __init__(self) -> None:
        # a step costs one append per kind of step: updating a metric for each number would take longer than some steps
        self._steps: dict[tuple[str, ...], list[Tensor]] = {}
        self._metrics: dict[str, Metric] = {}
        self._num_samples = 0
        self._seconds = 0.0

    def update(self, values: dict[str, Tensor]) -> None:
        """Adds the numbers of one step, float64 scalars by name, on the device of the step or the host."""
        if not values:
            return
        device = next((value.device for value in values.values() if value.device.type != "cpu"), torch.device("cpu"))
        value_M = torch.stack([value.to(device) for value in values.values()])
        self._steps.setdefault(tuple(values), []).append(value_M)

    def update_speed(self, num_samples: int, seconds: float) -> None:
        """Adds the samples that a step read and the time it took."""
        self._num_samples += num_samples
        self._seconds += seconds

    def compute(self) -> dict[str, float]:
        """The numbers as floats; waits for the device once."""
        for names, values in self._steps.items():
            for name, value_S in zip(names, torch.stack(values).unbind(1), strict=True):
                if name not in self._metrics:
                    self._metrics[name] = _metric(name).to(value_S.device).set_dtype(torch.float64)
                self._metrics[name].update(value_S)
        self._steps.clear()
        seen = {name: metric.compute() for name, metric in self._metrics.items() if metric.update_called}
        result = dict(zip(seen, torch.stack(list(seen.values())).tolist(), strict=True)) if seen else {}
        if self._seconds > 0:
            result["speed/samples_per_second"] = self._num_samples / self._seconds
        return result

    def reset(self) -> None:
        """Starts the next interval."""
        self._steps.clear()
        for metric in self._metrics.values():
            if not isinstance(metric, SumMetric):
                metric.reset()
        self._num_samples, self._seconds = 0, 0.0


def _metric(name: str) -> Metric:
    """The aggregation of a name. Ranks hold the same numbers; one that is not finite is shown as it is."""
    kinds: dict[str, type[Metric]] = {"_best": MaxMetric, "groups_without_spread": SumMetric}
    kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), MeanMetric)
    return kind(nan_strategy="disable", sync_on_compute=False)
