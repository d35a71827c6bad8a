"""The oracles against values worked out by hand, and against each other where two ways lead to the same number."""

from __future__ import annotations

import math
from itertools import pairwise as neighbours

import numpy as np
import pytest
import torch

from tests.support import oracles

# Three unit vectors: the cosine of rows 0 and 1 is 0.6, of 1 and 2 is 0.8, of 0 and 2 is 0.
FEATURES = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
QUALITY = np.array([0.5, 0.0, 1.0])
# Weights 1, 2 and 3 of 6.
LOGITS = np.log([1.0, 2.0, 3.0])
KINDS = ["facility_location", "pairwise", "disf", "disf_standardized"]


def mask(*rows):
    return oracles.mask_of(rows, 3)


def random_problem(num_samples, num_features, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_samples, num_features))
    return features / np.linalg.norm(features, axis=1, keepdims=True), rng.uniform(size=num_samples)


def test_draw_probabilities_match_hand_computation():
    probability = dict(oracles.enumerate_draws(LOGITS, 2))
    assert len(probability) == 6
    assert probability[(0, 1)] == pytest.approx(1 / 6 * 2 / 5)
    assert probability[(2, 0)] == pytest.approx(3 / 6 * 1 / 3)


@pytest.mark.parametrize("num_selected", [1, 3, 5])
def test_draw_probabilities_sum_to_one(num_selected):
    logits = np.random.default_rng(1).normal(scale=3.0, size=5)
    draws = oracles.enumerate_draws(logits, num_selected)
    assert len(draws) == math.perm(5, num_selected)
    assert sum(p for _, p in draws) == pytest.approx(1.0, abs=1e-12)


def test_log_prob_is_log_of_enumerated_probability():
    logits = np.random.default_rng(2).normal(scale=3.0, size=5)
    for draw, probability in oracles.enumerate_draws(logits, 3):
        log_prob = oracles.log_prob_of_draw(torch.from_numpy(logits), draw)
        assert log_prob.dtype == torch.float64
        assert float(log_prob) == pytest.approx(math.log(probability), abs=1e-12)


def test_log_prob_gradient_matches_hand_computation():
    # Drawing row 1 alone: indicator minus softmax. Then row 2 from weights 1 and 3 adds (-1/4, 0, 1 - 3/4).
    np.testing.assert_allclose(oracles.log_prob_gradient(LOGITS, (1,)), [-1 / 6, 4 / 6, -3 / 6], atol=1e-12)
    np.testing.assert_allclose(oracles.log_prob_gradient(LOGITS, (1, 2)), [-5 / 12, 4 / 6, -1 / 4], atol=1e-12)


def test_policy_gradient_is_derivative_of_expected_reward():
    reward = oracles.objective("facility_location", FEATURES, QUALITY, num_selected=2, quality_weight=0.3)
    step = 1e-5
    expected = [
        (
            oracles.expected_reward(LOGITS + step * np.eye(3)[j], 2, reward)
            - oracles.expected_reward(LOGITS - step * np.eye(3)[j], 2, reward)
        )
        / (2 * step)
        for j in range(3)
    ]
    np.testing.assert_allclose(oracles.policy_gradient(LOGITS, 2, reward), expected, atol=1e-9)


def test_leave_one_out_group_expectation_is_the_policy_gradient():
    reward = oracles.objective("facility_location", FEATURES, QUALITY, num_selected=2, quality_weight=0.3)
    expected = oracles.policy_gradient(LOGITS, 2, reward)
    found = oracles.expected_group_gradient(LOGITS, 2, 3, reward, oracles.leave_one_out_advantage)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_group_relative_target_matches_hand_computation():
    # Two samples, one kept, weights 1 and 2, reward 1 for row 0. Only mixed groups count, with probability 4/9; their
    # advantages are +-0.5 / (0.5 + eps) and dlogP is (2/3, -2/3) for row 0, (-1/3, 1/3) for row 1.
    eps = 0.1
    found = oracles.group_relative_gradient(np.log([1.0, 2.0]), 1, 2, lambda m: float(m[0]), eps)
    expected = 4 / 9 * 0.5 / (0.5 + eps) / 2
    np.testing.assert_allclose(found, [expected, -expected], atol=1e-12)


def test_group_without_spread_has_no_advantage():
    np.testing.assert_array_equal(oracles.group_relative_advantage(np.full(3, 0.1), 0.0), np.zeros(3))


