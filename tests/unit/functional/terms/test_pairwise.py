import math

import numpy as np
import pytest
import torch

from datamask_pl.functional.terms.pairwise import (
    mask_sums,
    pairwise_gradient,
    pairwise_interactions,
    pairwise_value,
    relative_pairs_slope,
)
from tests.support import oracles, problems


def moments(features_ND, weights_RN):
    features_ND, weights_RN = torch.tensor(features_ND), torch.tensor(weights_RN, dtype=torch.float64)
    return mask_sums(features_ND, weights_RN), weights_RN.square() @ features_ND.square().sum(1)


@pytest.mark.parametrize("num_selected", [1, 2, 5, 8])
def test_value_is_that_of_the_double_loop(num_selected):
    features_ND = problems.unit_rows(8, 3, seed=0)
    masks_RN = problems.random_masks(6, 8, num_selected, seed=0)
    value_R = pairwise_value(*moments(features_ND, masks_RN), num_selected=num_selected)
    expected_R = [oracles.pairwise(mask_N, features_ND, num_selected=num_selected) for mask_N in masks_RN]
    np.testing.assert_allclose(value_R, expected_R, atol=1e-14)


def test_identical_vectors_have_the_lowest_value_and_opposite_pairs_the_highest():
    same_ND = np.tile([[0.6, 0.8]], (4, 1))
    opposite_ND = same_ND * np.array([[1.0], [-1.0], [1.0], [-1.0]])
    everything = np.ones((1, 4))
    assert float(pairwise_value(*moments(same_ND, everything), num_selected=4)) == pytest.approx(-1.0)
    assert float(pairwise_value(*moments(opposite_ND, everything), num_selected=4)) == pytest.approx(1 / 3)


@pytest.mark.parametrize("num_selected", [1, 2, 4])
def test_gradient_is_the_marginal_gain(num_selected):
    features_ND = problems.unit_rows(6, 3, seed=1)
    p_N = np.random.default_rng(1).uniform(size=6)
    sum_RD, _ = moments(features_ND, p_N[None])
    gradient_N = pairwise_gradient(
        torch.tensor(features_ND),
        torch.tensor(p_N),
        torch.tensor((features_ND**2).sum(1)),
        sum_RD[0],
        num_selected=num_selected,
    )
    expected_N = oracles.multilinear_gradient(
        p_N, lambda mask_N: oracles.pairwise(mask_N, features_ND, num_selected=num_selected)
    )
    np.testing.assert_allclose(gradient_N, expected_N, atol=1e-12)


@pytest.mark.parametrize("num_selected", [1, 2, 4])
def test_interactions_are_what_keeping_one_sample_changes_in_the_gain_of_another(num_selected):
    features_ND, p_N = problems.unit_rows(6, 3, seed=2), np.random.default_rng(2).uniform(size=6)

    def gains(weights_N):
        def f(mask_N):
            return oracles.pairwise(mask_N, features_ND, num_selected=num_selected)

        return oracles.multilinear_gradient(weights_N, f)

    changed_NN = np.stack([gains(np.where(row, 1.0, p_N)) - gains(np.where(row, 0.0, p_N)) for row in np.eye(6)])
    found_NN = pairwise_interactions(*[torch.tensor(features_ND)] * 2, num_selected=num_selected).fill_diagonal_(0)
    np.testing.assert_allclose(found_NN, changed_NN, atol=1e-12)
    assert changed_NN.any() == (num_selected > 1)


@pytest.mark.parametrize("size", [2.5, 3.0, 40.0])
def test_the_slope_of_the_number_of_pairs_is_its_derivative(size):
    def log_pairs(k):
        return math.log(k * (k - 1))

    expected = (log_pairs(size + 1e-5) - log_pairs(size - 1e-5)) / 2e-5
    assert relative_pairs_slope(size) == pytest.approx(expected, rel=1e-8)


def test_below_two_members_the_number_of_pairs_is_that_of_two():
    assert relative_pairs_slope(2) == 1.5
    assert relative_pairs_slope(1.999) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_of_the_features_type_and_takes_each_length_as_it_is(dtype):
    """Rows are of length 1 but for rounding; here they are far from it."""
    features_ND = problems.unit_rows(5, 3, seed=3) * np.array([[0.5], [1.0], [1.5], [2.0], [3.0]])
    p_N = np.random.default_rng(3).uniform(size=5)
    found_N = pairwise_gradient(
        torch.tensor(features_ND, dtype=dtype),
        torch.tensor(p_N),
        torch.tensor((features_ND**2).sum(1)),
        torch.tensor(p_N @ features_ND),
        num_selected=3,
    )
    expected_N = [-2 / 6 * sum(p_N[j] * features_ND[i] @ features_ND[j] for j in range(5) if j != i) for i in range(5)]
    assert found_N.dtype == dtype
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-5)
