import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamask_pl.errors import BudgetError
from datamask_pl.functional import constraint as constraint_module
from datamask_pl.functional import multilinear
from datamask_pl.functional.budget import BudgetSpec, Totals, apportion, num_to_keep, part_budgets
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.kernels import top_k_mask
from tests.support import constraints, oracles

RATIOS = st.integers(1, 100).map(lambda number: number / 100)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)
COSTS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40)


def groups_of(sizes):
    group_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return group_N, tuple(f"g{index}" for index in range(len(sizes)))


# ---- budgets ---------------------------------------------------------------------------------------------------------


@given(shares=st.lists(st.fractions(0, 100), min_size=1, max_size=8))
def test_apportioned_numbers_add_up_to_the_rounded_whole_and_are_within_one_of_their_share(shares):
    numbers = apportion(shares)
    assert sum(numbers) == math.floor(sum(shares) + Fraction(1, 2))
    assert all(abs(number - share) < 1 for number, share in zip(numbers, shares, strict=True))


@given(sizes=SIZES, ratio=RATIOS)
def test_proportional_quotas_sum_to_the_whole_and_never_exceed_their_group(sizes, ratio):
    group_N, names = groups_of(sizes)
    if math.floor(Fraction(str(ratio)) * sum(sizes) + Fraction(1, 2)) == 0:
        return
    constraint = Constrained(Holdings.of(sum(sizes), group_N=group_N, names=names), BudgetSpec(ratio))
    assert sum(constraint.budgets) == constraint.typical_size == num_to_keep(ratio, sum(sizes))
    mask_N = constraint.fill(torch.zeros(sum(sizes)))
    kept = torch.bincount(group_N[mask_N], minlength=len(sizes)).tolist()
    assert kept == constraint.budgets
    assert all(number <= size for number, size in zip(kept, sizes, strict=True))


@given(costs=COSTS, ratio=RATIOS, seed=st.integers(0, 10))
def test_a_cost_is_never_exceeded_and_nothing_that_is_left_out_would_fit(costs, ratio, seed):
    cost_N = torch.tensor(costs, dtype=torch.float64)
    limit = Fraction(str(ratio)) * sum(map(Fraction, costs))
    try:
        constraint = Constrained(Holdings.of(len(costs), cost_N=cost_N), BudgetSpec(ratio))
    except BudgetError:
        assert min(costs) >= limit * (1 - Fraction(1, 10**12))
        return
    scores_N = torch.tensor(np.random.default_rng(seed).normal(size=len(costs)))
    mask_N = constraint.fill(scores_N)
    spent = sum(Fraction(cost) for cost, is_kept in zip(costs, mask_N.tolist(), strict=True) if is_kept)
    assert spent <= limit
    left_out = [cost for cost, is_kept in zip(costs, mask_N.tolist(), strict=True) if not is_kept]
    # costs are rounded up by a part in 2^50 of their sum
    assert all(spent + Fraction(cost) > limit * (1 - Fraction(1, 10**12)) for cost in left_out)


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=25), ratio=RATIOS, seed=st.integers(0, 5))
def test_filling_is_taking_in_order_whatever_fits(costs, ratio, seed):
    rng = np.random.default_rng(seed)
    scores_N = rng.integers(0, 5, size=len(costs)).astype(float)
    group_N = torch.tensor(rng.integers(0, 2, size=len(costs)))
    try:
        constraint = Constrained(
            Holdings.of(len(costs), cost_N=torch.tensor(costs), group_N=group_N, names=("a", "b")), BudgetSpec(ratio)
        )
    except BudgetError:
        return
    rooms, expected = list(constraint.budgets), []
    for row in np.argsort(-scores_N, kind="stable"):
        if costs[row] <= rooms[group_N[row]]:
            rooms[group_N[row]] -= costs[row]
            expected.append(int(row))
    assert constraint.fill(torch.tensor(scores_N)).tolist() == oracles.mask_of(expected, len(costs)).tolist()
    assert constraint.room_left(constraint.fill(torch.tensor(scores_N))).tolist() == rooms


