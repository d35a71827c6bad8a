import numpy as np
import pytest
import torch

from datamask_pl.functional.initialization import MIN_SHARE, positive_scores, quality_log_odds, quality_logits


def quality(seed, low, num_samples=50):
    return torch.tensor(np.random.default_rng(seed).uniform(low, 3.0, num_samples), dtype=torch.float32)


def shares(quality_N):
    """The score's share of the mean, of plain numbers."""
    scores = [score - min(0.0, *quality_N.tolist()) for score in quality_N.tolist()]
    mean = sum(scores) / len(scores)
    return [max(score / mean, 0.001) for score in scores]


@pytest.mark.parametrize("low", [0.0, 0.5, -2.0])
def test_only_what_is_negative_is_shifted_and_nobody_has_less_than_a_thousandth_of_the_mean(low):
    quality_N = quality(0, low)
    scores_N = positive_scores(quality_N)
    assert scores_N.dtype == torch.float64
    np.testing.assert_allclose(scores_N, shares(quality_N), rtol=1e-12)
    assert float(scores_N.min()) >= MIN_SHARE
    if low < 0:
        assert float(scores_N.min()) == MIN_SHARE


@pytest.mark.parametrize("value", [0.0, -2.0, 0.25])
def test_equal_scores_are_all_one(value):
    assert positive_scores(torch.full((4,), value)).tolist() == [1.0] * 4


@pytest.mark.parametrize("low", [0.0, -2.0])
def test_one_draw_has_probabilities_proportional_to_the_scores(low):
    quality_N = quality(1, low)
    expected_N = np.array(shares(quality_N))
    np.testing.assert_allclose(quality_logits(quality_N).softmax(0), expected_N / expected_N.sum(), rtol=1e-12)


@pytest.mark.parametrize("num_selected", [1, 10, 49])
def test_independent_inclusion_is_proportional_to_the_scores_and_never_certain(num_selected):
    quality_N = quality(2, -1.0)
    expected_N = np.minimum(np.array(shares(quality_N)) * num_selected / 50, 0.999)
    assert (num_selected == 49) == (expected_N.max() == 0.999)
    log_odds_N = quality_log_odds(quality_N, num_selected)
    assert log_odds_N.dtype == torch.float64
    np.testing.assert_allclose(log_odds_N.sigmoid(), expected_N, rtol=1e-12)
