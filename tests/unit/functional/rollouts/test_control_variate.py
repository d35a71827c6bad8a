import numpy as np
import pytest
import torch

from datamask_pl.functional.rollouts.control_variate import dual_direction, linear_gradient, linear_gradient_sum
from datamask_pl.functional.rollouts.exponential_race import inclusion_probabilities
from datamask_pl.functional.rollouts.plackett_luce import draw_group, masks_of
from tests.support import oracles


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def estimates(logits_N, slopes_N, num_selected: int, num_draws: int) -> torch.Tensor:
    group = draw_group(torch.as_tensor(logits_N), num_selected, generators=[generator()] * num_draws)
    masks_RN = masks_of(group.draws_RK, len(logits_N))
    return linear_gradient(torch.as_tensor(logits_N), masks_RN, group.log_times_R, torch.as_tensor(slopes_N))


@pytest.mark.parametrize(
    ("num_samples", "num_selected"),
    [
        *[(2, 1), (4, 2), (6, 4)],
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(3, 2), (5, 1), (6, 1), (6, 3), (6, 5)]),
    ],
)
def test_the_mean_is_the_gradient_of_the_expected_sum(num_samples, num_selected):
    rng = np.random.default_rng([num_samples, num_selected])
    logits_N, slopes_N = rng.normal(size=num_samples), rng.normal(size=num_samples)
    gradient_RN = estimates(logits_N, slopes_N, num_selected, 10_000).numpy()
    expected_N = oracles.policy_gradient(logits_N, num_selected, lambda mask_N: float(slopes_N[mask_N].sum()))
    error_N = gradient_RN.std(axis=0, ddof=1) / 100
    assert (np.abs(gradient_RN.mean(axis=0) - expected_N) < 4 * error_N).all()
    # the test could not fail if the noise hid the gradient
    assert (np.abs(expected_N) > 8 * error_N).any()


def test_it_is_far_less_noisy_than_the_score():
    rng = np.random.default_rng(0)
    logits_N, slopes_N = rng.normal(size=200), rng.normal(size=200)
    gradient_RN = estimates(logits_N, slopes_N, 20, 200)
    assert float(gradient_RN.var(0).mean()) < float(gradient_RN.mean(0).square().mean())


@pytest.mark.parametrize("num_samples", [1, 3])
def test_where_all_are_drawn_nothing_changes(num_samples):
    gradient_RN = estimates(np.zeros(num_samples), np.arange(1.0, num_samples + 1), num_samples, 5)
    np.testing.assert_allclose(gradient_RN, 0.0, atol=1e-15)


@pytest.mark.parametrize("num_selected", [1, 3, 5, 6])
@pytest.mark.parametrize("gap", [120.0, 1000.0])
def test_gaps_that_exp_does_not_survive(gap, num_selected):
    logits_N = np.array([0.0, gap, -gap, gap - 1.0, 0.5, -gap])
    gradient_RN = estimates(logits_N, np.arange(6.0), num_selected, 2000).numpy()
    assert np.isfinite(gradient_RN).all()
    # two samples a gap above the rest, two a gap below: only within a group is anything undecided
    groups = ([1, 3], [0, 4], [2, 5])
    expected_N = np.zeros(6)
    for rows, left in zip(groups, (num_selected, num_selected - 2, num_selected - 4), strict=True):
        if left == 1:
            group_N = logits_N[rows] - logits_N[rows].max()
            expected_N[rows] = oracles.policy_gradient(group_N, 1, lambda m, r=rows: float(np.arange(6.0)[r][m].sum()))
    error_N = gradient_RN.std(axis=0, ddof=1) / len(gradient_RN) ** 0.5
    assert (np.abs(gradient_RN.mean(axis=0) - expected_N) <= 4 * error_N + 1e-12).all()


def test_a_constant_added_to_the_slopes_changes_nothing():
    logits_N = np.random.default_rng(1).normal(size=9)
    slopes_N = np.random.default_rng(2).normal(size=9)
    np.testing.assert_allclose(
        estimates(logits_N, slopes_N, 4, 50), estimates(logits_N, slopes_N + 7.0, 4, 50), atol=1e-13
    )


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_order_and_chunks_of_rollouts_do_not_change_a_bit(unit):
    logits_N = torch.randn(50, generator=generator(), dtype=torch.float64)
    slopes_N = unit * torch.randn(50, generator=generator(1), dtype=torch.float64)
    group = draw_group(logits_N, 5, generators=[generator(seed) for seed in range(24)])
    masks_RN = masks_of(group.draws_RK, 50)
    whole_N = linear_gradient_sum(logits_N, masks_RN, group.log_times_R, slopes_N, num_rollouts=24)
    parts = [
        linear_gradient_sum(logits_N, masks_RN[rows], group.log_times_R[rows], slopes_N, num_rollouts=24)
        for rows in torch.randperm(24, generator=generator()).split(8)
    ]
    assert torch.equal(torch.stack(parts).sum(0), whole_N)
    np.testing.assert_allclose(whole_N, linear_gradient(logits_N, masks_RN, group.log_times_R, slopes_N).sum(0))


def test_of_many_samples_the_dual_direction_is_the_slope_up_to_a_constant():
    logits_N = 2.0 * torch.randn(2000, generator=generator(), dtype=torch.float64)
    slopes_N = torch.randn(2000, generator=generator(1), dtype=torch.float64)
    group = draw_group(logits_N, 400, generators=[generator(seed) for seed in range(200)])
    linear_N = linear_gradient(logits_N, masks_of(group.draws_RK, 2000), group.log_times_R, slopes_N).mean(0)
    direction_N = dual_direction(logits_N, linear_N, torch.zeros_like(linear_N), num_selected=400)
    difference_N = direction_N - slopes_N
    # the time of the last ring scatters by a few per cent, and late hazards feel it most
    is_open_N = inclusion_probabilities(logits_N, 400) < 0.95
    assert float(difference_N[is_open_N].std()) < 0.05
    assert float(linear_N[is_open_N].sub(slopes_N[is_open_N]).std()) > 0.5


def test_the_rest_is_divided_by_one_number():
    logits_N = 3.0 * torch.randn(50, generator=generator(), dtype=torch.float64)
    rest_N = torch.randn(50, generator=generator(1), dtype=torch.float64)
    ratio_N = dual_direction(logits_N, torch.zeros_like(rest_N), rest_N, num_selected=5) / rest_N
    assert float(ratio_N.min()) > 1.0
    np.testing.assert_allclose(ratio_N, ratio_N[0])


@pytest.mark.parametrize("num_selected", [1, 3, 6])
@pytest.mark.parametrize("gap", [120.0, 1e5])
def test_the_dual_direction_is_finite_where_exp_is_not(gap, num_selected):
    logits_N = torch.tensor([0.0, gap, -gap, gap - 1.0, 0.5, -gap], dtype=torch.float64)
    slopes_N = torch.arange(6.0, dtype=torch.float64)
    group = draw_group(logits_N, num_selected, generators=[generator(seed) for seed in range(8)])
    linear_N = linear_gradient(logits_N, masks_of(group.draws_RK, 6), group.log_times_R, slopes_N).mean(0)
    direction_N = dual_direction(logits_N, linear_N, torch.ones_like(linear_N), num_selected=num_selected)
    assert bool(direction_N.isfinite().all())