def some_holdings(num_samples=40, *, has_costs=True):
    """Three groups, of which the last has no free sample, and a fourth without samples."""
    rng = np.random.default_rng(5)
    group_N = torch.tensor(rng.integers(0, 3, size=num_samples))
    forced_N = torch.tensor(rng.integers(-1, 2, size=num_samples), dtype=torch.int8)
    forced_N[(group_N == 2) & (forced_N == 0)] = 1
    cost_N = torch.tensor(rng.uniform(0.5, 9.0, size=num_samples)) if has_costs else None
    return Holdings.of(num_samples, cost_N=cost_N, group_N=group_N, names=("a", "b", "c", "d"), forced_N=forced_N)


def plain_totals(holdings, rows=None, *, has_groups=True):
    """Number, cost, kept cost, free cost and lowest free cost of each group, one sample after the other."""
    rows = range(len(holdings.group_N)) if rows is None else rows
    totals = [[0, 0.0, 0.0, 0.0, math.inf] for _ in (holdings.names if has_groups else [""])]
    for row in rows:
        cost = 1.0 if holdings.cost_N is None else float(holdings.cost_N[row])
        of_group, fate = totals[int(holdings.group_N[row]) if has_groups else 0], int(holdings.forced_N[row])
        of_group[0] += 1
        of_group[1] += cost
        of_group[2] += cost if fate == 1 else 0.0
        of_group[3] += cost if fate == 0 else 0.0
        of_group[4] = min(of_group[4], cost) if fate == 0 else of_group[4]
    return [tuple(column) for column in zip(*totals, strict=True)]


def columns(totals):
    return [totals.num_samples, totals.costs, totals.kept_costs, totals.free_costs, totals.lowest_costs]


@pytest.mark.parametrize("has_costs", [True, False])
def test_totals_are_those_of_adding_one_sample_after_the_other(has_costs):
    holdings = some_holdings(has_costs=has_costs)
    totals = holdings.totals()
    assert columns(totals) == plain_totals(holdings)
    assert (totals.names, totals.has_costs, totals.cost_step) == (holdings.names, has_costs, holdings.cost_step)
    alone = plain_totals(holdings, has_groups=False)
    for merged in (totals.merged(), holdings.without_groups().totals()):
        assert columns(merged) == alone
        assert (merged.names, merged.has_costs, merged.cost_step) == (("",), has_costs, holdings.cost_step)


@pytest.mark.parametrize("has_costs", [True, False])
def test_a_part_has_the_costs_groups_and_fates_of_its_rows(has_costs):
    holdings, rows = some_holdings(has_costs=has_costs), [3, 0, 17, 18, 39]
    part = holdings.part(torch.tensor(rows))
    assert columns(part.totals()) == plain_totals(holdings, rows)
    assert (part.names, part.cost_step) == (holdings.names, holdings.cost_step)


@pytest.mark.parametrize("has_costs", [True, False])
def test_holdings_move_as_a_whole(has_costs):
    holdings = some_holdings(has_costs=has_costs)
    there = holdings.to(torch.device("meta"))
    tensors = [there.group_N, there.forced_N, *([there.cost_N] if has_costs else [])]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    here = holdings.to(torch.device("cpu"))
    assert columns(here.totals()) == columns(holdings.totals())
    assert (there.names, there.cost_step, there.cost_N is None) == (holdings.names, holdings.cost_step, not has_costs)


@given(costs=COSTS)
def test_costs_are_rounded_up_to_multiples_of_a_power_of_two_that_float64_adds_exactly(costs):
    holdings = Holdings.of(len(costs), cost_N=torch.tensor(costs, dtype=torch.float64))
    assert math.frexp(holdings.cost_step)[0] == 0.5
    assert holdings.cost_N.dtype == torch.float64
    steps = [Fraction(cost) / Fraction(holdings.cost_step) for cost in holdings.cost_N.tolist()]
    assert all(number.denominator == 1 for number in steps)
    assert 2**49 <= sum(steps) <= 2**50 + len(costs)
    for given_cost, cost in zip(costs, holdings.cost_N.tolist(), strict=True):
        assert 0 <= Fraction(cost) - Fraction(given_cost) < Fraction(holdings.cost_step)


