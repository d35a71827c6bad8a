import numpy as np
import pytest
import torch

from datamask_pl.functional.rollouts.advantages import (
    group_relative_advantage,
    has_spread,
    leave_one_out_advantage,
    normalized,
    shrinkage,
    squared_noise_sum,
    weighted_score_sum,
)
from datamask_pl.functional.rollouts.plackett_luce import draw_group, masks_of, score
from tests.support import oracles

LOGITS = np.array([0.5, -0.3, 0.0, 0.8])
NUM_SELECTED, NUM_ROLLOUTS, EPSILON = 2, 3, 1e-8
ADVANTAGES = [group_relative_advantage, leave_one_out_advantage]


def reward(mask_N):
    """A set function without symmetry: no two masks of two samples have the same reward."""
    return float(mask_N @ np.array([1.0, 2.5, -0.7, 0.4]) + 1.3 * mask_N[0] * mask_N[3])


def estimates(advantage, num_groups: int) -> np.ndarray:
    """Many independent gradient estimates of one group each: (num_groups, N)."""
    logits_N = torch.tensor(LOGITS)
    source = torch.Generator().manual_seed(0)
    num_draws = num_groups * NUM_ROLLOUTS
    draws_RK = draw_group(logits_N, NUM_SELECTED, generators=[source] * num_draws).draws_RK
    score_RN = score(logits_N, draws_RK)
    rewards_R = torch.tensor([reward(mask_N) for mask_N in masks_of(draws_RK, 4).numpy()], dtype=torch.float64)
    gradients = []
    for group in torch.arange(num_draws).split(NUM_ROLLOUTS):
        advantages_R = advantage(rewards_R[group])
        bound = float(advantages_R.abs().sum()) * (1 + NUM_SELECTED) or 1.0
        gradients.append(weighted_score_sum(score_RN[group], advantages_R, bound=bound) / NUM_ROLLOUTS)
    return torch.stack(gradients).numpy()


def assert_mean_is(gradients_GN: np.ndarray, expected_N: np.ndarray) -> None:
    standard_error_N = gradients_GN.std(axis=0, ddof=1) / len(gradients_GN) ** 0.5
    assert (np.abs(gradients_GN.mean(axis=0) - expected_N) < 4 * standard_error_N).all()
    # the test could not fail if the noise hid the gradient
    assert (np.abs(expected_N) > 8 * standard_error_N).any()


def test_leave_one_out_is_unbiased():
    assert_mean_is(estimates(leave_one_out_advantage, 4000), oracles.policy_gradient(LOGITS, NUM_SELECTED, reward))


def test_group_relative_estimates_its_stated_target():
    expected_N = oracles.group_relative_gradient(LOGITS, NUM_SELECTED, NUM_ROLLOUTS, reward, EPSILON)
    assert_mean_is(estimates(group_relative_advantage, 4000), expected_N)


@pytest.mark.parametrize("num_rollouts", [2, 3, 17])
def test_advantages_are_those_of_the_oracle(num_rollouts):
    rewards_R = np.random.default_rng(0).normal(size=num_rollouts)
    np.testing.assert_allclose(
        leave_one_out_advantage(torch.tensor(rewards_R)), oracles.leave_one_out_advantage(rewards_R), rtol=1e-12
    )
    np.testing.assert_allclose(
        group_relative_advantage(torch.tensor(rewards_R)),
        oracles.group_relative_advantage(rewards_R, EPSILON),
        rtol=1e-12,
    )


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 0.1, -1e9, 1e-300])
@pytest.mark.parametrize("num_rollouts", [1, 2, 7])
def test_equal_rewards_give_exactly_zero(advantage, value, num_rollouts):
    """NeMo-RL #4161: one rollout or a zero spread gives NaN advantages."""
    rewards_R = torch.full((num_rollouts,), value, dtype=torch.float64)
    assert not has_spread(rewards_R)
    assert torch.equal(advantage(rewards_R), torch.zeros(num_rollouts, dtype=torch.float64))


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_rewards_that_differ_by_rounding_count_as_equal(advantage):
    rewards_R = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert rewards_R[0] != rewards_R[1]
    assert not advantage(rewards_R).any()


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_advantages_are_finite_and_sum_to_zero(advantage, scale, offset):
    rewards_R = torch.tensor([1.0, 2.0, 4.0, -3.0], dtype=torch.float64) * scale + offset
    advantages_R = advantage(rewards_R)
    assert torch.isfinite(advantages_R).all()
    assert advantages_R.any()
    assert abs(float(advantages_R.sum())) < 1e-9 * max(1.0, float(advantages_R.abs().max()))


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e3, 1e9])
def test_the_unit_of_the_reward_does_not_decide_whether_rewards_differ(scale):
    equal_R = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert not has_spread(equal_R * scale)
    assert has_spread((equal_R + torch.tensor([0.0, 1e-9, 0.0], dtype=torch.float64)) * scale)


