import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.data.scaling import is_constant, quality_warning, scale_quality

SCALINGS = ("rank", "minmax", "zscore", "none")
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def brute_force_ranks(values):
    """Share of the other samples that a sample is above, equals counting half."""
    above = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1) - 1
    return (above + equal / 2) / (len(values) - 1)


@given(st.lists(st.integers(-4, 4), min_size=2, max_size=30))
def test_rank_is_the_share_of_samples_that_one_is_above(values):
    quality = np.array(values, dtype=np.float32)
    expected = np.zeros(len(values)) if len(set(values)) == 1 else brute_force_ranks(quality)
    np.testing.assert_allclose(scale_quality(quality, "rank"), expected, rtol=1e-6)


def test_rank_runs_from_zero_to_one_whatever_the_outliers():
    quality = np.array([0.1, 1e9, 0.2, -1e9, 0.3], dtype=np.float32)
    np.testing.assert_array_equal(scale_quality(quality, "rank"), np.float32([0.25, 1, 0.5, 0, 0.75]))


@pytest.mark.parametrize("scaling", SCALINGS)
@given(st.lists(finite_floats, min_size=1, max_size=30))
def test_every_scaling_is_finite_and_keeps_the_order(scaling, values):
    quality = np.array(values, dtype=np.float32)
    scaled = scale_quality(quality, scaling)
    assert scaled.dtype == np.float32
    assert np.isfinite(scaled).all()
    assert (np.diff(scaled[np.argsort(quality, kind="stable")]) >= 0).all()


def test_minmax_of_the_widest_float32_range_does_not_overflow():
    quality = np.array([-3e38, 0, 3e38], dtype=np.float32)
    np.testing.assert_allclose(scale_quality(quality, "minmax"), [0, 0.5, 1])


def test_zscore_has_mean_zero_and_deviation_one():
    quality = np.random.default_rng(0).normal(5, 3, 1000).astype(np.float32)
    scaled = scale_quality(quality, "zscore").astype(np.float64)
    assert abs(scaled.mean()) < 1e-6
    assert abs(scaled.std() - 1) < 1e-6


@pytest.mark.parametrize("scaling", ["rank", "minmax", "zscore"])
@pytest.mark.parametrize("num_samples", [1, 7])
def test_constant_quality_gives_zeros_and_never_divides_by_its_deviation(scaling, num_samples):
    """QuRating: constant scores divided by a zero deviation."""
    quality = np.full(num_samples, 0.1, dtype=np.float32)
    assert is_constant(quality)
    np.testing.assert_array_equal(scale_quality(quality, scaling), np.zeros(num_samples))


def test_none_leaves_quality_as_it_is():
    quality = np.array([5, 5, 7], dtype=np.float32)
    np.testing.assert_array_equal(scale_quality(quality, "none"), quality)


def test_an_unknown_scaling_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"rank, minmax, zscore or none, got 'log'"):
        scale_quality(np.array([1, 2], dtype=np.float32), "log")


def test_an_outlier_that_takes_the_range_of_minmax_is_warned_of():
    quality_N = np.random.default_rng(0).random(1000).astype(np.float32)
    assert quality_warning(quality_N, scale_quality(quality_N, "minmax"), block=0, scaling="minmax") is None
    quality_N[3] = 1e9
    warning = quality_warning(quality_N, scale_quality(quality_N, "minmax"), block=0, scaling="minmax")
    assert "to 98 % of the samples of block 0" in str(warning)
    assert quality_warning(quality_N, scale_quality(quality_N, "rank"), block=0, scaling="rank") is None
