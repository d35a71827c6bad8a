import numpy as np
import pytest
import torch

from datamask_pl.functional.terms.disf import (
    GRAM_ROWS,
    disf_expectation,
    disf_value,
    disf_values_from_gram,
    pieces,
    quadratic_forms,
    quick_moment,
    quick_quadratic_forms,
    squared_gram,
    standardized_value,
    weighted_moment,
)
from tests.support import oracles, problems


def centered(features_ND):
    return torch.tensor(features_ND - features_ND.mean(0))


def random_matrix(num_features):
    source = torch.Generator().manual_seed(2)
    return torch.randn(num_features, num_features, generator=source, dtype=torch.float64)


def standardized(features_ND, mask_N):
    z_KD = centered(features_ND)[torch.tensor(mask_N)]
    return float(standardized_value(z_KD.sum(0), z_KD.T @ z_KD, num_selected=len(z_KD)))


@pytest.mark.parametrize("num_selected", [1, 2, 5, 8])
def test_value_is_the_norm_of_the_covariance_by_moment_and_by_gram(num_selected):
    features_ND = problems.unit_rows(8, 3, seed=0)
    masks_RN = problems.random_masks(6, 8, num_selected, seed=0)
    expected_R = [oracles.disf(mask_N, features_ND, num_selected=num_selected) for mask_N in masks_RN]
    z_ND = centered(features_ND)
    by_moment_R = [
        float(disf_value(weighted_moment(z_ND, torch.tensor(mask_N)), num_selected=num_selected)) for mask_N in masks_RN
    ]
    by_gram_R = disf_values_from_gram(torch.tensor(masks_RN), squared_gram(z_ND), num_selected=num_selected)
    np.testing.assert_allclose(by_moment_R, expected_R, rtol=1e-12)
    np.testing.assert_allclose(by_gram_R, expected_R, rtol=1e-12)


@pytest.mark.parametrize("num_samples", [GRAM_ROWS - 1, GRAM_ROWS, GRAM_ROWS + 1, 3 * GRAM_ROWS + 7])
def test_pairs_in_different_bands_of_the_gram_matrix_count_twice(num_samples):
    z_ND = centered(problems.unit_rows(num_samples, 3, seed=0))
    masks_RN = torch.tensor(problems.random_masks(3, num_samples, 100, seed=0))
    expected_R = [float(disf_value(z_ND[mask_N].T @ z_ND[mask_N], num_selected=100)) for mask_N in masks_RN]
    bands = squared_gram(z_ND)
    np.testing.assert_allclose(disf_values_from_gram(masks_RN, bands, num_selected=100), expected_R, rtol=1e-12)
    assert sum(band_CN.numel() for band_CN in bands) <= num_samples * (num_samples + GRAM_ROWS) / 2


@pytest.mark.parametrize("num_selected", [1, 3])
def test_expectation_is_the_sum_over_all_masks(num_selected):
    features_ND = problems.unit_rows(7, 3, seed=1)
    p_N = np.random.default_rng(1).uniform(size=7)
    z_ND, p = centered(features_ND), torch.tensor(p_N)
    value = disf_expectation(weighted_moment(z_ND, p), p, z_ND.square().sum(1).square(), num_selected=num_selected)
    expected = oracles.multilinear_extension(
        p_N, lambda mask_N: oracles.disf(mask_N, features_ND, num_selected=num_selected)
    )
    assert float(value) == pytest.approx(expected, rel=1e-12)


def test_quadratic_forms_are_those_of_each_row():
    z_ND, matrix_DD = centered(problems.unit_rows(5, 3, seed=2)), random_matrix(3)
    np.testing.assert_allclose(quadratic_forms(z_ND, matrix_DD), [float(z @ matrix_DD @ z) for z in z_ND], atol=1e-14)


