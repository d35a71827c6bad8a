import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.swaps import constrained, search
from datamask_pl.functional.swaps.polish import polish
from tests.support import constraints, problems


def sums_of(worth_N):
    """An objective that is a sum."""
    return {"values": lambda masks_RN: masks_RN.double() @ worth_N, "gains": lambda mask_N: worth_N}


def means_of(quality_N):
    """An objective that is a mean, which most samples lower."""
    return {
        "values": lambda masks_RN: masks_RN.double() @ quality_N / masks_RN.sum(1),
        "gains": lambda mask_N: (quality_N - quality_N[mask_N].mean()) / mask_N.sum(),
    }


def swaps_of(constraint):
    """Without gains and features, which a test of what follows from them does not need."""
    return constrained.ConstrainedSwaps(constraint, gains=None, features=None)


def is_full(constraint, mask_N):
    """True if no other sample may be added."""
    more_RN = mask_N.repeat(len(mask_N), 1) | torch.eye(len(mask_N), dtype=torch.bool)
    return not any(constraint.allows(more_N) for more_N in more_RN[~mask_N])


class Looked(Exception):  # noqa: N818
    """Ends a search that has found its candidates."""


def candidates_of(monkeypatch, mask_N, constraint, gain_N, features=None):
    """What comes in and what goes, in order."""
    seen = []

    def match(added, removed, *_, **__):
        seen.extend([added.tolist(), removed.tolist()])
        raise Looked

    monkeypatch.setattr(constrained, "match", match)
    with pytest.raises(Looked):
        polish(
            mask_N, values=lambda masks_RN: torch.zeros(len(masks_RN)), gains=lambda mask_N: gain_N,
            features=features, constraint=constraint,
        )  # fmt: skip
    return seen


def worth_of(gains, costs, groups, rooms):
    """Gains beyond what their costs bring where each group's budget, spent by gain per cost, ends."""
    worth = list(gains)
    for group, room in enumerate(rooms):
        members = [row for row in range(len(gains)) if groups[row] == group]
        best_first = sorted(members, key=lambda row: -gains[row] / costs[row])
        price = gains[best_first[-1]] / costs[best_first[-1]]
        for row in best_first:
            room -= costs[row]
            if room < 0:
                price = gains[row] / costs[row]
                break
        for row in members:
            worth[row] -= price * costs[row]
    return worth


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_candidates_are_those_worth_most_beyond_what_their_cost_brings_at_the_margin(monkeypatch, kind):
    constraint = constraints.make(kind, 30)
    holdings = constraint.holdings
    gain_N = torch.randn(30, generator=torch.Generator().manual_seed(0)).double() + 3 * holdings.group_N
    cost_N = torch.ones(30).double() if holdings.cost_N is None else holdings.cost_N
    free = [row for row in range(30) if int(holdings.forced_N[row]) == 0]
    worth = worth_of(
        *(tensor_N[free].tolist() for tensor_N in (gain_N, cost_N, holdings.group_N)), constraint.room_G.tolist()
    )
    mask_N = constraint.fill(torch.zeros(30))
    best_first = [row for _, row in sorted(zip(worth, free, strict=True), key=lambda pair: -pair[0])]
    added, removed = candidates_of(monkeypatch, mask_N, constraint, gain_N)
    assert added == [row for row in best_first if not mask_N[row]]
    assert removed == [row for row in best_first[::-1] if mask_N[row]]
    np.testing.assert_allclose(constrained.net_gains(gain_N, constraint)[free], worth, atol=1e-12)


def test_a_group_without_free_samples_and_one_that_is_kept_whole_have_a_worth():
    """Of the first group all is kept whatever it is worth, of the second nothing is free."""
    holdings = Holdings.of(
        6, group_N=torch.tensor([0, 0, 0, 1, 1, 2]), names=("whole", "forced", "none"),
        forced_N=torch.tensor([0, 0, 0, 1, 1, 0]).to(torch.int8),
    )  # fmt: skip
    constraint = Constrained(holdings, BudgetSpec(0.5, {"whole": 1.0, "forced": 1.0, "none": 0.0}))
    worth_N = constrained.net_gains(torch.tensor([3.0, 1.0, 2.0, 5.0, 6.0, 7.0]).double(), constraint)
    assert worth_N.tolist() == [2.0, 0.0, 1.0, 5.0, 6.0, 0.0]


