"""Objectives where masks have no fixed size, as under a budget of costs."""

import numpy as np
import pytest
import torch

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.objectives import Objective
from datamask_pl.objectives.joint import JointObjective
from tests.support import oracles
from tests.support.problems import DIVERSITIES, ground_set, qualities, unit_rows

N = 7
FEATURES_ND, QUALITY_N = unit_rows(N, 3, 5), qualities(N, 5)
SCALES = torch.ones(2, dtype=torch.float64)
CONSTRAINT = Constrained(Holdings.of(N, cost_N=torch.arange(1, N + 1)), BudgetSpec(0.5))


class MeanNorm(Objective):
    """A user's own, with autograd's expectation."""

    def value(self, masks_RN, ground):
        weights_RN = masks_RN.to(torch.float64) / ground.num_selected
        return -(weights_RN @ ground.features(slice(None)).double()).norm(dim=1)

    def expectation(self, p_N, ground):
        return -(p_N / ground.num_selected @ ground.features(slice(None)).double()).norm()


KINDS = {**DIVERSITIES, "mean_norm": MeanNorm()}


def ground():
    return ground_set(FEATURES_ND, CONSTRAINT, quality_N=QUALITY_N)


def joint(kind):
    return JointObjective(quality_weight=0.3, diversity=KINDS[kind])


def of_one_size(kind, mask_N):
    """The value of a mask in a ground set whose budget is its size."""
    fixed = ground_set(FEATURES_ND, int(mask_N.sum()), quality_N=QUALITY_N)
    return joint(kind).combine(joint(kind).term_values(torch.tensor(mask_N)[None], fixed), SCALES)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_judged_by_its_own_size(kind):
    masks = [mask_N for mask_N in oracles.all_masks(N) if mask_N.any()]
    value_R = joint(kind).combine(joint(kind).term_values(torch.tensor(np.stack(masks)), ground()), SCALES)
    expected_R = torch.stack([of_one_size(kind, mask_N) for mask_N in masks])
    assert torch.allclose(value_R, expected_R, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_expectation_is_the_value_where_p_is_a_mask(kind):
    for mask_N in oracles.all_masks(N):
        if mask_N.any():
            found, _ = joint(kind).value_and_gradient(torch.tensor(mask_N).double(), ground(), SCALES)
            assert float(found.value) == pytest.approx(float(of_one_size(kind, mask_N)), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_derivative_also_by_the_size(kind):
    block, objective = ground(), joint(kind)
    p_N = torch.tensor(np.random.default_rng(0).uniform(0.2, 0.8, size=N))
    found, _ = objective.value_and_gradient(p_N, block, SCALES)
    step = 1e-6
    for row, unit_N in enumerate(torch.eye(N).double()):
        above, _ = objective.value_and_gradient(p_N + step * unit_N, block, SCALES)
        below, _ = objective.value_and_gradient(p_N - step * unit_N, block, SCALES)
        numeric = float(above.value - below.value) / (2 * step)
        assert float(found.gradient_N[row]) == pytest.approx(numeric, abs=1e-6)


@pytest.mark.parametrize("kind", DIVERSITIES)
def test_the_differentiable_expectation_has_the_same_gradient(kind):
    block, objective = ground(), DIVERSITIES[kind]
    p_N = torch.tensor(np.random.default_rng(1).uniform(0.2, 0.8, size=N)).requires_grad_()
    sized = block.sized(float(p_N.detach().sum()))
    (gradient_N,) = torch.autograd.grad(objective.expectation(p_N, sized), p_N)
    found = objective.value_and_gradient(p_N.detach(), sized)
    expected_N = found.gradient_N + objective.size_slope(p_N.detach(), found, sized)
    assert torch.allclose(gradient_N, expected_N.double(), atol=1e-12)