def test_of_a_part_budgets_give_way_to_what_is_there_and_at_least_one_sample_is_kept():
    def budgets(ratios, sizes, kept, free, lowest, *, has_costs=False, step=1.0):
        rule = BudgetSpec(0.5, {f"g{index}": ratio for index, ratio in enumerate(ratios)})
        names = tuple(rule.group_budget)
        return part_budgets(rule, Totals(names, tuple(map(int, sizes)), sizes, kept, free, lowest, has_costs, step))

    infinite = math.inf
    # half of ten; no fewer than are kept; no more than are there
    assert budgets([0.5], (10.0,), (0.0,), (10.0,), (1.0,)) == [5.0]
    assert budgets([0.5, 0.5], (10.0, 10.0), (7.0, 0.0), (3.0, 2.0), (1.0, 1.0)) == [7.0, 2.0]
    # kept and free together are there
    assert budgets([0.8], (10.0,), (3.0,), (4.0,), (1.0,)) == [7.0]
    # nothing would be kept: one of the first group that has one
    assert budgets([0.1, 0.1], (2.0, 2.0), (0.0, 0.0), (0.0, 2.0), (infinite, 1.0)) == [0.0, 1.0]
    assert budgets([0.1, 0.1], (2.0, 2.0), (0.0, 0.0), (2.0, 2.0), (1.0, 1.0)) == [1.0, 0.0]
    assert budgets([0.1], (2.0,), (0.0,), (0.0,), (infinite,)) == [0.0]
    # costs: rounded down to a multiple of the step, the cheapest fits where nothing else does, or what is kept
    assert budgets([0.3], (10.0,), (0.0,), (10.0,), (2.0,), has_costs=True, step=2.0) == [2.0]
    assert budgets([0.3, 0.3], (10.0, 8.0), (0.0, 0.0), (10.0, 8.0), (5.0, 4.0), has_costs=True) == [3.0, 4.0]
    assert budgets([0.3, 0.3], (10.0, 8.0), (1.0, 0.0), (9.0, 8.0), (5.0, 4.0), has_costs=True) == [3.0, 2.0]
    assert budgets([0.3], (10.0,), (6.0,), (4.0,), (4.0,), has_costs=True) == [6.0]
    assert budgets([0.3], (10.0,), (1.0,), (1.0,), (1.0,), has_costs=True) == [3.0]


def test_where_nothing_is_said_samples_are_free_and_in_one_group():
    holdings = Holdings.of(3)
    assert (holdings.names, holdings.cost_N) == (("",), None)
    assert (holdings.group_N.tolist(), holdings.group_N.dtype) == ([0] * 3, torch.int64)
    assert (holdings.forced_N.tolist(), holdings.forced_N.dtype) == ([0] * 3, torch.int8)


def test_whole_costs_are_exact():
    cost_N = torch.tensor([3.0, 5.0, 7.0, 85.0])
    holdings = Holdings.of(4, cost_N=cost_N)
    assert torch.equal(holdings.cost_N, cost_N.double())
    assert Constrained(holdings, BudgetSpec(0.15)).budgets == [15.0]


def test_named_groups_get_their_own_ratio_and_the_others_select_ratio():
    group_N, names = groups_of([10, 20, 40])
    holdings = Holdings.of(70, group_N=group_N, names=names)
    assert Constrained(holdings, BudgetSpec(0.1, {"g0": 0.5, "g2": 0.0})).budgets == [5, 2, 0]
    assert Constrained(holdings, BudgetSpec(0.1, "free")).budgets == [7]