def relaxed_bound(quality, cost, budget):
    """The highest mean quality, by Dinkelbach's rule, where a part of a sample may be kept and the budget is spent."""
    bound = 0.0
    while True:
        kept, left = [], budget
        for row in sorted(range(len(cost)), key=lambda row: -(quality[row] - bound) / cost[row]):
            kept.append((row, min(1.0, left / cost[row])))
            left -= kept[-1][1] * cost[row]
            if left <= 0.0:
                break
        mean = sum(part * quality[row] for row, part in kept) / sum(part for _, part in kept)
        if mean <= bound + 1e-12:
            return bound
        bound = mean


@pytest.mark.parametrize("start", ["cheapest", "best", "random"])
def test_where_every_sample_lowers_the_mean_few_expensive_ones_spend_the_budget(start):
    num_samples = 400
    generator = torch.Generator().manual_seed(0)
    cost_N = torch.exp(torch.randn(num_samples, generator=generator)).double()
    quality_N = torch.rand(num_samples, generator=generator).double()
    constraint = Constrained(Holdings.of(num_samples, cost_N=cost_N), BudgetSpec(0.1))

    scores = {"cheapest": -cost_N, "best": quality_N, "random": torch.rand(num_samples, generator=generator)}
    mask_N, value = polish(constraint.fill(scores[start]), constraint=constraint, **means_of(quality_N))
    assert constraint.allows(mask_N)
    assert value == pytest.approx(float(quality_N[mask_N].mean()))
    assert value > 0.98 * relaxed_bound(quality_N.tolist(), cost_N.tolist(), float(constraint.room_G[0]))


def test_forced_samples_stay_whatever_they_are_worth():
    constraint = constraints.make("forced and costs", 60)
    mask_N = constraint.fill(torch.zeros(60))
    quality_N = torch.randn(60, generator=torch.Generator().manual_seed(0)).double() * 9**constraint.holdings.forced_N
    polished_N, value = polish(mask_N, constraint=constraint, **sums_of(quality_N))
    assert constraint.allows(polished_N)
    assert value > float(quality_N[mask_N].sum())


def test_of_candidates_with_the_same_features_the_best_alone_is_looked_at(monkeypatch):
    constraint = constraints.make("groups", 20)
    mask_N = constraint.fill(torch.zeros(20))
    gain_N = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    everyone = candidates_of(monkeypatch, mask_N, constraint, gain_N)
    chosen = candidates_of(monkeypatch, mask_N, constraint, gain_N, lambda rows: torch.eye(5)[rows % 5])
    for among, first in zip(everyone, chosen, strict=True):
        assert first == [
            row for place, row in enumerate(among) if row % 5 not in {other % 5 for other in among[:place]}
        ]


def test_a_match_uses_what_is_left_of_the_budget_to_the_last_and_promises_something():
    def match(cost_N, gain_N, room):
        constraint = Constrained(Holdings.of(4, cost_N=torch.tensor(cost_N)), BudgetSpec(0.9))
        room_G, gain_N = torch.tensor([room]).double(), torch.tensor(gain_N).double()
        added, removed = torch.tensor([0, 1]), torch.tensor([2, 3])
        return constrained.match(added, removed, constraint, net_gain_N=gain_N, room_G=room_G).tolist()

    assert match([1.0, 4.0, 1.0, 2.0], [5.0, 4.0, 0.0, 1.0], 2.0) == [[0, 2], [1, 3]]
    assert match([1.0, 4.0, 1.0, 2.0], [5.0, 4.0, 0.0, 1.0], 1.0) == [[0, 2]]
    assert match([3.0, 9.0, 2.0, 2.0], [5.0, 4.0, 1.0, 0.0], 1.0) == [[0, 3]]
    assert match([3.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], 1.0) == []


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_what_is_worth_less_than_its_cost_goes_all_of_it_then_the_worse_half_and_at_last_one(kind):
    """What is worth exactly its cost, as the sample at the margin is, stays, and what is worth more as well."""
    for seed in range(5):
        constraint = constraints.make(kind, 30, seed=seed)
        rng = np.random.default_rng(seed)
        mask_N, gain_N = (
            constraint.fill(torch.tensor(rng.normal(size=30))),
            torch.tensor(rng.integers(-4, 5, size=30) / 8),
        )
        net_gain_N = constrained.net_gains(gain_N, constraint)
        worth = net_gain_N.tolist()
        free = [row for row in range(30) if mask_N[row] and int(constraint.holdings.forced_N[row]) == 0]
        goes = sorted((row for row in free if worth[row] < 0), key=lambda row: worth[row])
        assert 0 < len(goes) < len(free)
        expected, count = [], len(goes)
        while count:
            expected.append(sorted(goes[:count]))
            count //= 2
        trials_RN = swaps_of(constraint)._moved(mask_N, net_gain_N)
        assert [(mask_N & ~trial_N).nonzero().squeeze(1).tolist() for trial_N in trials_RN] == expected
        assert not (trials_RN & ~mask_N).any()


