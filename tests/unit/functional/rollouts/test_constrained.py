from collections import Counter

import numpy as np
import pytest
import torch

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.rollouts import plackett_luce
from datamask_pl.functional.rollouts.constrained import gumbel_keys
from tests.support import constraints, oracles
from tests.support.tiers import only

LOGITS_N = torch.tensor([0.3, -0.2, 0.8, 0.0, -0.5, 0.1], dtype=torch.float64)


def draw(logits_N, constraint, *, generator):
    return constraint.draw(logits_N, generators=[generator]).draws[0]


def rollouts(logits_N, constraint):
    """The rollouts of a policy, none of which is drawn."""
    return constraint.draw(logits_N, generators=[])


def draws(constraint, num_draws, *, logits_N=LOGITS_N):
    generator = torch.Generator().manual_seed(0)
    return [draw(logits_N, constraint, generator=generator) for _ in range(num_draws)]


def order_of(constraint, drawn):
    """Rows in the order in which they were drawn, after those kept in any case."""
    rows = constraint.kept().nonzero().squeeze(1).tolist()
    for group_rows, chosen in zip(constraint.rows_F.split(constraint.lengths), drawn.drawn, strict=True):
        rows += group_rows[chosen].tolist()
    return tuple(rows)


@pytest.mark.parametrize("kind", [*constraints.KINDS, "three groups"])
class TestDraw:
    def test_log_prob_is_that_of_the_enumerated_draw(self, kind):
        constraint = constraints.make(kind, 6)
        expected = dict(constraints.enumerate_draws(LOGITS_N.numpy(), constraint))
        assert sum(expected.values()) == pytest.approx(1.0)
        seen = {order_of(constraint, drawn): drawn for drawn in draws(constraint, 300)}
        assert len(seen) > 1
        for order, drawn in seen.items():
            assert float(rollouts(LOGITS_N, constraint).log_prob(drawn).exp()) == pytest.approx(
                expected[order], rel=1e-9
            )

    def test_every_mask_is_allowed_and_full(self, kind):
        constraint = constraints.make(kind, 6)
        allowed = {tuple(mask_N) for mask_N in constraints.allowed_masks(constraint)}
        for drawn in draws(constraint, 50):
            assert tuple(drawn.mask_N.tolist()) in allowed
            for row in constraint.rows_F[~drawn.mask_N[constraint.rows_F]].tolist():
                more_N = drawn.mask_N.clone()
                more_N[row] = True
                assert tuple(more_N.tolist()) not in allowed

    def test_score_is_the_derivative_of_log_prob(self, kind):
        constraint = constraints.make(kind, 6)
        for drawn in draws(constraint, 20):
            leaf_N = LOGITS_N.clone().requires_grad_()
            (expected_N,) = torch.autograd.grad(rollouts(leaf_N, constraint).log_prob(drawn), leaf_N)
            assert torch.allclose(rollouts(LOGITS_N, constraint).score(drawn), expected_N, atol=1e-12)


@pytest.mark.parametrize("kind", only("group ratios", "forced and costs", of=[*constraints.KINDS, "three groups"]))
def test_draws_are_as_frequent_as_they_are_probable(kind):
    constraint = constraints.make(kind, 6)
    num_draws = 4000
    count = Counter(order_of(constraint, drawn) for drawn in draws(constraint, num_draws))
    for order, probability in constraints.enumerate_draws(LOGITS_N.numpy(), constraint):
        error = np.sqrt(probability * (1 - probability) / num_draws)
        assert abs(count[order] / num_draws - probability) <= 4.5 * error + 1e-12