@pytest.mark.parametrize("num_features", [3, 64])
@pytest.mark.parametrize("level", [0.0, 100.0])
def test_quick_products_err_by_a_hundredth_of_what_forms_differ_by_whatever_they_have_in_common(num_features, level):
    z_ND = centered(problems.unit_rows(500, num_features, seed=4))
    weights_N = torch.tensor(problems.qualities(500, seed=4))
    moment_DD = weighted_moment(z_ND, weights_N)
    quick_DD = quick_moment(z_ND.float(), weights_N)
    assert quick_DD.dtype == torch.float32
    np.testing.assert_allclose(quick_DD, moment_DD, atol=2**-8 * float(moment_DD.abs().max()))
    matrix_DD = moment_DD + level * torch.eye(num_features)
    expected_N = quadratic_forms(z_ND, matrix_DD)
    # unit vectors have the level in common
    differing_N = expected_N - level * z_ND.square().sum(1)
    found_N = quick_quadratic_forms(z_ND.float(), matrix_DD, z_ND.square().sum(1))
    assert found_N.dtype == torch.float32
    np.testing.assert_allclose(found_N, expected_N, atol=float(differing_N.std()) / 100 + 1e-7 * level)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 2048), (5, 2054), (7, 7), (3, 9000)])
def test_pieces_are_every_row_once_and_at_least_one(start, stop):
    found = list(pieces(slice(start, stop), torch.device("cpu")))
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(start, stop))
    assert found
    assert all(piece.stop - piece.start <= 2048 for piece in found)


def test_quadratic_forms_have_the_type_of_the_features_whatever_that_of_the_matrix():
    z_ND, matrix_DD = centered(problems.unit_rows(5, 3, seed=2)), random_matrix(3)
    forms_N = quadratic_forms(z_ND.float(), matrix_DD)
    assert forms_N.dtype == torch.float32
    np.testing.assert_allclose(forms_N, quadratic_forms(z_ND, matrix_DD), atol=1e-6)


@pytest.mark.parametrize("num_selected", [2, 3, 10, 20])
def test_standardized_is_numpy_corrcoef(num_selected):
    features_ND = problems.unit_rows(20, 4, seed=3)
    for mask_N in problems.random_masks(5, 20, num_selected, seed=3):
        assert standardized(features_ND, mask_N) == pytest.approx(
            oracles.disf_standardized(mask_N, features_ND), rel=1e-9
        )


def test_standardized_leaves_out_dimensions_that_are_constant_in_the_set():
    features_ND = problems.unit_rows(20, 5, seed=4)
    mask_N = oracles.mask_of(range(8), 20)
    features_ND[mask_N, 1] = 0.3
    features_ND[mask_N, 4] = -0.7
    without_ND = features_ND[:, [0, 2, 3]]
    assert standardized(features_ND, mask_N) == pytest.approx(oracles.disf_standardized(mask_N, without_ND), rel=1e-9)


@pytest.mark.parametrize("center", [1.0, 1e4])
def test_standardized_tells_what_is_constant_from_what_hardly_varies_however_far_from_zero_it_is(center):
    z_KD = problems.unit_rows(100, 10, seed=6)
    z_KD[:, 3:] = center * z_KD[0, 3:]
    z_KD[:, 2] = center + 0.1 * z_KD[:, 2]
    moment_DD = torch.tensor(z_KD.T @ z_KD)
    value = standardized_value(torch.tensor(z_KD.sum(0)), moment_DD, num_selected=100)
    varying = oracles.disf_standardized(np.ones(100, dtype=bool), z_KD[:, :3])
    assert float(value) == pytest.approx(varying, rel=1e-3)


@pytest.mark.parametrize("mask_rows", [[3], [0, 1, 2]])
def test_standardized_of_one_sample_or_of_copies_is_zero(mask_rows):
    features_ND = problems.unit_rows(6, 4, seed=5)
    features_ND[:3] = features_ND[0]
    assert standardized(features_ND, oracles.mask_of(mask_rows, 6)) == 0.0