def test_the_squared_noise_is_that_of_the_double_loop():
    rng = np.random.default_rng(4)
    scores_CN, advantages_C = rng.normal(size=(5, 7)), rng.normal(size=5)
    expected = sum(float((advantages_C[c] * scores_CN[c, n]) ** 2) for c in range(5) for n in range(7))
    found = squared_noise_sum(torch.tensor(scores_CN), torch.tensor(advantages_C), bound=1e4)
    assert float(found) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_normalized_gradient_has_its_direction_and_a_root_mean_square_of_1(scale):
    gradient_N = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    unit_N = normalized(gradient_N * scale)
    assert float(unit_N.square().mean()) == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(unit_N / unit_N[0], gradient_N / gradient_N[0], rtol=1e-12)


def test_the_order_and_chunks_of_rollouts_do_not_change_a_bit_of_the_gradient():
    source = torch.Generator().manual_seed(3)
    logits_N = torch.randn(200, generator=source, dtype=torch.float64)
    draws_RK = draw_group(logits_N, 20, generators=[source] * 24).draws_RK
    score_RN = score(logits_N, draws_RK)
    advantages_R = leave_one_out_advantage(torch.randn(24, generator=source, dtype=torch.float64))
    bound = float(advantages_R.abs().sum()) * 21
    whole_N = weighted_score_sum(score_RN.clone(), advantages_R, bound=bound)
    np.testing.assert_allclose(whole_N, advantages_R @ score_RN, atol=1e-10)
    plain_sums = set()
    for seed in range(8):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
        plain_sums.add(float((advantages_R[order, None] * score_RN[order]).sum()))
        parts = [
            weighted_score_sum(score_RN[chunk], advantages_R[chunk], bound=bound)
            for chunk in order.split([1, 2, 3, 5, 13])
        ]
        assert torch.equal(torch.stack(parts).sum(0), whole_N)
    assert len(plain_sums) > 1, "plain sums agree as well: the test shows nothing"


@pytest.mark.parametrize(("signal", "low", "high"), [(0.0, 0.0, 0.15), (0.3, 0.4, 0.6), (3.0, 0.97, 1.0)])
def test_shrinkage_is_the_share_of_the_estimate_that_is_no_noise(signal, low, high):
    """Means of 100 numbers of deviation 3: noise of squared length 0.09 a sample."""
    parts_RN = signal + 3.0 * torch.randn(100, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean_N = parts_RN.mean(0)
    noise = squared_noise_sum(parts_RN - mean_N, torch.ones(100, dtype=torch.float64), bound=1e7) / 100**2
    assert low <= float(shrinkage(mean_N, noise)) <= high


def test_nothing_is_shrunk_and_normalized_to_nothing():
    zero_N = torch.zeros(3, dtype=torch.float64)
    assert 0.0 <= float(shrinkage(zero_N, zero_N.sum())) <= 1.0
    assert torch.equal(normalized(zero_N), zero_N)
