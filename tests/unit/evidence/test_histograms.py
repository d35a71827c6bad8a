"""Histograms count every finite value once, and nothing else."""

import numpy as np
import pytest
import torch

from datamask_pl.evidence.histograms import MAX_COUNT, Histogram, finite_range, histogram


def test_counts_are_those_of_numpy():
    values_N = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    low, high = finite_range(torch.from_numpy(values_N))
    counted = histogram(torch.from_numpy(values_N), num_bins=16, low=low, high=high)
    expected, edges = np.histogram(values_N, bins=16, range=(low, high))
    assert (low, high) == (values_N.min(), values_N.max())
    assert np.abs(counted.count_B.numpy() - expected).sum() <= 2  # a value at an edge, in float32
    assert counted.count_B.sum() == 5000
    np.testing.assert_allclose(counted.edges.numpy(), edges, rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_left_out_and_counted(bad):
    """Pytorch #31855: a histogram of NaN raises."""
    values_N = torch.tensor([bad, 0.2, 0.7])
    assert finite_range(values_N) == pytest.approx((0.2, 0.7))
    counted = histogram(values_N, num_bins=2, low=0.0, high=1.0)
    assert (counted.count_B.tolist(), counted.num_left_out) == ([1.0, 1.0], 1)


@pytest.mark.parametrize("values", [[], [torch.nan], [3.0, 3.0], [0.0], [-1e30]])
def test_there_is_always_a_range(values):
    values_N = torch.tensor(values)
    low, high = finite_range(values_N)
    assert low < high
    assert histogram(values_N, num_bins=4, low=low, high=high).count_B.sum() == values_N.isfinite().sum()


def test_more_values_in_a_bin_than_float32_can_count_are_counted():
    counted = histogram(torch.zeros(1).expand(MAX_COUNT + 3), num_bins=1, low=0.0, high=1.0)
    assert counted.count_B.tolist() == [MAX_COUNT + 3]


def test_parts_add_up_to_the_whole():
    values_N = torch.rand(100, generator=torch.Generator().manual_seed(0))
    parts = [histogram(part, num_bins=5, low=0.0, high=1.0) for part in values_N.split(30)]
    whole = histogram(values_N, num_bins=5, low=0.0, high=1.0)
    merged = Histogram.merged(parts)
    assert torch.equal(merged.count_B, whole.count_B)
    assert (merged.low, merged.high, merged.num_left_out) == (0.0, 1.0, 0)
