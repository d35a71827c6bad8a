from __future__ import annotations

from typing import get_args

import pytest
import torch

from datamask_pl.errors import ConfigError
from datamask_pl.evidence.baselines.catalog import BASELINES, BaselineName, baseline_mask
from tests.support.baseline_problems import problem


def test_every_name_has_its_baseline():
    assert set(get_args(BaselineName)) == set(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("num_selected", [1, 37, 299, 300])
def test_budget_is_exact_with_duplicate_rows_and_inputs_stay_as_they_were(name, num_selected):
    features, quality = problem(3, 8, 0)
    features, quality = features.float().repeat(100, 1), quality.float().repeat(100)
    before = features.clone(), quality.clone()
    mask = baseline_mask(name, features, quality, num_selected=num_selected, quality_weight=0.3, seed=0)
    assert mask.dtype == torch.bool
    assert mask.shape == (300,)
    assert int(mask.sum()) == num_selected
    assert torch.equal(features, before[0])
    assert torch.equal(quality, before[1])


@pytest.mark.parametrize("name", BASELINES)
def test_a_seed_gives_the_same_mask_again(name):
    features, quality = problem(1200, 6, 0)
    kwargs = {"num_selected": 50, "quality_weight": 0.3}
    mask = baseline_mask(name, features, quality, seed=1, **kwargs)
    assert torch.equal(baseline_mask(name, features, quality, seed=1, **kwargs), mask)
    is_drawn = name == "random" or name.startswith(("disf", "leverage", "semdedup"))
    assert torch.equal(baseline_mask(name, features, quality, seed=2, **kwargs), mask) == (not is_drawn)


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in ("random", "semdedup", "semdedup_quality")])
def test_more_weight_gives_more_quality(name):
    features, quality = problem(1200, 6, 0)
    means = [
        float(quality[baseline_mask(name, features, quality, num_selected=60, quality_weight=weight, seed=0)].mean())
        for weight in (0.0, 1.0)
    ]
    if name == "top_quality":
        assert means[0] == means[1]
    else:
        assert means[0] + 0.2 < means[1]


def test_an_unknown_name_is_an_error_that_lists_them():
    with pytest.raises(ConfigError, match=r"a baseline must be one of random, .*semdedup_quality, got 'best'"):
        baseline_mask("best", torch.eye(2), torch.ones(2), num_selected=1, quality_weight=0.0, seed=0)
