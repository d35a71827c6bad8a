import numpy as np
import oracles
import problems
import pytest
import torch

from datamask_pl.functional.pairwise import mask_sums, pairwise_gradient, pairwise_value


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
