"""The mask of a block is the best of those that are known."""

import numpy as np
import pytest
import torch

from datamask_pl.errors import DatamaskWarning
from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.learner.loop import learn
from datamask_pl.learner.options import make_method
from datamask_pl.learner.solve import calibrate
from datamask_pl.learner.step import take_step
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective


@pytest.mark.parametrize("polish", [True, False])
@pytest.mark.parametrize(
    ("seed", "num_samples", "diversity", "weight", "ratio", "groups"),
    [(0, 30, "disf", 0.7, 0.3, "abc"), (0, 30, "disf", 0.9, 0.3, "abc"), (1, 300, "pairwise", 0.3, 0.05, "")]
    + [(seed, 30, "facility_location", 0.5, 0.3, "abc") for seed in range(8)],
)
def test_within_costs_it_is_worth_its_start_and_the_top_quality(
    seed, num_samples, diversity, weight, ratio, groups, polish
):
    rng = np.random.default_rng(seed)
    features_ND = torch.tensor(rng.normal(size=(num_samples, 8)), dtype=torch.float32)
    quality_N = torch.tensor(rng.random(num_samples), dtype=torch.float32)
    cost_N = torch.tensor(rng.lognormal(5, 1.5, num_samples).round().clip(1))
    group_N = torch.tensor(rng.integers(0, 3, num_samples)) if groups else None
    holdings = Holdings.of(num_samples, cost_N=cost_N, group_N=group_N, names=tuple(groups) or ("",))
    budget = Constrained(holdings, BudgetSpec(ratio))
    objective = JointObjective(quality_weight=weight, diversity=diversity)
    ground = GroundSet.of(features_ND, quality_N, budget)
    scales = calibrate(objective, ground, seed=1)
    last = []
    mask_N = learn(
        ground,
        objective=objective,
        scales=scales,
        method=make_method(objective, polish=polish),
        on_step=lambda step, logits_N: last.append(logits_N.clone()),
    )
    masks_RN = torch.stack([mask_N, budget.fill(quality_N), budget.fill(last[-1])])
    f, top_quality, start = objective.combine(objective.term_values(masks_RN, ground), scales).tolist()
    assert budget.allows(mask_N)
    assert f >= max(top_quality, start) - 1e-9


def test_a_term_that_is_left_out_for_its_small_spread_is_warned_of():
    quality_N = torch.tensor(np.random.default_rng(0).normal(1e5, 0.05, 200), dtype=torch.float32)
    features_ND = torch.tensor(np.random.default_rng(1).normal(size=(200, 4)), dtype=torch.float32)
    with pytest.warns(DatamaskWarning, match=r"model\.calibrate: quality counts nothing"):
        calibrate(
            JointObjective(quality_weight=0.5, diversity="pairwise"), GroundSet.of(features_ND, quality_N, 50), seed=0
        )


@pytest.mark.parametrize("estimator", ["leave_one_out", "group_relative"])
@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("control_variate", [False, True])
def test_a_part_of_dropped_samples_alone_moves_nothing(estimator, has_costs, control_variate):
    forced_N = torch.tensor([-1] * 4 + [0] * 16, dtype=torch.int8)
    cost_N = torch.arange(1.0, 21.0).double() if has_costs else None
    budget = Constrained(Holdings.of(20, cost_N=cost_N, forced_N=forced_N), BudgetSpec(0.3)).part(torch.arange(4))
    rng = np.random.default_rng(0)
    features_ND = torch.tensor(rng.normal(size=(4, 3)), dtype=torch.float32)
    objective = JointObjective(quality_weight=0.5, diversity="pairwise")
    update = take_step(
        torch.zeros(4),
        objective=objective,
        ground=GroundSet.of(features_ND, torch.ones(4), budget),
        scales=torch.ones(2, dtype=torch.float64),
        method=make_method(objective, estimator=estimator, control_variate=control_variate, num_rollouts=4),
        seed_of=lambda rollout: rollout,
    )
    assert update.direction_M.tolist() == [0.0] * 4
    assert update.best_mask_M is None
