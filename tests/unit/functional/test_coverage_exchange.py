"""Exchanges of candidates whose coverage is known, against sets tried one by one."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.functional.coverage_exchange import CandidateCoverage, Kinds, exchange_covered


class Problem(NamedTuple):
    worth_VP: np.ndarray
    alone_P: np.ndarray
    is_kept_P: np.ndarray

    def value(self, is_kept_P):
        """By the definition: every sample is worth what its best kept candidate gives."""
        best_V = np.where(is_kept_P, self.worth_VP, 0.0).max(1, initial=0.0)
        return best_V.sum() + self.alone_P[is_kept_P].sum()

    def coverage(self):
        entries = [
            (v, p, worth_P[p])
            for v, worth_P in enumerate(self.worth_VP)
            for p in np.argsort(-worth_P, kind="stable")
            if worth_P[p] > 0
        ]
        sample_E, candidate_E, worth_E = zip(*entries, strict=True) if entries else ([], [], [])
        number_E = 1000 - np.array(sample_E, dtype=np.int64)  # any numbers will do
        return CandidateCoverage(number_E, np.array(candidate_E, np.int64), np.array(worth_E, float), self.alone_P)


def problem(seed, *, density=0.5, num_levels=None, num_samples=25, num_candidates=12):
    rng = np.random.default_rng(seed)
    worth_VP = rng.uniform(size=(num_samples, num_candidates)) * (
        rng.uniform(size=(num_samples, num_candidates)) < density
    )
    alone_P = rng.normal(size=num_candidates)
    if num_levels is not None:
        worth_VP, alone_P = np.ceil(worth_VP * num_levels) / num_levels, np.round(alone_P * num_levels) / num_levels
    is_kept_P = np.zeros(num_candidates, dtype=bool)
    is_kept_P[rng.permutation(num_candidates)[: rng.integers(0, num_candidates + 1)]] = True
    return Problem(worth_VP, alone_P, is_kept_P)


def exchanges(is_kept_P):
    """All masks that differ by one exchange, with what comes in and what goes."""
    for added in np.flatnonzero(~is_kept_P):
        for removed in np.flatnonzero(is_kept_P):
            other_P = is_kept_P.copy()
            other_P[[added, removed]] = True, False
            yield other_P, added, removed


@given(
    seed=st.integers(0, 2**32 - 1), density=st.sampled_from([0.0, 0.1, 0.5, 1.0]), num_levels=st.sampled_from([None, 3])
)
def test_it_ends_where_no_exchange_is_better_and_no_round_makes_it_worse(seed, density, num_levels):
    given_problem = problem(seed, density=density, num_levels=num_levels)
    masks = [exchange_covered(given_problem.is_kept_P, given_problem.coverage(), max_rounds=r) for r in range(4)]
    masks.append(exchange_covered(given_problem.is_kept_P, given_problem.coverage()))
    assert np.array_equal(masks[0], given_problem.is_kept_P)
    values = [given_problem.value(mask_P) for mask_P in masks]
    assert all(after >= before for before, after in pairwise(values))
    assert all(mask_P.sum() == given_problem.is_kept_P.sum() for mask_P in masks)
    for other_P, _, _ in exchanges(masks[-1]):
        assert given_problem.value(other_P) <= values[-1] + 1e-5


@given(seed=st.integers(0, 2**32 - 1))
def test_candidates_are_exchanged_within_their_group_alone(seed):
    given_problem = problem(seed)
    group_P = np.random.default_rng(seed).integers(0, 3, size=12)
    mask_P = exchange_covered(given_problem.is_kept_P, given_problem.coverage(), kinds=Kinds(group_P, np.ones(12)))
    for group in range(3):
        assert mask_P[group_P == group].sum() == given_problem.is_kept_P[group_P == group].sum()
    for other_P, added, removed in exchanges(mask_P):
        if group_P[added] == group_P[removed]:
            assert given_problem.value(other_P) <= given_problem.value(mask_P) + 1e-5


@given(seed=st.integers(0, 2**32 - 1))
def test_no_candidate_comes_in_for_a_cheaper_one(seed):
    """So that what the kept ones cost, sorted, nowhere becomes more."""
    given_problem = problem(seed)
    cost_P = np.random.default_rng(seed).integers(1, 5, size=12).astype(float)
    kinds = Kinds(np.zeros(12, dtype=np.int64), cost_P)
    mask_P = exchange_covered(given_problem.is_kept_P, given_problem.coverage(), kinds=kinds)
    assert (np.sort(cost_P[mask_P]) <= np.sort(cost_P[given_problem.is_kept_P])).all()
    assert given_problem.value(mask_P) >= given_problem.value(given_problem.is_kept_P)


@pytest.mark.parametrize("is_kept", [True, False])
def test_where_all_or_none_is_kept_nothing_is_exchanged(is_kept):
    given_problem = problem(0)._replace(is_kept_P=np.full(12, is_kept))
    assert (exchange_covered(given_problem.is_kept_P, given_problem.coverage()) == is_kept).all()


def test_many_exchanges_are_made_in_one_round_where_none_touches_another():
    """Each of ten samples is covered by a candidate of its own, kept, and would be better by another."""
    worth_VP = np.concatenate([0.5 * np.eye(10), np.eye(10)], axis=1)
    given_problem = Problem(worth_VP, np.zeros(20), np.arange(20) < 10)
    mask_P = exchange_covered(given_problem.is_kept_P, given_problem.coverage(), max_rounds=1)
    assert np.array_equal(mask_P, np.arange(20) >= 10)


def test_what_a_candidate_covers_of_what_another_leaves_counts():
    """The new one gains 0.1 alone, less than the old one loses, 1.0, but takes over what that covered."""
    worth_VP = np.array([[1.0, 0.9, 0.0], [0.0, 0.2, 0.1], [0.0, 0.0, 5.0]])
    given_problem = Problem(worth_VP, np.zeros(3), np.array([True, False, True]))
    mask_P = exchange_covered(given_problem.is_kept_P, given_problem.coverage())
    assert mask_P.tolist() == [True, False, True]  # 1.0 + 0.1 + 5.0 beats 0.9 + 0.2 + 5.0 by 0.0
    better = given_problem._replace(worth_VP=worth_VP + np.array([[0, 0, 0], [0, 0.01, 0], [0, 0, 0]]))
    assert exchange_covered(better.is_kept_P, better.coverage()).tolist() == [False, True, True]
