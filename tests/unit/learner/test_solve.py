"""The mask of a block is the best of those that are known."""

import numpy as np
import pytest
import torch

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.learner.loop import learn
from datamask_pl.learner.options import make_method
from datamask_pl.learner.solve import calibrate
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
