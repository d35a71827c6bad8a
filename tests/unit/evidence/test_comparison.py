"""Baselines get the run's pull of quality, or an error in words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.errors import ConfigError
from datamask_pl.evidence import comparison
from datamask_pl.evidence.baselines.catalog import BASELINES
from datamask_pl.evidence.comparison import DEFAULT_BASELINES, DIVERSITY_OF, check_baselines, quality_weight_of

weights = st.floats(0, 1)
scales = st.floats(1e-3, 1e3)


@given(w=weights, a=scales, b=scales, terms=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2))
def test_raw_terms_with_the_weight_order_masks_as_the_calibrated_ones_do(w, a, b, terms):
    v = quality_weight_of("greedy_disf", w, scale_of={"quality": a, "disf": b}.__getitem__)
    assert 0 <= v <= 1
    calibrated = np.array([w * q / a + (1 - w) * d / b for q, d in terms])
    raw = np.array([v * q + (1 - v) * d for q, d in terms])
    np.testing.assert_allclose(raw * (w / a + (1 - w) / b), calibrated, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("quality", "diversity", "expected"), [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (0.0, 0.0, 0.3)])
def test_a_term_that_is_constant_counts_nothing(quality, diversity, expected):
    scale_of = {"quality": quality, "pairwise": diversity}.__getitem__
    assert quality_weight_of("greedy_pairwise", 0.3, scale_of=scale_of) == expected


def test_only_those_that_maximise_a_raw_term_ask_for_scales():
    def scale_of(_):
        raise AssertionError

    for name in set(BASELINES) - set(DIVERSITY_OF):
        assert quality_weight_of(name, 0.3, scale_of=scale_of) == (0.0 if name == "disf_published" else 0.3)


def test_every_default_baseline_is_a_baseline():
    assert check_baselines(DEFAULT_BASELINES, num_samples=10) == DEFAULT_BASELINES


@pytest.mark.parametrize("names", [["random", "best"], ["random", "random"]])
def test_names_that_are_unknown_or_repeated_are_refused_with_the_choices(names):
    with pytest.raises(ConfigError, match=r"baselines must be distinct names of: random, .*semdedup_quality; got"):
        check_baselines(names, num_samples=10)


def test_greedy_that_would_not_fit_into_memory_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(comparison, "MAX_SIMILARITY_BYTES", 4 * 100**2)
    check_baselines(["greedy_facility_location"], num_samples=100)
    with pytest.raises(ConfigError, match=r"max_samples: .*0\.0 GB for 101 samples; lower max_samples to 100 or"):
        check_baselines(["greedy_facility_location"], num_samples=101)
    check_baselines(["greedy_disf"], num_samples=101)
