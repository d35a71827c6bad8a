"""Bounds on the best mask: never below it, and close to the best bound that the relaxation allows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import optimize, sparse

from datamask_pl.errors import BudgetError
from datamask_pl.functional.budget import Budget, BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.holdings import Holdings
from datamask_pl.learner.certificate import Certificate, certify
from datamask_pl.learner.loop import learn
from datamask_pl.learner.options import make_method
from datamask_pl.objectives import DiSF, FacilityLocation
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective, WeightedObjective
from datamask_pl.objectives.neighbor_table import NeighborSearch

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


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_never_below_the_best_mask(seed: int) -> None:
    check_random_problem(seed)


@pytest.mark.slow
def test_the_bound_is_never_below_the_best_mask_of_a_thousand_problems() -> None:
    for seed in range(20, 1000):
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


def linear_program(similarity_NN: np.ndarray, quality_N: np.ndarray, *, num_selected: int) -> float:
    """The maximum of sum_i quality_i m_i + sum_ji similarity_ji y_ji, y_ji <= m_i, sum_i y_ji <= 1, by HiGHS."""
    n = len(quality_N)
    values = np.concatenate([-quality_N, -similarity_NN.ravel()])
    served = sparse.hstack([sparse.csr_matrix((n, n)), sparse.kron(sparse.identity(n), np.ones((1, n)))])
    by_kept = sparse.hstack([sparse.vstack([-sparse.identity(n)] * n), sparse.identity(n * n)])
    solved = optimize.linprog(
        values,
        A_ub=sparse.vstack([served, by_kept]).tocsr(),
        b_ub=np.concatenate([np.ones(n), np.zeros(n * n)]),
        A_eq=np.concatenate([np.ones(n), np.zeros(n * n)])[None],
        b_eq=[num_selected],
        bounds=(0, 1),
        method="highs",
    )
    return -float(solved.fun)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_bound_of_many_steps_is_that_of_the_linear_program(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features_ND = torch.nn.functional.normalize(torch.randn(100, 6, generator=generator), dim=1)
    ground = GroundSet.of(features_ND, torch.rand(100, generator=generator), 10)
    objective = JointObjective(quality_weight=0.3, diversity=FacilityLocation(num_neighbors=100))
    scales = torch.ones(2, dtype=torch.float64)
    mask_N = learn(ground, objective=objective, scales=scales, method=make_method(objective))
    f = float(objective.combine(objective.term_values(mask_N[None], ground), scales))
    found = certify(mask_N, value=f, objective=objective, ground=ground, scales=scales, max_steps=20_000)
    similarity_NN = (features_ND @ features_ND.T).clamp(min=0).double().numpy()
    best = linear_program(0.7 / 100 * similarity_NN, 0.3 / 10 * ground.quality_N.double().numpy(), num_selected=10)
    assert found is not None
    assert found.bound == pytest.approx(best, rel=1e-6)


def test_on_approximate_lists_the_bound_is_estimated_and_above_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    centers_CD = torch.randn(20, 16, generator=generator)
    features_ND = centers_CD.repeat(100, 1) + 0.6 * torch.randn(2000, 16, generator=generator)
    ground = GroundSet.of(torch.nn.functional.normalize(features_ND, dim=1), torch.rand(2000, generator=generator), 200)
    scales = torch.ones(2, dtype=torch.float64)

    def found(neighbors: NeighborSearch, recall: float) -> Certificate:
        objective = JointObjective(quality_weight=0.3, diversity=FacilityLocation(neighbors=neighbors, recall=recall))
        mask_N = ground.budget.fill(ground.quality_N)
        f = float(objective.combine(objective.term_values(mask_N[None], ground), scales))
        certificate = certify(mask_N, value=f, objective=objective, ground=ground, scales=scales)
        assert certificate is not None
        assert certificate.bound > f
        return certificate

    exact, approximate = found("exact", 1.0), found("approximate", 0.97)
    assert (exact.kind, approximate.kind) == ("proved", "estimated")
    # what the lists miss is added: a confidence bound is not much below the proved one
    assert approximate.bound >= exact.bound * (1 - 1e-3)


def test_a_term_without_planes_has_no_bound() -> None:
    ground = GroundSet.of(torch.eye(4), torch.rand(4), 2)
    objective = JointObjective(quality_weight=0.5, diversity=DiSF(standardize=True))
    mask_N = torch.tensor([True, True, False, False])
    scales = torch.ones(2, dtype=torch.float64)
    assert certify(mask_N, value=0.0, objective=objective, ground=ground, scales=scales) is None
