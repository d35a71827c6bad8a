"""Bounds on the best mask: never below it, and close to the best bound that the relaxation allows."""

from __future__ import annotations

import itertools

import pytest
import torch

from datamask_pl.errors import BudgetError
from datamask_pl.functional.budget import Budget, BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.holdings import Holdings
from datamask_pl.learner.certificate import certify
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective, WeightedObjective

TERMS = (["facility_location"], ["pairwise"], ["disf"], ["facility_location", "pairwise"], ["disf", "pairwise"])


def random_budget(num_samples: int, generator: torch.Generator) -> Budget:
    """A number of samples, or groups, costs and forced samples, in any combination that can be met."""
    kind = int(torch.randint(4, (), generator=generator))
    ratio = float(torch.rand((), generator=generator)) * 0.4 + 0.3
    if kind == 0:
        return FixedSize(num_samples, max(1, round(ratio * num_samples)))
    forced_N = torch.zeros(num_samples, dtype=torch.int8)
    forced_N[0], forced_N[-1] = 1, -1
    holdings = Holdings.of(
        num_samples,
        cost_N=torch.rand(num_samples, generator=generator) + 0.3 if kind >= 2 else None,
        group_N=torch.randint(2, (num_samples,), generator=generator) if kind != 2 else None,
        names=("a", "b") if kind != 2 else ("",),
        forced_N=forced_N,
    )
    try:
        return Constrained(holdings, BudgetSpec(0.6))
    except BudgetError:  # the forced sample costs more than its group may
        return random_budget(num_samples, generator)


def allowed_masks(budget: Budget) -> torch.Tensor:
    """All allowed masks to which no sample can be added: bool (R, N)."""
    masks_RN = torch.tensor(list(itertools.product([False, True], repeat=budget.num_samples)))[1:]
    allowed = [mask_N for mask_N in masks_RN if budget.allows(mask_N)]
    known = {tuple(mask_N.tolist()) for mask_N in allowed}
    larger = torch.eye(budget.num_samples, dtype=torch.bool)
    return torch.stack(
        [
            mask_N
            for mask_N in allowed
            if not any(tuple((mask_N | one_N).tolist()) in known for one_N in larger[~mask_N])
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_is_never_below_the_best_mask(seed: int) -> None:
    check_random_problem(seed)


@pytest.mark.slow
def test_the_bound_is_never_below_the_best_mask_of_a_thousand_problems() -> None:
    for seed in range(60, 1000):
        check_random_problem(seed)


def check_random_problem(seed: int) -> None:
    """Compares the bound with every allowed mask of a random problem."""
    generator = torch.Generator().manual_seed(seed)
    num_samples = int(torch.randint(6, 10, (), generator=generator))
    features_ND = torch.nn.functional.normalize(torch.randn(num_samples, 4, generator=generator), dim=1)
    quality_N = torch.randn(num_samples, generator=generator)
    diversity = [WeightedObjective(name, 0.5 + index) for index, name in enumerate(TERMS[seed % len(TERMS)])]  # type: ignore[arg-type]
    objective = JointObjective(quality_weight=(0.0, 0.4)[seed % 2], diversity=diversity)
    ground = GroundSet.of(features_ND, quality_N, random_budget(num_samples, generator))
    scales = torch.rand(len(objective.terms), generator=generator).double() + 0.1
    masks_RN = allowed_masks(ground.budget)
    f_R = objective.combine(objective.term_values(masks_RN, ground), scales)
    best = float(f_R.max())
    certificate = certify(
        masks_RN[int(f_R.argmax())], value=best, objective=objective, ground=ground, scales=scales, max_steps=25
    )
    assert certificate is not None
    assert certificate.kind == "proved"
    assert certificate.bound >= best - 1e-9 * max(1.0, abs(best))
