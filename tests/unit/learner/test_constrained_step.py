"""One step under a constraint, on ground sets small enough for enumeration."""

import numpy as np
import pytest
import torch

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner.ground import part_of
from datamask_pl.learner.step import multilinear_update, rollout_update
from datamask_pl.objectives.joint import JointObjective
from tests.support import constraints, oracles
from tests.support.pretended_ranks import on_ranks
from tests.support.problems import DIVERSITIES, ground_set, qualities, unit_rows
from tests.support.tiers import only

N = 6
FEATURES_ND, QUALITY_N = unit_rows(N, 3, 0), qualities(N, 0)
LOGITS_N = np.array([0.3, -0.2, 0.8, 0.0, -0.5, 0.1])
RAW = torch.ones(2, dtype=torch.float64)
WITHOUT_COSTS = [kind for kind in constraints.KINDS if "cost" not in kind]


def joint(kind="disf"):
    return JointObjective(quality_weight=0.3, diversity=DIVERSITIES[kind])


def ground(kind, ranks=None):
    return ground_set(FEATURES_ND, constraints.make(kind, N), quality_N=QUALITY_N, ranks=ranks)


def rollouts(kind, *, step=0, num_rollouts=8, control_variate=False, ranks=None, estimator="leave_one_out"):
    return rollout_update(
        torch.tensor(LOGITS_N), objective=joint(), ground=ground(kind), scales=RAW, estimator=estimator,
        num_rollouts=num_rollouts, seed_of=lambda rollout: derive_seed(1, 0, step, rollout),
        ranks=ranks or RankGroup(), step_name=f"step {step}", control_variate=control_variate,
    )  # fmt: skip


def expected_reward(kind, logits_N, value):
    """E of a set function over the draws of the constraint, which does not depend on their order."""
    return sum(
        probability * value(oracles.mask_of(rows, N))
        for rows, probability in constraints.enumerate_draws(logits_N, constraints.make(kind, N))
    )


def derivative(kind, value, step=1e-5):
    above_N = [expected_reward(kind, LOGITS_N + step * unit_N, value) for unit_N in np.eye(N)]
    below_N = [expected_reward(kind, LOGITS_N - step * unit_N, value) for unit_N in np.eye(N)]
    return (np.array(above_N) - np.array(below_N)) / (2 * step)


def of_own_size(mask_N):
    num_selected = int(mask_N.sum())
    return oracles.objective("disf", FEATURES_ND, QUALITY_N, num_selected=num_selected, quality_weight=0.3)(mask_N)


@pytest.mark.parametrize("kind", only("group ratios", "forced and costs", of=constraints.KINDS))
def test_leave_one_out_is_the_gradient_of_the_expected_objective_on_average(kind):
    updates = np.stack([rollouts(kind, step=step).direction_M.numpy() for step in range(150)])
    error_N = updates.std(axis=0, ddof=1) / np.sqrt(len(updates))
    assert (np.abs(updates.mean(axis=0) - derivative(kind, of_own_size)) <= 4 * error_N + 1e-9).all()


@pytest.mark.parametrize("kind", WITHOUT_COSTS)
def test_the_linear_part_has_its_exact_gradient_on_average(kind):
    block, logits_N = ground(kind), torch.tensor(LOGITS_N)
    slopes_N = torch.randn(N, generator=torch.Generator().manual_seed(0)).double()
    generator = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(500):
        drawn = block.budget.draw(logits_N, generators=[generator])
        estimates.append(drawn.linear_gradient_sum(slopes_N, num_rollouts=1).numpy())
    error_N = np.std(estimates, axis=0, ddof=1) / np.sqrt(len(estimates))
    expected_N = derivative(kind, lambda mask_N: float(slopes_N.numpy()[mask_N].sum()))
    assert (np.abs(np.mean(estimates, axis=0) - expected_N) <= 4 * error_N + 1e-9).all()


@pytest.mark.parametrize("kind", [kind for kind in constraints.KINDS if "cost" in kind])
def test_with_costs_a_control_variate_rises_nearly_as_multilinear_does(kind):
    block = ground(kind)
    direction_N = rollouts(kind, num_rollouts=500, control_variate=True).direction_M
    multilinear_N = multilinear_update(torch.tensor(LOGITS_N), objective=joint(), ground=block, scales=RAW).direction_M
    assert float(torch.cosine_similarity(direction_N, multilinear_N, dim=0)) > 0.9
    free_F = block.budget.rows_F
    assert float(direction_N[free_F] @ torch.tensor(derivative(kind, of_own_size))[free_F]) > 0


@pytest.mark.parametrize("kind", only("group ratios", of=WITHOUT_COSTS))
def test_a_control_variate_points_along_the_gradient_of_the_expected_objective(kind):
    direction_N = rollouts(kind, num_rollouts=1500, control_variate=True).direction_M.numpy()
    expected_N = derivative(kind, of_own_size)
    cosine = direction_N @ expected_N / (np.linalg.norm(direction_N) * np.linalg.norm(expected_N))
    assert cosine > 0.97


@pytest.mark.parametrize("kind", constraints.KINDS)
@pytest.mark.parametrize("control_variate", [True, False])
def test_any_number_of_ranks_gives_the_same_bits(kind, control_variate):
    options = {"num_rollouts": 40, "control_variate": control_variate, "estimator": "group_relative"}
    expected = rollouts(kind, **options)
    for update in on_ranks(2, lambda ranks: rollouts(kind, ranks=ranks, **options)):
        assert torch.equal(update.direction_M, expected.direction_M)
        assert torch.equal(update.best_mask_M, expected.best_mask_M)


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_multilinear_on_any_number_of_ranks_gives_the_same_bits(kind):
    def update(ranks=None):
        return multilinear_update(torch.tensor(LOGITS_N), objective=joint(), ground=ground(kind, ranks), scales=RAW)

    for other in on_ranks(2, update):
        assert torch.equal(other.direction_M, update().direction_M)


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_the_best_rollout_of_a_part_is_allowed_in_it(kind):
    block = ground(kind)
    part = part_of(block, torch.tensor([0, 2, 3, 5]), helpers=RankGroup())
    update = rollout_update(
        torch.zeros(4), objective=joint(), ground=part, scales=RAW, estimator="group_relative", num_rollouts=4,
        seed_of=lambda rollout: rollout, ranks=RankGroup(), step_name="a step", control_variate=True,
    )  # fmt: skip
    assert part.budget.allows(update.best_mask_M)
    assert bool(update.direction_M.isfinite().all())
