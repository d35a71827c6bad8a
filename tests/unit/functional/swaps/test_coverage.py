"""Exchanges of candidates whose coverage is known, against sets tried one by one."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.swaps import coverage
from datamask_pl.functional.swaps.coverage import CandidateCoverage, Kinds, propose_by_coverage, swap_covered
from datamask_pl.functional.swaps.search import swap_search
from tests.support import constraints


class Problem(NamedTuple):
    gain_VP: np.ndarray
    own_gain_P: np.ndarray
    is_kept_P: np.ndarray

    def value(self, is_kept_P):
        """By the definition: every sample is worth what its best kept candidate gives."""
        best_V = np.where(is_kept_P, self.gain_VP, 0.0).max(1, initial=0.0)
        return best_V.sum() + self.own_gain_P[is_kept_P].sum()

    def coverage(self):
        entries = [
            (v, p, gain_P[p])
            for v, gain_P in enumerate(self.gain_VP)
            for p in np.argsort(-gain_P, kind="stable")
            if gain_P[p] > 0
        ]
        sample_E, candidate_E, gain_E = zip(*entries, strict=True) if entries else ([], [], [])
        number_E = 1000 - np.array(sample_E, dtype=np.int64)  # any numbers will do
        return CandidateCoverage(number_E, np.array(candidate_E, np.int64), np.array(gain_E, float), self.own_gain_P)


def problem(seed, *, density=0.5, num_levels=None, num_samples=25, num_candidates=12):
    rng = np.random.default_rng(seed)
    gain_VP = rng.uniform(size=(num_samples, num_candidates)) * (
        rng.uniform(size=(num_samples, num_candidates)) < density
    )
    own_gain_P = rng.normal(size=num_candidates)
    if num_levels is not None:
        gain_VP, own_gain_P = np.ceil(gain_VP * num_levels) / num_levels, np.round(own_gain_P * num_levels) / num_levels
    is_kept_P = np.zeros(num_candidates, dtype=bool)
    is_kept_P[rng.permutation(num_candidates)[: rng.integers(0, num_candidates + 1)]] = True
    return Problem(gain_VP, own_gain_P, is_kept_P)


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
    masks = [swap_covered(given_problem.is_kept_P, given_problem.coverage(), max_rounds=r) for r in range(4)]
    masks.append(swap_covered(given_problem.is_kept_P, given_problem.coverage()))
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
    mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage(), kinds=Kinds(group_P, np.ones(12)))
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
    mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage(), kinds=kinds)
    assert (np.sort(cost_P[mask_P]) <= np.sort(cost_P[given_problem.is_kept_P])).all()
    assert given_problem.value(mask_P) >= given_problem.value(given_problem.is_kept_P)


@pytest.mark.parametrize("unit", [2.0**-100, 2.0**100])
def test_the_unit_of_the_worth_decides_nothing(unit):
    for seed in range(10):
        one = problem(seed)
        other = one._replace(gain_VP=one.gain_VP * unit, own_gain_P=one.own_gain_P * unit)
        expected_P = swap_covered(one.is_kept_P, one.coverage())
        assert np.array_equal(swap_covered(other.is_kept_P, other.coverage()), expected_P)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_samples_may_have_any_numbers(first):
    for seed in range(20):
        given_problem = problem(seed, num_samples=3)
        coverage = given_problem.coverage()  # numbers that fall
        rising = coverage._replace(sample_E=first + coverage.sample_E.max(initial=0) - coverage.sample_E)
        expected_P = swap_covered(given_problem.is_kept_P, coverage)
        assert np.array_equal(swap_covered(given_problem.is_kept_P, rising), expected_P)


@pytest.mark.parametrize("num_kept", [1, 11])
def test_where_one_is_kept_or_left_out_a_round_makes_the_best_of_all_exchanges(num_kept):
    for seed in range(20):
        given_problem = problem(seed)._replace(is_kept_P=np.random.default_rng(seed).permutation(12) < num_kept)
        best_P = max(
            [given_problem.is_kept_P, *(other_P for other_P, _, _ in exchanges(given_problem.is_kept_P))],
            key=given_problem.value,
        )
        mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage(), max_rounds=1)
        assert np.array_equal(mask_P, best_P)


def test_of_equal_exchanges_that_exclude_one_another_the_first_candidates_is_made():
    for seed in range(5):
        gain_P = np.append(np.random.default_rng(seed).integers(1, 4, size=200), 0.5)
        given_problem = Problem(gain_P[None], np.zeros(201), np.arange(201) == 200)
        mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage())
        assert np.flatnonzero(mask_P).tolist() == [gain_P.argmax()]


@pytest.mark.parametrize("largest", [1.0, 1e9])
def test_what_promises_a_millionth_of_the_median_loss_or_less_is_not_exchanged(largest):
    """Nor what promises 1e-13 of the largest number; what is worth a little more is."""
    rounding = max(1e-6, 1e-13 * largest)
    for share, is_made in ((0.5, False), (2.0, True)):
        own_gain_P = np.array([1.0 + share * rounding, 1.0, 1.0, 1.0, largest])
        given_problem = Problem(np.zeros((0, 5)), own_gain_P, np.arange(5) > 0)
        mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage())
        assert mask_P[0] == is_made


def test_nothing_is_exchanged_where_all_is_worth_nothing_or_there_are_no_candidates():
    nothing = Problem(np.zeros((3, 4)), np.zeros(4), np.arange(4) < 2)
    assert swap_covered(nothing.is_kept_P, nothing.coverage(), max_rounds=1).tolist() == [True, True, False, False]
    no_one = Problem(np.zeros((3, 0)), np.zeros(0), np.zeros(0, dtype=bool))
    assert swap_covered(no_one.is_kept_P, no_one.coverage()).tolist() == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_where_all_or_none_is_kept_nothing_is_exchanged(is_kept):
    given_problem = problem(0)._replace(is_kept_P=np.full(12, is_kept))
    assert (swap_covered(given_problem.is_kept_P, given_problem.coverage()) == is_kept).all()


def test_many_exchanges_are_made_in_one_round_where_none_touches_another():
    """Each of ten samples is covered by a candidate of its own, kept, and would be better by another."""
    gain_VP = np.concatenate([0.5 * np.eye(10), np.eye(10)], axis=1)
    given_problem = Problem(gain_VP, np.zeros(20), np.arange(20) < 10)
    mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage(), max_rounds=1)
    assert np.array_equal(mask_P, np.arange(20) >= 10)


def test_exchanges_that_cover_the_same_are_made_in_one_round_only_where_none_covers_more_than_is_covered():
    """A sample that is covered already, by one that stays, excludes nothing; one that both would cover does."""
    gain_VP = np.concatenate([0.5 * np.eye(10), np.eye(10), np.zeros((10, 1))], axis=1)
    covered = Problem(np.vstack([gain_VP, np.arange(21) >= 10]), np.zeros(21), np.arange(21) % 20 < 10)
    mask_P = swap_covered(covered.is_kept_P, covered.coverage(), max_rounds=1)
    assert np.array_equal(mask_P, np.arange(21) >= 10)
    both = Problem(np.array([[1.0, 1.0, 0.0, 0.0]]), np.array([0.0, 0.0, 0.6, 0.7]), np.arange(4) >= 2)
    mask_P = swap_covered(both.is_kept_P, both.coverage(), max_rounds=1)
    assert mask_P.tolist() == [True, False, False, True]


def test_what_a_candidate_covers_of_what_another_leaves_counts():
    """The new one gains 0.1 alone, less than the old one loses, 1.0, but takes over what that covered."""
    gain_VP = np.array([[1.0, 0.9, 0.0], [0.0, 0.2, 0.1], [0.0, 0.0, 5.0]])
    given_problem = Problem(gain_VP, np.zeros(3), np.array([True, False, True]))
    mask_P = swap_covered(given_problem.is_kept_P, given_problem.coverage())
    assert mask_P.tolist() == [True, False, True]  # 1.0 + 0.1 + 5.0 beats 0.9 + 0.2 + 5.0 by 0.0
    better = given_problem._replace(gain_VP=gain_VP + np.array([[0, 0, 0], [0, 0.01, 0], [0, 0, 0]]))
    assert swap_covered(better.is_kept_P, better.coverage()).tolist() == [False, True, True]


# ---- in a search -----------------------------------------------------------------------------------------------------


class Block:
    """A problem whose samples are its candidates, with what the search asks for, and what it asked."""

    def __init__(self, given_problem):
        self.problem = given_problem
        self.start_N = torch.tensor(given_problem.is_kept_P)
        self.pools = []
        self.masks = []

    def values(self, masks_RN):
        self.masks += masks_RN.tolist()
        return torch.tensor([self.problem.value(mask_N.numpy()) for mask_N in masks_RN])

    def gains(self, mask_N):
        both_2N = [[], []]
        for row in range(mask_N.numel()):
            for is_in, gains in enumerate(both_2N):
                changed_N = mask_N.numpy().copy()
                changed_N[row] = is_in
                gains.append(self.problem.value(changed_N))
        return torch.tensor(both_2N[1]) - torch.tensor(both_2N[0])

    def coverage(self, mask_N, rows_P):
        self.pools.append(rows_P.tolist())
        is_other_N = mask_N.numpy().copy()
        is_other_N[rows_P] = False
        other_V1 = np.where(is_other_N, self.problem.gain_VP, 0.0).max(1, initial=0.0, keepdims=True)
        more_VP = np.maximum(self.problem.gain_VP[:, rows_P] - other_V1, 0.0)
        return Problem(more_VP, self.problem.own_gain_P[rows_P], mask_N.numpy()[rows_P]).coverage()

    def polish(self, **options):
        constraint = options.pop("constraint", None)
        propose = partial(propose_by_coverage, gains=self.gains, coverage=self.coverage, constraint=constraint)
        options = {"least_share_gained": coverage.LEAST_SHARE_GAINED, **options}
        return swap_search(self.start_N, propose, values=self.values, **options)


def modular(*pairs):
    """Samples that are left out, and kept ones, each pair worth so much when it is exchanged."""
    own_gain_P = np.array([*pairs, *[0.0] * len(pairs)])
    return Block(Problem(np.zeros((0, own_gain_P.size)), own_gain_P, np.arange(own_gain_P.size) >= len(pairs)))


@pytest.mark.parametrize("min_candidates", [3, 1024])
def test_a_mask_becomes_one_of_which_no_exchange_of_candidates_is_better(monkeypatch, min_candidates):
    monkeypatch.setattr(coverage, "MIN_CANDIDATES", min_candidates)
    monkeypatch.setattr(coverage, "LEAST_SHARE_GAINED", 0.0)
    for seed in range(5):
        block = Block(problem(seed, num_candidates=20, num_samples=30))
        start_P = block.problem.is_kept_P.copy()
        mask_N, value = block.polish()
        assert block.start_N.tolist() == start_P.tolist()
        assert mask_N.dtype == torch.bool
        assert mask_N.sum() == start_P.sum()
        assert value == block.problem.value(mask_N.numpy())
        assert value >= block.problem.value(start_P)
        gain_N = block.gains(mask_N).numpy()
        added = sorted(np.flatnonzero(~mask_N.numpy()), key=lambda row: -gain_N[row])[:min_candidates]
        removed = sorted(np.flatnonzero(mask_N.numpy()), key=lambda row: gain_N[row])[:min_candidates]
        assert sorted(block.pools[-1]) == sorted([*added, *removed])
        for other_P, one, other in exchanges(mask_N.numpy()):
            if one in added and other in removed:
                assert block.problem.value(other_P) <= value + 1e-5


@pytest.mark.parametrize(("num_samples", "num_candidates"), [(100, 4), (256, 4), (400, 6)])
def test_candidates_are_a_share_of_the_samples_and_at_least_so_many(monkeypatch, num_samples, num_candidates):
    monkeypatch.setattr(coverage, "MIN_CANDIDATES", 4)
    for constraint in (None, constraints.make("groups", num_samples)):
        block = modular(*range(num_samples // 2))
        if constraint is not None:
            block.start_N = constraint.fill(torch.zeros(num_samples))
        block.polish(max_rounds=1, constraint=constraint)
        assert len(block.pools[0]) == 2 * num_candidates


@pytest.mark.parametrize("unit", [2.0**-30, 1.0, 2.0**30])
def test_rounds_end_with_the_first_that_gains_less_than_a_64th_of_what_the_best_did(monkeypatch, unit):
    monkeypatch.setattr(coverage, "MIN_CANDIDATES", 1)
    monkeypatch.setattr(coverage, "CANDIDATE_SHARE", 0)
    mask_N, value = modular(*(unit * gain for gain in (64.0, 8.0, 2.0, 1.0, 0.75, 0.5))).polish()
    assert mask_N.tolist() == [True] * 5 + [False] * 6 + [True]
    assert value == 75.75 * unit


@pytest.mark.parametrize("kind", ["groups", "forced and groups", "groups and costs"])
def test_under_a_constraint_no_allowed_exchange_of_equal_cost_or_less_is_better(kind):
    for seed in range(4):
        constraint = constraints.make(kind, 14, seed=seed)
        group_N, forced_N = constraint.holdings.group_N.numpy(), constraint.holdings.forced_N.numpy()
        cost_N = np.ones(14) if constraint.holdings.cost_N is None else constraint.holdings.cost_N.numpy()
        block = Block(problem(seed, num_candidates=14))
        block.start_N = constraint.fill(torch.zeros(14))
        mask_N, value = block.polish(constraint=constraint)
        assert constraint.allows(mask_N)
        assert value == block.problem.value(mask_N.numpy())
        assert value > block.problem.value(block.start_N.numpy())
        for group in set(group_N):
            assert (mask_N.numpy() & (group_N == group)).sum() == (block.start_N.numpy() & (group_N == group)).sum()
        if constraint.has_costs:
            continue  # some exchanges may be missed
        for other_P, one, other in exchanges(mask_N.numpy()):
            if (
                group_N[one] == group_N[other]
                and forced_N[one] == forced_N[other] == 0
                and cost_N[one] <= cost_N[other]
            ):
                assert block.problem.value(other_P) <= value + 1e-5


def test_candidates_of_every_group_are_those_next_to_its_own_threshold(monkeypatch):
    """All of the first group is worth more than all of the second; in each one sample is to be exchanged."""
    monkeypatch.setattr(coverage, "MIN_CANDIDATES", 2)
    monkeypatch.setattr(coverage, "CANDIDATE_SHARE", 0)
    group_N = torch.arange(20) // 10
    constraint = Constrained(Holdings.of(20, group_N=group_N, names=("a", "b")), BudgetSpec(0.5))
    own_gain_P = np.array([*range(110, 100, -1), *range(10, 0, -1)], dtype=float)
    block = Block(Problem(np.zeros((0, 20)), own_gain_P, np.tile([False] + [True] * 5 + [False] * 4, 2)))
    mask_N, value = block.polish(constraint=constraint)
    assert mask_N.tolist() == [True] * 5 + [False] * 5 + [True] * 5 + [False] * 5
    assert value == own_gain_P[mask_N.numpy()].sum()