@pytest.mark.parametrize("kind", only("group ratios", "forced and costs", of=[*constraints.KINDS, "three groups"]))
def test_the_policy_gradient_over_all_draws_is_that_of_the_expected_reward(kind):
    constraint = constraints.make(kind, 6)
    value_N = np.random.default_rng(3).normal(size=6)

    def expected_reward(logits_N):
        all_draws = constraints.enumerate_draws(logits_N, constraint)
        return sum(p * float(value_N[list(rows)].sum()) ** 2 for rows, p in all_draws)

    step = 1e-5
    numeric_N = [
        (expected_reward(LOGITS_N.numpy() + step * unit_N) - expected_reward(LOGITS_N.numpy() - step * unit_N))
        / (2 * step)
        for unit_N in np.eye(6)
    ]
    probability = dict(constraints.enumerate_draws(LOGITS_N.numpy(), constraint))
    seen = {order_of(constraint, drawn): drawn for drawn in draws(constraint, 6000)}
    assert sum(probability[order] for order in seen) > 0.97
    analytic_N = sum(
        probability[order] * float(value_N[list(order)].sum()) ** 2 * rollouts(LOGITS_N, constraint).score(drawn)
        for order, drawn in seen.items()
    )
    missing = sum(p for order, p in probability.items() if order not in seen)
    bound = missing * float(np.abs(value_N).sum()) ** 2 * 7
    assert np.allclose(analytic_N.numpy(), numeric_N, atol=1e-7 + bound)


@pytest.mark.parametrize("kind", [*constraints.KINDS, "three groups"])
def test_the_time_of_a_group_is_that_of_its_last_ring(kind):
    """The clock of a sample rings at an exponential time divided by its weight; keys are minus its logarithm."""
    constraint = constraints.make(kind, 9)
    logits_N = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    drawn = draw(logits_N, constraint, generator=torch.Generator().manual_seed(1))
    noise_N = torch.empty(9, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    time_N = noise_N / logits_N.exp()
    assert len(drawn.log_times) == len(constraint.lengths)
    for rows, chosen, log_time in zip(
        constraint.rows_F.split(constraint.lengths), drawn.drawn, drawn.log_times, strict=True
    ):
        rang = rows[drawn.mask_N[rows]]
        assert rows[chosen].tolist() == rang[time_N[rang].argsort()].tolist()
        assert log_time.exp().tolist() == pytest.approx(time_N[rang].sort().values[-1:].tolist(), rel=1e-12)


def test_randomness_comes_from_the_generator_alone_in_float64():
    constraint = constraints.make("groups and costs", 6)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = (draw(LOGITS_N, constraint, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert order_of(constraint, one) == order_of(constraint, other)
    keys_N = gumbel_keys(torch.zeros(1000), generator=torch.Generator().manual_seed(0))
    assert keys_N.dtype == torch.float64
    assert bool((keys_N != keys_N.float()).any())


def test_a_plain_number_is_plackett_luce():
    constraint = Constrained(Holdings.of(6), BudgetSpec(0.5))
    for drawn in draws(constraint, 20):
        order_RK = torch.tensor([order_of(constraint, drawn)])
        assert torch.allclose(
            rollouts(LOGITS_N, constraint).log_prob(drawn), plackett_luce.log_prob(LOGITS_N, order_RK)[0]
        )
        assert torch.allclose(rollouts(LOGITS_N, constraint).score(drawn), plackett_luce.score(LOGITS_N, order_RK)[0])


def test_gaps_between_logits_beyond_the_range_of_exp_stay_finite():
    logits_N = torch.tensor([0.0, 2000.0, -2000.0, 1.0, -1.0, 900.0], dtype=torch.float64)
    constraint = constraints.make("costs", 6)
    for drawn in draws(constraint, 10, logits_N=logits_N):
        assert bool(rollouts(logits_N, constraint).score(drawn).isfinite().all())
        assert bool(torch.isfinite(rollouts(logits_N, constraint).log_prob(drawn)))


def test_the_score_of_what_is_never_drawn_is_zero():
    cost_N = torch.tensor([1.0, 1.0, 1.0, 30.0])
    forced_N = torch.tensor([1, -1, 0, 0], dtype=torch.int8)
    constraint = Constrained(Holdings.of(4, cost_N=cost_N, forced_N=forced_N), BudgetSpec(0.1))
    drawn = draws(constraint, 1, logits_N=torch.zeros(4))[0]
    assert drawn.mask_N.tolist() == oracles.mask_of([0, 2], 4).tolist()
    assert rollouts(torch.zeros(4), constraint).score(drawn).tolist() == [0.0] * 4