@pytest.mark.parametrize("kind", ["costs", "groups and costs", "forced and costs"])
def test_a_trial_is_completed_by_what_still_fits(kind):
    constraint = constraints.make(kind, 16)
    gain_N = torch.randn(16, generator=torch.Generator().manual_seed(1)).double()
    trials_RN = torch.stack(
        [constraint.fill(torch.randn(16, generator=torch.Generator().manual_seed(s))) for s in (2, 3)]
    )
    trials_RN &= torch.rand(2, 16, generator=torch.Generator().manual_seed(4)) < 0.7
    trials_RN |= constraint.kept()
    completed_RN = swaps_of(constraint)._completed(trials_RN.clone(), gain_N)
    for trial_N, completed_N in zip(trials_RN, completed_RN, strict=True):
        assert torch.equal(completed_N & trial_N, trial_N)
        assert constraint.allows(completed_N)
        assert is_full(constraint, completed_N)


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_singles_are_all_exchanges_within_a_group_that_the_budget_allows(monkeypatch, kind):
    monkeypatch.setattr(search, "NUM_SINGLES", 20)
    monkeypatch.setattr(search, "NUM_CANDIDATES", 20)
    constraint = constraints.make(kind, 14)
    mask_N = constraint.fill(torch.zeros(14))
    found = {tuple(trial_N.tolist()) for trial_N in swaps_of(constraint)._singles(mask_N, torch.zeros(14).double())}
    expected, group_N = set(), constraint.holdings.group_N
    for added in (~mask_N).nonzero().squeeze(1).tolist():
        for removed in mask_N.nonzero().squeeze(1).tolist():
            trial_N = mask_N.clone()
            trial_N[added], trial_N[removed] = True, False
            if group_N[added] == group_N[removed] and constraint.allows(trial_N):
                expected.add(tuple(trial_N.tolist()))
    assert found == expected


@pytest.mark.parametrize("kind", ["groups", "costs", "groups and costs"])
def test_matched_pairs_are_those_of_plain_loops_and_may_be_exchanged_from_the_first_on_as_many_as_one_likes(kind):
    for seed in range(5):
        constraint = constraints.make(kind, 40, seed=seed)
        group, cost = (array.tolist() for array in constrained.groups_and_costs(torch.arange(40), constraint))
        rng = np.random.default_rng(seed)
        mask_N = constraint.fill(torch.tensor(rng.normal(size=40)))
        worth_N = torch.tensor(rng.normal(size=40))
        added = (~mask_N).nonzero().squeeze(1)
        added = added[worth_N[added].argsort(descending=True)]
        removed, room_G = mask_N.nonzero().squeeze(1), constraint.room_left(mask_N)
        pairs = constrained.match(added, removed, constraint, net_gain_N=worth_N, room_G=room_G).tolist()
        expected, left, waiting = [], room_G.tolist(), removed.tolist()
        for one in added.tolist():
            may_go = [
                row for row in waiting
                if group[row] == group[one] and worth_N[row] < worth_N[one]
                and cost[one] - cost[row] <= left[group[one]]
            ]  # fmt: skip
            if may_go:
                other = min(may_go, key=lambda row: float(worth_N[row]))
                waiting.remove(other)
                left[group[one]] -= cost[one] - cost[other]
                expected.append([one, other])
        assert pairs == expected
        assert len(pairs) > 3
        for one, other in pairs:
            mask_N[one], mask_N[other] = True, False
            assert constraint.allows(mask_N)


