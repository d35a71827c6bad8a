import math

import pytest
import torch

from datamask_pl.learner.metrics import StepMetrics


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_means_and_maxima_are_over_the_interval_and_counts_over_the_run():
    metrics = StepMetrics()
    for f, count in [(1.0, 0.0), (4.0, 1.0)]:
        step = {"objective/f": number(f), "objective/f_best": number(f), "policy/groups_without_spread": number(count)}
        metrics.update(step)
    assert metrics.compute() == {"objective/f": 2.5, "objective/f_best": 4.0, "policy/groups_without_spread": 1.0}
    metrics.reset()
    metrics.update({"objective/f": number(7.0), "objective/f_best": number(-1.0)})
    metrics.update({"policy/groups_without_spread": number(1.0)})
    assert metrics.compute() == {"objective/f": 7.0, "objective/f_best": -1.0, "policy/groups_without_spread": 2.0}


def test_speed_is_samples_over_seconds_of_the_interval():
    metrics = StepMetrics()
    metrics.update_speed(100, 2.0)
    metrics.update_speed(200, 1.0)
    assert metrics.compute() == {"speed/samples_per_second": 100.0}
    metrics.reset()
    assert metrics.compute() == {}


def test_a_name_that_was_not_seen_since_the_last_reset_is_omitted():
    metrics = StepMetrics()
    metrics.update({"policy/churn": number(0.5), "objective/f": number(1.0)})
    metrics.reset()
    metrics.update({"objective/f": number(2.0)})
    assert metrics.compute() == {"objective/f": 2.0}


def test_a_large_mean_is_kept_in_double_precision():
    metrics = StepMetrics()
    for value in (1e9, 1e9 + 1):
        metrics.update({"objective/f": number(value)})
    assert metrics.compute()["objective/f"] == pytest.approx(1e9 + 0.5, abs=1e-6)


def test_the_device_is_waited_for_once(monkeypatch):
    """A look at each number waits for the device once more."""
    metrics = StepMetrics()
    for step in range(3):
        metrics.update({f"objective/{name}": number(float(step)) for name in "abcdef"})
    looks = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: looks.append(1) or real(tensor))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: pytest.fail("a look at one number"))
    assert metrics.compute() == {f"objective/{name}": 1.0 for name in "abcdef"}
    assert len(looks) == 1


def test_a_number_that_is_not_finite_ends_nothing():
    """pytorch #31855: logging never ends a run."""
    metrics = StepMetrics()
    metrics.update({"objective/f": number(math.nan)})
    assert math.isnan(metrics.compute()["objective/f"])