@pytest.mark.parametrize(
    ("fates", "options", "message"),
    [
        ([1, 1, 1, 0, 0, 0], {}, "keep_ids keep 3 of 6 (samples), more than the budget of 2 (0.3); raise the ratio"),
        ([-1, -1, -1, -1, -1, 0], {}, "drop_ids leave 1 of 6 samples, fewer than the budget of 2 (0.3)"),
        ([1, 1, 0, 0, 0, 0], {"group": True}, "keep_ids keep 2 of 3 (samples) of group 'a', more than the budget"),
        ([0, 0, 0, -1, -1, -1], {"group": True}, "drop_ids leave 0 of 3 samples of group 'b', fewer than"),
        (
            [0, 1, 0, 0, 0, 0],
            {"cost": [1, 6, 1, 1, 1, 2]},
            "keep_ids keep 6 of 12 (a cost), more than the budget",
        ),
        ([0] * 6, {"cost": [5, 6, 5, 5, 5, 5]}, None),
        (
            [0, 0, -1],
            {"cost": [50, 60, 1]},
            "33.3 of a total cost of 111 (0.3), the cheapest sample costs 50",
        ),
    ],
)
def test_what_cannot_be_met_is_an_error_that_names_the_numbers(fates, options, message):
    num_samples = len(fates)
    cost_N = torch.tensor(options["cost"]) if "cost" in options else None
    group_N = torch.arange(num_samples) // 3 if "group" in options else None
    names = ("a", "b") if "group" in options else ("",)
    forced_N = torch.tensor(fates, dtype=torch.int8)
    holdings = Holdings.of(num_samples, cost_N=cost_N, group_N=group_N, names=names, forced_N=forced_N)
    if message is None:
        Constrained(holdings, BudgetSpec(0.3))
        return
    with pytest.raises(BudgetError, match=re.escape(message)):
        Constrained(holdings, BudgetSpec(0.3))


