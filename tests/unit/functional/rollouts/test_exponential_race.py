import math

import numpy as np
import pytest
import torch

from datamask_pl.functional.rollouts import exponential_race
from datamask_pl.functional.rollouts.exponential_race import inclusion_probabilities, rung_probabilities, solve_log_time
from tests.support import oracles


def normal(num_samples: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(num_samples, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("logits_N", "num_selected"),
    [
        pytest.param(torch.tensor([3.0]), 1, id="one-sample"),
        pytest.param(torch.tensor([0.0, 1000.0]), 1, id="two-samples-far-apart"),
        pytest.param(torch.tensor([-1000.0, 0.0, 0.0, 1000.0]), 2, id="a-tie-at-the-end"),
        pytest.param(torch.cat([torch.zeros(5), torch.full((5,), 1e3)]), 4, id="cut-within-the-upper-group"),
        pytest.param(torch.cat([torch.zeros(5), torch.full((5,), 1e3)]), 6, id="cut-within-the-lower-group"),
        pytest.param(normal(1000, 1e3), 1, id="one"),
        pytest.param(normal(1000, 1e3), 999, id="all-but-one"),
        pytest.param(normal(1000, 1e3), 1000, id="all"),
        pytest.param(normal(100_000, 3.0), 10_000, id="many"),
        pytest.param(normal(1000) + 1e6, 100, id="far-from-zero"),
    ],
)
def test_probabilities_add_up_to_the_budget(logits_N, num_selected):
    p_N = inclusion_probabilities(logits_N, num_selected)
    assert p_N.dtype == torch.float64
    assert bool(((p_N >= 0) & (p_N <= 1)).all())
    assert float(p_N.sum()) == pytest.approx(num_selected, rel=1e-6)


def test_probabilities_are_close_to_those_of_enumeration():
    logits_N = np.random.default_rng(0).normal(size=7)
    expected_N = np.zeros(7)
    for rows, probability in oracles.enumerate_draws(logits_N, 3):
        expected_N[list(rows)] += probability
    p_N = inclusion_probabilities(torch.tensor(logits_N), 3)
    np.testing.assert_allclose(p_N, expected_N, atol=0.03)
    assert np.ptp(expected_N) > 0.3


def test_a_clock_has_rung_by_its_own_exponential_time():
    p_N = rung_probabilities(torch.tensor([0.0, 2.0]), math.log(0.3))
    np.testing.assert_allclose(p_N, [1 - math.exp(-0.3), 1 - math.exp(-0.3 * math.exp(2.0))], rtol=1e-14)


@pytest.mark.parametrize("num_expected", [5.0, 50.0, 250.0])
@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_a_handful_of_steps_find_the_time_where_bisection_takes_dozens(monkeypatch, num_expected, shift):
    monkeypatch.setattr(exponential_race, "MAX_NEWTON_STEPS", 8)
    logits_N = normal(500) + shift
    p_N = rung_probabilities(logits_N, solve_log_time(logits_N, num_expected))
    assert float(p_N.sum()) == pytest.approx(num_expected, rel=1e-9)


def test_time_is_not_spent_once_it_is_found(monkeypatch):
    calls = []
    expm1 = torch.expm1
    monkeypatch.setattr(torch, "expm1", lambda values_N: calls.append(1) or expm1(values_N))
    solve_log_time(normal(500), 50.0)
    assert len(calls) <= 8


@pytest.mark.parametrize("num_expected", [1e-3, 1.5, 499.9])
def test_the_time_is_that_by_which_so_many_are_expected(num_expected):
    logits_N = normal(500, 4.0)
    p_N = rung_probabilities(logits_N, solve_log_time(logits_N, num_expected))
    assert float(p_N.sum()) == pytest.approx(num_expected, rel=1e-8)