def test_set_functions_match_hand_computation():
    assert oracles.quality_mean(mask(0, 2), QUALITY, num_selected=2) == pytest.approx(0.75)
    assert oracles.quality_mean(mask(2), QUALITY, num_selected=2) == pytest.approx(0.5)
    assert oracles.facility_location(mask(1), FEATURES) == pytest.approx((0.6 + 1.0 + 0.8) / 3)
    assert oracles.facility_location(mask(0, 2), FEATURES) == pytest.approx((1.0 + 0.8 + 1.0) / 3)
    assert oracles.facility_location(mask(), FEATURES) == 0.0
    assert oracles.pairwise(mask(0, 1, 2), FEATURES, num_selected=3) == pytest.approx(-2 * (0.6 + 0.0 + 0.8) / 6)
    assert oracles.pairwise(mask(0, 1), FEATURES, num_selected=3) == pytest.approx(-2 * 0.6 / 6)
    assert oracles.pairwise(mask(0), FEATURES, num_selected=1) == 0.0


def test_facility_location_counts_no_negative_cosine():
    assert oracles.facility_location(np.array([True, False]), np.array([[1.0, 0.0], [-1.0, 0.0]])) == 0.5


def test_disf_matches_hand_computation():
    # One kept sample: |z z^T|^2 = |z|^4, with z = (1, 0) - (1.6, 1.8) / 3.
    norm = (1 - 1.6 / 3) ** 2 + (1.8 / 3) ** 2
    assert oracles.disf(mask(0), FEATURES, num_selected=1) == pytest.approx(-(norm**2))
    assert oracles.disf(mask(0), FEATURES, num_selected=2) == pytest.approx(-(norm**2) / 4)


def test_disf_standardized_ignores_constant_dimensions():
    features = np.array([[0.0, 1.0, 7.0], [1.0, 3.0, 7.0], [2.0, 2.0, 7.0]])
    # The correlation of (0, 1, 2) and (1, 3, 2) is 1/2, counted as (a, b) and (b, a).
    assert oracles.disf_standardized(np.ones(3, dtype=bool), features) == pytest.approx(-0.5)
    assert oracles.disf_standardized(mask(0), features) == 0.0
    assert oracles.disf_standardized(mask(0, 1), features) == pytest.approx(-2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_extension_at_a_mask_is_the_value_and_its_gradient_the_marginal_gains(kind):
    features, quality = random_problem(5, 3)
    value = oracles.objective(kind, features, quality, num_selected=2, quality_weight=0.3)
    for m in oracles.masks_of_size(5, 2):
        assert oracles.multilinear_extension(m.astype(float), value) == pytest.approx(value(m), abs=1e-12)
        np.testing.assert_allclose(
            oracles.multilinear_gradient(m.astype(float), value), oracles.marginal_gains(m, value), atol=1e-12
        )


def test_extension_matches_the_closed_forms():
    features, quality = random_problem(6, 3)
    p = np.random.default_rng(3).uniform(size=6)
    k = 3
    z = features - features.mean(axis=0)
    sums = p @ features
    moment = (z * p[:, None]).T @ z
    squares = np.sum(z**2, axis=1)
    found = {
        kind: oracles.multilinear_extension(
            p, oracles.objective(kind, features, quality, num_selected=k, quality_weight=weight)
        )
        for kind, weight in [("facility_location", 1.0), ("pairwise", 0.0), ("disf", 0.0)]
    }
    assert found["facility_location"] == pytest.approx(p @ quality / k)
    assert found["pairwise"] == pytest.approx(
        -(sums @ sums - np.sum(p**2 * np.sum(features**2, axis=1))) / (k * (k - 1))
    )
    assert found["disf"] == pytest.approx(-(np.sum(moment**2) + np.sum(p * (1 - p) * squares**2)) / k**2)


def test_masks_are_all_there_once():
    assert len({m.tobytes() for m in oracles.all_masks(5)}) == 32
    assert len({m.tobytes() for m in oracles.masks_of_size(5, 2) if m.sum() == 2}) == 10


def test_best_mask_and_greedy_of_three_samples():
    value = oracles.objective("facility_location", FEATURES, QUALITY, num_selected=2, quality_weight=0.0)
    assert oracles.naive_greedy(3, 1, value).tolist() == [False, True, False]
    # Greedy keeps row 1 and adds row 0 (gain 0.4, against 0.2): 2.8 / 3, which rows 0 and 2 equal but do not exceed.
    assert oracles.naive_greedy(3, 2, value).tolist() == [True, True, False]
    best, best_value = oracles.best_mask(3, 2, value)
    assert best_value == pytest.approx(2.8 / 3)
    assert best_value == value(best)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_never_above_the_optimum_and_grows_one_sample_at_a_time(kind):
    features, quality = random_problem(7, 3)
    value = oracles.objective(kind, features, quality, num_selected=4, quality_weight=0.3)
    greedy = [oracles.naive_greedy(7, size, value) for size in range(1, 5)]
    assert [int(m.sum()) for m in greedy] == [1, 2, 3, 4]
    assert all(np.all(larger[smaller]) for smaller, larger in neighbours(greedy))
    assert value(greedy[-1]) <= oracles.best_mask(7, 4, value)[1]
