"""Where samples lie, against numpy and by counting."""

import numpy as np
import pytest
import torch

from datamask_pl.evidence.clusters import deciles, principal_plane, share_kept


def test_the_plane_is_that_of_the_singular_value_decomposition():
    features_ND = np.random.default_rng(0).normal(size=(60, 5)) * [5, 1, 3, 1, 1]
    points_N2, share_2 = principal_plane(torch.tensor(features_ND, dtype=torch.float32))
    centered_ND = features_ND - features_ND.mean(axis=0)
    _, values_D, vectors_DD = np.linalg.svd(centered_ND)
    expected_N2 = np.abs(centered_ND @ vectors_DD[:2].T)
    np.testing.assert_allclose(points_N2.abs().numpy(), expected_N2, atol=1e-4)
    np.testing.assert_allclose(share_2.numpy(), values_D[:2] ** 2 / (values_D**2).sum(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_the_plane_exists_where_there_are_not_two_directions(shape):
    points_N2, share_2 = principal_plane(torch.ones(shape))
    assert points_N2.tolist() == [[0.0, 0.0]] * shape[0]
    assert share_2.tolist() == [0.0, 0.0]


def test_tenths_hold_a_tenth_each_and_the_best_are_in_the_last():
    values_N = torch.randperm(70, generator=torch.Generator().manual_seed(0)).float()
    tenth_N = deciles(values_N)
    assert torch.bincount(tenth_N).tolist() == [7] * 10
    assert torch.equal(tenth_N, (values_N // 7).long())
    assert deciles(torch.ones(5)).tolist() == [0] * 5


def test_shares_are_what_counting_gives():
    rng = np.random.default_rng(1)
    mask_N, label_N, tenth_N = rng.random(200) < 0.3, rng.integers(0, 4, 200), rng.integers(0, 10, 200)
    share, count = share_kept(*(torch.tensor(part) for part in (mask_N, label_N, tenth_N)), num_clusters=5)
    for row, column in np.ndindex(5, 10):
        is_here_N = (label_N == row) & (tenth_N == column)
        assert count[row, column] == is_here_N.sum()
        expected = mask_N[is_here_N].mean() if is_here_N.any() else np.nan
        assert float(share[row, column]) == pytest.approx(expected, nan_ok=True)