@pytest.mark.parametrize("kind", ["groups", "groups and costs"])
def test_all_pairs_are_tried_together_then_half_of_them_and_at_last_one(kind):
    constraint = constraints.make(kind, 60)
    rng = np.random.default_rng(0)
    mask_N = constraint.fill(torch.tensor(rng.normal(size=60)))
    net_gain_N = constrained.net_gains(torch.tensor(rng.normal(size=60)), constraint)
    added, removed = constrained.candidates(mask_N, constraint, net_gain_N, 60)
    room_G = constraint.room_left(mask_N)
    pairs = constrained.match(added, removed, constraint, net_gain_N=net_gain_N, room_G=room_G).tolist()
    expected, count = [], len(pairs)
    while count:
        trial_N = mask_N.clone()
        for one, other in pairs[:count]:
            trial_N[one], trial_N[other] = True, False
        expected.append(trial_N.tolist())
        count //= 2
    assert len(expected) >= 3
    assert swaps_of(constraint)._paired(mask_N, net_gain_N).tolist() == expected


@pytest.mark.parametrize("kind", ["costs", "groups and costs", "forced and costs"])
def test_a_start_keeps_what_it_has_and_takes_what_still_fits_by_gain_per_cost(kind):
    for seed in range(5):
        constraint = constraints.make(kind, 30, seed=seed)
        holdings, rng = constraint.holdings, np.random.default_rng(seed)
        gain_N = torch.tensor(rng.normal(size=30))
        full_N = constraint.fill(torch.tensor(rng.normal(size=30)))
        start_N = full_N & (torch.tensor(rng.random(30) < 0.5) | constraint.kept())
        expected_N = start_N.clone()
        for row in sorted(range(30), key=lambda row: -float(gain_N[row] / holdings.cost_N[row])):
            more_N = expected_N.clone()
            more_N[row] = True
            if constraint.allows(more_N):
                expected_N = more_N
        mask_N, value = polish(start_N, constraint=constraint, **sums_of(gain_N), max_rounds=0)
        assert torch.equal(mask_N, expected_N)
        assert value == pytest.approx(float(gain_N[expected_N].sum()))


@pytest.mark.parametrize("kind", ["groups", "group ratios", "forced and groups"])
def test_where_samples_have_a_worth_of_their_own_every_group_ends_with_its_best(kind):
    for seed in range(5):
        constraint = constraints.make(kind, 60, seed=seed)
        holdings, worth_N = constraint.holdings, torch.tensor(np.random.default_rng(seed).normal(size=60))
        expected_N = holdings.forced_N == 1
        for group, room in enumerate(constraint.room_G.tolist()):
            members = [row for row in range(60) if holdings.group_N[row] == group and holdings.forced_N[row] == 0]
            expected_N[sorted(members, key=lambda row: -float(worth_N[row]))[: int(room)]] = True
        mask_N, _ = polish(constraint.fill(-worth_N), constraint=constraint, **sums_of(worth_N))
        assert torch.equal(mask_N, expected_N)


@pytest.mark.parametrize("num_samples", [8, 30])
def test_a_start_with_room_left_is_filled_even_where_that_lowers_the_objective(num_samples):
    """One sample alone has the highest mean; masks that spend the budget are compared with each other alone."""
    for seed in range(5):
        constraint = constraints.make("costs", num_samples, seed=seed)
        quality_N = torch.tensor(problems.qualities(num_samples, seed))
        start_N = torch.arange(num_samples) == int(quality_N.argmax())
        mask_N, value = polish(start_N, constraint=constraint, **means_of(quality_N))
        assert is_full(constraint, mask_N)
        assert constraint.allows(mask_N)
        assert value == pytest.approx(float(quality_N[mask_N].mean()))


class LargestResult(TorchDispatchMode):
    """Keeps how many numbers the largest tensor has that anything returns."""

    num_numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor):
            self.num_numbers = max(self.num_numbers, result.numel())
        return result


def test_of_a_large_block_with_few_free_samples_a_few_masks_at_once_are_tried():
    num_samples = 10_000
    forced_N = torch.full((num_samples,), -1, dtype=torch.int8)
    forced_N[::1000] = 0
    forced_N[1::2] = 1
    constraint = Constrained(Holdings.of(num_samples, forced_N=forced_N), BudgetSpec(0.5005))
    quality_N = torch.arange(num_samples).double()
    with LargestResult() as largest:
        mask_N, _ = polish(constraint.fill(-quality_N), constraint=constraint, **sums_of(quality_N))
    assert (mask_N & (forced_N == 0)).nonzero().squeeze(1).tolist() == [5000, 6000, 7000, 8000, 9000]
    assert largest.num_numbers <= 16 * num_samples
