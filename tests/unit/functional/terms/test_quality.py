from fractions import Fraction

import numpy as np
import pytest
import torch

from datamask_pl.functional.terms import quality
from datamask_pl.functional.terms.quality import quality_value, weigh_masks


def problem(num_masks=7, num_samples=30):
    rng = np.random.default_rng(0)
    return rng.uniform(size=(num_masks, num_samples)) < 0.3, rng.normal(size=num_samples).astype(np.float32)


def kept_sums(masks_RN, weights_N):
    """Exact sums."""
    return [
        float(sum(Fraction(float(w)) for w, is_kept in zip(weights_N, mask_N, strict=True) if is_kept))
        for mask_N in masks_RN
    ]


@pytest.mark.parametrize("max_converted", [1, 30, 60, 64, 2**22])
def test_masks_weigh_what_they_keep_in_float64_however_many_are_converted_at_a_time(monkeypatch, max_converted):
    monkeypatch.setattr(quality, "MAX_CONVERTED", max_converted)
    masks_RN, weights_N = problem()
    sums_R = weigh_masks(torch.tensor(masks_RN), torch.tensor(weights_N))
    assert sums_R.dtype == torch.float64
    np.testing.assert_allclose(sums_R, kept_sums(masks_RN, weights_N), rtol=1e-13, atol=1e-15)
    # no part is larger than it may be, but for a single mask
    sizes = []
    split = torch.split
    monkeypatch.setattr(
        torch, "split", lambda *arguments: sizes.extend(map(len, split(*arguments))) or split(*arguments)
    )
    weigh_masks(torch.tensor(masks_RN), torch.tensor(weights_N))
    assert max(sizes) == min(7, max(1, max_converted // 30))


def test_masks_of_no_samples_weigh_nothing():
    assert weigh_masks(torch.zeros(3, 0, dtype=torch.bool), torch.zeros(0)).tolist() == [0.0] * 3


def test_quality_is_the_mean_of_what_is_kept():
    masks_RN, weights_N = problem()
    expected_R = np.array(kept_sums(masks_RN, weights_N)) / 9
    found_R = quality_value(torch.tensor(masks_RN), torch.tensor(weights_N), num_selected=9)
    np.testing.assert_allclose(found_R, expected_R, rtol=1e-13, atol=1e-15)
