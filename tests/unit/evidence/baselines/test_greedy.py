from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from datamask_pl.errors import BadRowError, BudgetError, ConfigError
from datamask_pl.evidence.baselines.greedy import (
    greedy_disf,
    greedy_pairwise,
    lazy_greedy_facility_location,
    random_mask,
    top_quality_mask,
)
from tests.support import oracles

GREEDY = {"facility_location": lazy_greedy_facility_location, "pairwise": greedy_pairwise, "disf": greedy_disf}
WEIGHTS = [0.0, 0.05, 0.3, 1.0]


def problem(num_samples, num_features, seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, num_features, generator=generator, dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    return features, torch.rand(num_samples, generator=generator, dtype=torch.float64)


def oracle_mask(kind, features, quality, num_selected, quality_weight):
    def value(mask):
        # Pairwise greedy looks at the value of the set as it is, the others at that of a set that will be full.
        size = int(mask.sum()) if kind == "pairwise" else num_selected
        return oracles.objective(kind, features, quality, num_selected=size, quality_weight=quality_weight)(mask)

    return oracles.naive_greedy(len(features), num_selected, value)


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("quality_weight", WEIGHTS)
@pytest.mark.parametrize(("num_samples", "num_selected"), [(1, 1), (5, 5), (9, 1), (12, 4), (12, 7)])
def test_greedy_gives_the_mask_of_naive_greedy(kind, quality_weight, num_samples, num_selected):
    for seed in range(3):
        features, quality = problem(num_samples, 4, seed)
        expected = oracle_mask(kind, features.numpy(), quality.numpy(), num_selected, quality_weight)
        found = GREEDY[kind](features, quality, num_selected=num_selected, quality_weight=quality_weight)
        assert found.dtype == torch.bool
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("kind", GREEDY)
def test_inputs_stay_as_they_were(kind):
    features, quality = problem(10, 3, 0)
    before = features.clone(), quality.clone()
    GREEDY[kind](features, quality, num_selected=4, quality_weight=0.5)
    assert torch.equal(features, before[0])
    assert torch.equal(quality, before[1])


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("num_selected", [1, 37, 299, 300])
def test_budget_is_exact_with_duplicate_rows(kind, num_selected):
    """Redundant rows give repeated indices. Source: apricot #19."""
    features, quality = problem(3, 8, 0)
    mask = GREEDY[kind](
        features.float().repeat(100, 1), quality.float().repeat(100), num_selected=num_selected, quality_weight=0.3
    )
    assert mask.shape == (300,)
    assert int(mask.sum()) == num_selected


@pytest.mark.parametrize("kind", GREEDY)
def test_ties_go_to_the_first_rows(kind):
    features = torch.tensor([[1.0, 0.0]]).repeat(20, 1)
    mask = GREEDY[kind](features, torch.ones(20), num_selected=3, quality_weight=0.5)
    assert mask.nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", GREEDY)
def test_pure_quality_is_top_quality(kind):
    features, quality = problem(40, 3, 1)
    mask = GREEDY[kind](features, quality, num_selected=7, quality_weight=1.0)
    assert torch.equal(mask, top_quality_mask(quality, 7))


@pytest.mark.slow
def test_facility_location_is_as_good_as_apricot_on_the_same_similarities():
    with warnings.catch_warnings():
        # apricot compiles with numba at import, which warns of its own future changes; none is ours to fix.
        warnings.simplefilter("ignore")
        apricot = pytest.importorskip("apricot")
        features, quality = problem(300, 8, 2)
        similarity = (features @ features.T).clamp(min=0.0)
        selection = apricot.FacilityLocationSelection(30, metric="precomputed", optimizer="lazy")
        apricot_rows = selection.fit(similarity.numpy()).ranking
    mask = lazy_greedy_facility_location(features, quality, num_selected=30, quality_weight=0.0)
    expected = float(similarity[:, torch.as_tensor(apricot_rows)].amax(dim=1).mean())
    found = float(similarity[:, mask].amax(dim=1).mean())
    assert found == pytest.approx(expected, abs=1e-12)


def test_facility_location_reaches_its_bound_of_the_optimum():
    """Greedy is within 1 - 1/e of the optimum of a monotone submodular function (Nemhauser et al. 1978)."""
    features, quality = problem(10, 3, 3)
    value = oracles.objective(
        "facility_location", features.numpy(), quality.numpy(), num_selected=3, quality_weight=0.2
    )
    mask = lazy_greedy_facility_location(features, quality, num_selected=3, quality_weight=0.2)
    assert (1 - np.exp(-1)) * oracles.best_mask(10, 3, value)[1] <= value(mask.numpy())


def test_similarities_above_the_limit_are_refused_before_they_are_allocated():
    features, quality = problem(10, 3, 0)
    kwargs = {"num_selected": 2, "quality_weight": 0.0}
    with pytest.raises(ConfigError, match=r"max_similarity_bytes allows 799 bytes of memory.*10 samples need 800"):
        lazy_greedy_facility_location(features, quality, max_similarity_bytes=799, **kwargs)
    assert int(lazy_greedy_facility_location(features, quality, max_similarity_bytes=800, **kwargs).sum()) == 2
    # 10 TB: would end the process if it were tried.
    features = torch.zeros(1, 1).expand(1_600_000, 1)
    with pytest.raises(ConfigError, match="memory"):
        lazy_greedy_facility_location(features, torch.zeros(1_600_000), **kwargs)


def test_random_masks_are_uniform_and_repeat_with_the_seed():
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([random_mask(10, 3, generator=generator) for _ in range(2000)])
    assert torch.all(masks.sum(dim=1) == 3)
    # Four standard errors of a frequency of 0.3 in 2000 masks.
    assert torch.all((masks.double().mean(dim=0) - 0.3).abs() < 4 * (0.3 * 0.7 / 2000) ** 0.5)
    again = random_mask(10, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(masks[0], again)


def test_top_quality_breaks_ties_by_row_order():
    quality = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert top_quality_mask(quality, 3).tolist() == [False, True, True, True, False]
    assert top_quality_mask(torch.zeros(100_000), 10).nonzero().flatten().tolist() == list(range(10))


@pytest.mark.parametrize("num_selected", [0, 5, -1])
def test_impossible_budget_is_an_error(num_selected):
    features, quality = torch.eye(4), torch.ones(4)
    for select in (
        lambda: random_mask(4, num_selected, generator=torch.Generator()),
        lambda: top_quality_mask(quality, num_selected),
        *(lambda g=g: g(features, quality, num_selected=num_selected, quality_weight=0.5) for g in GREEDY.values()),
    ):
        with pytest.raises(BudgetError, match=rf"num_selected must be in \[1, 4\].*got {num_selected};"):
            select()


@pytest.mark.parametrize("kind", GREEDY)
def test_unusable_inputs_are_errors_that_name_them(kind):
    greedy = GREEDY[kind]
    features, quality = torch.eye(4), torch.ones(4)
    with pytest.raises(ConfigError, match=r"quality_weight must be in \[0, 1\], got 1.5"):
        greedy(features, quality, num_selected=2, quality_weight=1.5)
    with pytest.raises(ConfigError, match=r"\(4, 4\) and \(3,\)"):
        greedy(features, quality[:3], num_selected=2, quality_weight=0.5)
    bad = quality.clone()
    bad[2] = torch.nan
    with pytest.raises(BadRowError, match="quality_N must be finite, but row 2"):
        greedy(features, bad, num_selected=2, quality_weight=0.5)
    bad = features.clone()
    bad[1, 3] = torch.inf
    with pytest.raises(BadRowError, match="features_ND must be finite, but row 1"):
        greedy(bad, quality, num_selected=2, quality_weight=0.5)