@pytest.mark.parametrize(
    ("rule", "cost", "message"),
    [
        (BudgetSpec(0.01), None, "select_ratio keeps 0 of 10 samples (0.01); raise it to at least 0.05 or"),
        (BudgetSpec(0.5, {"a": 0.0, "b": 0}), None, "group_budget keeps 0 of 10 samples; raise a ratio or"),
        (
            BudgetSpec(0.5, {"a": 0.0, "b": 0}),
            3,
            "keeps 0 of 10 samples: the budget is 0 of a total cost of 30 (0.5), the cheapest sample costs 3; raise it",
        ),
    ],
)
def test_a_budget_of_nothing_is_an_error_that_says_which_ratio_to_raise(rule, cost, message):
    cost_N = None if cost is None else torch.full((10,), cost)
    with pytest.raises(BudgetError, match=re.escape(message)):
        Constrained(Holdings.of(10, cost_N=cost_N, group_N=torch.arange(10) // 5, names=("a", "b")), rule)


def test_an_error_of_a_group_names_the_ratio_of_the_group():
    forced_N = torch.tensor([1, 1, 0, 0], dtype=torch.int8)
    holdings = Holdings.of(4, group_N=torch.zeros(4, dtype=torch.int64), names=("a",), forced_N=forced_N)
    with pytest.raises(
        BudgetError, match=re.escape("more than the budget of 1 (0.25); raise the ratio to at least 0.5 ")
    ):
        Constrained(holdings, BudgetSpec(0.5, {"a": 0.25}))


def test_a_sample_that_costs_the_whole_budget_fits():
    constraint = Constrained(Holdings.of(2, cost_N=torch.tensor([5.0, 5.0])), BudgetSpec(0.5))
    assert constraint.fill(torch.zeros(2)).tolist() == [True, False]


@pytest.mark.parametrize("ratio", [-0.1, 1.5, math.nan])
def test_a_ratio_of_a_group_out_of_range_is_an_error(ratio):
    with pytest.raises(BudgetError, match="the ratio of 'code' must be from 0 to 1"):
        BudgetSpec(0.1, {"code": ratio})


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_any_part_of_a_block_can_be_filled_and_keeps_something(kind):
    constraint = constraints.make(kind, 40)
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 8, 39):
        rows = torch.tensor(rng.permutation(40)[:size]).sort().values
        part = constraint.part(rows)
        mask_M = part.fill(torch.tensor(rng.normal(size=size)))
        assert part.allows(mask_M)
        assert bool(mask_M.any()) or not bool((part.holdings.forced_N == 0).any())


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", constraints.KINDS)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]))
@settings(max_examples=settings().max_examples // 5)
def test_expected_cost_is_the_budget(kind, seed, scale):
    constraint = constraints.make(kind, 30)
    logits_N = scale * torch.randn(30, generator=torch.Generator().manual_seed(seed))
    p_N = constraint.probabilities(logits_N)
    holdings = constraint.holdings
    cost_N = torch.ones(30).double() if holdings.cost_N is None else holdings.cost_N
    assert holdings.sums(p_N * cost_N) == pytest.approx(constraint.budgets, rel=1e-6)
    assert bool((p_N[holdings.forced_N > 0] == 1).all())
    assert bool((p_N[holdings.forced_N < 0] == 0).all())


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_the_direction_keeps_every_budget_to_first_order(kind):
    constraint = constraints.make(kind, 30)
    p_N = constraint.probabilities(torch.randn(30, generator=torch.Generator().manual_seed(1)))
    gradient_N = torch.randn(30, generator=torch.Generator().manual_seed(2)).double()
    change_N = p_N * (1 - p_N) * constraint.ascent_direction(gradient_N, p_N)
    holdings = constraint.holdings
    cost_N = torch.ones(30).double() if holdings.cost_N is None else holdings.cost_N
    assert holdings.sums(change_N * cost_N) == pytest.approx([0.0] * len(holdings.names), abs=1e-12)


def test_a_step_is_the_mirror_step_under_the_constraint():
    """argmax of eta <g, q> - sum c KL(q, p) under sum c q = B, by its optimality conditions."""
    constraint = constraints.make("costs", 12)
    cost_N = constraint.holdings.cost_N
    logits_N = torch.randn(12, generator=torch.Generator().manual_seed(3)).double()
    gradient_N = torch.randn(12, generator=torch.Generator().manual_seed(4)).double()
    p_N = constraint.probabilities(logits_N)
    direction_N = constraint.ascent_direction(gradient_N, p_N)
    q_N = constraint.probabilities(logits_N + 0.7 * direction_N)
    # the derivative of the Lagrangian is the same multiple of the cost for all
    slope_N = (q_N.logit() - p_N.logit()) * cost_N
    eta = torch.linalg.lstsq(torch.stack([gradient_N, cost_N], 1), slope_N[:, None]).solution[:, 0]
    assert float(eta[0]) > 0
    assert torch.allclose(eta[0] * gradient_N + eta[1] * cost_N, slope_N, atol=1e-9)


def test_a_plain_number_is_the_policy_without_a_constraint():
    constraint = Constrained(Holdings.of(50), BudgetSpec(0.3))
    logits_N = torch.randn(50, generator=torch.Generator().manual_seed(0))
    gradient_N = torch.randn(50, generator=torch.Generator().manual_seed(1)).double()
    p_N = multilinear.inclusion_probabilities(logits_N, 15)
    assert torch.allclose(constraint.probabilities(logits_N), p_N, rtol=1e-8)
    assert torch.allclose(constraint.ascent_direction(gradient_N, p_N), multilinear.ascent_direction(gradient_N, p_N))
    assert torch.equal(constraint.fill(logits_N), top_k_mask(logits_N, 15))


@pytest.mark.parametrize("gradient", [0.0, 0.1])
def test_equal_gradients_move_nothing(gradient):
    constraint = constraints.make("groups", 12)
    p_N = constraint.probabilities(torch.zeros(12))
    assert constraint.ascent_direction(torch.full((12,), gradient).double(), p_N).tolist() == [0.0] * 12


@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_the_unit_of_costs_changes_nothing(unit):
    def solve(factor):
        cost_N = factor * torch.tensor([3.0, 1.0, 2.0, 5.0, 1.0, 4.0])
        constraint = Constrained(Holdings.of(6, cost_N=cost_N), BudgetSpec(0.4))
        p_N = constraint.probabilities(logits_N)
        return p_N, constraint.ascent_direction(gradient_N, p_N), constraint.typical_size

    logits_N, gradient_N = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double()
    for found, expected in zip(solve(unit)[:2], solve(1.0)[:2], strict=True):
        assert torch.allclose(found, expected, rtol=1e-9)
    assert solve(unit)[2] == solve(1.0)[2] == 2  # 0.4 of six


def test_at_least_one_sample_is_typical():
    assert Constrained(Holdings.of(3, cost_N=torch.tensor([1.0, 100.0, 100.0])), BudgetSpec(0.1)).typical_size == 1
    assert Constrained(Holdings.of(4, cost_N=torch.ones(4)), BudgetSpec(0.25)).typical_size == 1


def test_what_may_keep_everything_is_certain_to_keep_it_whatever_the_costs_add_up_to():
    cost_N = torch.tensor([2.0**24 + 1, 2.0], dtype=torch.float64)
    constraint = Constrained(Holdings.of(2, cost_N=cost_N), BudgetSpec(1.0))
    assert constraint.probabilities(torch.tensor([-3.0, 5.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_a_handful_of_newton_steps_find_the_thresholds(monkeypatch, kind):
    monkeypatch.setattr(constraint_module, "MAX_NEWTON_STEPS", 12)
    test_expected_cost_is_the_budget.hypothesis.inner_test(kind, 7, 3.0)


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_the_direction_has_a_root_mean_square_of_one_over_free_samples_with_costs_by_how_undecided_they_are(kind):
    constraint = constraints.make(kind, 30)
    p_N = constraint.probabilities(2 * torch.randn(30, generator=torch.Generator().manual_seed(1)))
    direction_N = constraint.ascent_direction(torch.randn(30, generator=torch.Generator().manual_seed(2)).double(), p_N)
    free_N = constraint.holdings.forced_N == 0
    weight_N = free_N.double()
    if constraint.has_costs:
        weight_N *= constraint.holdings.cost_N * p_N * (1 - p_N)
    assert float((weight_N * direction_N.square()).sum() / weight_N.sum()) == pytest.approx(1.0)


def test_of_a_settled_group_the_center_is_the_mean_and_one_without_free_samples_has_none():
    group_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    forced_N = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.int8)
    holdings = Holdings.of(9, group_N=group_N, names=("settled", "kept", "open"), forced_N=forced_N)
    constraint = Constrained(holdings, BudgetSpec(0.5, {"kept": 1.0, "settled": 0.0}))
    gradient_N = torch.tensor([1.0, 2.0, 6.0, 5.0, -4.0, 0.0, 1.0, 1.0, 2.0]).double()
    p_N = constraint.probabilities(torch.zeros(9))
    centered_N = gradient_N - torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    free_N = forced_N == 0
    expected_N = centered_N / centered_N[free_N].square().mean().sqrt()
    assert torch.allclose(constraint.ascent_direction(gradient_N, p_N), expected_N)


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_what_is_allowed_is_what_the_definition_allows(kind):
    constraint = constraints.make(kind, 8)
    found = [mask_N for mask_N in oracles.all_masks(8) if constraint.allows(torch.tensor(mask_N))]
    assert np.array_equal(found, list(constraints.allowed_masks(constraint)))


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_filling_a_mask_adds_in_order_whatever_still_fits(kind):
    rng = np.random.default_rng(0)
    for seed in range(10):
        constraint = constraints.make(kind, 20, seed=seed)
        scores_N = torch.tensor(rng.permutation(20).astype(float))
        start_N = constraint.fill(torch.tensor(rng.normal(size=20)))
        start_N &= (constraint.holdings.forced_N > 0) | torch.tensor(rng.uniform(size=20) < 0.6)
        before_N = start_N.clone()
        expected_N = start_N.clone()
        for row in scores_N.argsort(descending=True).tolist():
            if not expected_N[row] and constraint.holdings.forced_N[row] == 0:
                expected_N[row] = True
                expected_N[row] = bool((constraint.room_left(expected_N) >= 0).all())
        assert torch.equal(constraint.fill(scores_N, start_N=start_N), expected_N)
        assert torch.equal(start_N, before_N)


def test_groups_of_which_nothing_or_everything_is_kept_have_probabilities_zero_and_one():
    group_N, names = groups_of([4, 4, 4, 0, 1])
    holdings = Holdings.of(13, group_N=group_N, names=names)
    constraint = Constrained(holdings, BudgetSpec(0.5, {"g0": 0.0, "g1": 1.0, "g4": 1.0}))
    p_N = constraint.probabilities(torch.randn(13, generator=torch.Generator().manual_seed(0)))
    assert p_N[:4].tolist() == [0.0] * 4
    assert p_N[[4, 5, 6, 7, 12]].tolist() == [1.0] * 5
    direction_N = constraint.ascent_direction(torch.arange(13).double(), p_N)
    assert bool(direction_N.isfinite().all())
