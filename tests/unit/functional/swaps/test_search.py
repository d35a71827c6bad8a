"""The laws of all swap searches: whatever is known of the objective, and whatever the budget."""

import numpy as np
import pytest
import torch

from datamask_pl.functional.swaps import constrained, pooled, search
from datamask_pl.functional.swaps.polish import polish
from datamask_pl.functional.swaps.search import spread_out, swap_search
from tests.support import constraints, exchanges, oracles

SIZES = [None, *constraints.KINDS]
SEARCHES = [
    *[(None, known, kind) for known in ("nothing", "features") for kind in ("facility_location", "pairwise", "disf")],
    (None, "features", "disf_standardized"),
    *[(None, "interactions", kind) for kind in ("pairwise", "disf")],
    *[(size, "nothing", "disf") for size in constraints.KINDS],
    *[(size, "features", "pairwise") for size in constraints.KINDS],
    *[(size, "coverage", "facility_location") for size in (None, "groups", "forced and groups", "groups and costs")],
]


def solver_of(size, kind, seed, num_samples):
    constraint = size and constraints.make(size, num_samples, seed=seed)
    return exchanges.Solver(kind, seed, num_samples=num_samples, constraint=constraint)


@pytest.fixture
def enumerates_none(monkeypatch):
    monkeypatch.setattr(pooled, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(constrained, "MAX_ENUMERATED_SAMPLES", 0)


@pytest.mark.parametrize(("size", "known", "kind"), SEARCHES)
def test_a_search_keeps_the_budget_and_never_loses(size, known, kind):
    num_improved = 0
    for seed in range(5):
        solver = solver_of(size, kind, seed, 26)
        start_N = solver.random_mask(seed)
        before_N = start_N.clone()
        mask_N, value = solver.polish(start_N, known=known)
        assert torch.equal(start_N, before_N)
        assert mask_N.dtype == torch.bool
        assert solver.may_be(mask_N)
        assert value == pytest.approx(solver.oracle(mask_N), abs=1e-9)
        assert value >= solver.oracle(start_N) - 1e-12
        num_improved += value > solver.oracle(start_N) + 1e-9
    assert num_improved >= 3, "nothing was swapped: the test shows nothing"


@pytest.mark.usefixtures("enumerates_none")
@pytest.mark.parametrize(("size", "known", "kind"), [case for case in SEARCHES if case[1] != "features"])
def test_a_search_ends_where_no_single_swap_is_better(monkeypatch, size, known, kind):
    monkeypatch.setattr(search, "NUM_SINGLES", 24)
    for seed in range(4):
        solver = solver_of(size, kind, seed, 14)
        mask_N, value = solver.polish(solver.random_mask(), known=known)
        rounding = 1e-12 if known == "nothing" else 2e-6 * float(solver.gains(mask_N).abs().max())
        for trial_N, _, _ in exchanges.swaps_of(mask_N):
            if solver.may_be(trial_N):
                assert solver.oracle(trial_N) <= value + rounding


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["facility_location", "pairwise", "disf"])
def test_a_handful_of_samples_is_solved_by_trying_all_and_gains_are_not_asked_for(size, kind):
    for seed in range(3):
        solver = solver_of(size, kind, seed, 8)
        start_N = solver.random_mask()
        if size is None:
            allowed = oracles.masks_of_size(8, solver.ground.num_selected)
        else:
            allowed = [mask_N for mask_N in constraints.allowed_masks(solver.constraint) if mask_N.any()]
        best = max(solver.oracle(mask_N) for mask_N in allowed if solver.may_be(torch.tensor(mask_N)))
        mask_N, value = solver.polish(start_N, known="coverage", gains=lambda mask_N: pytest.fail("not needed"))
        assert solver.may_be(mask_N)
        assert value == pytest.approx(best, abs=1e-9)
        assert value == pytest.approx(solver.oracle(mask_N), abs=1e-9)


@pytest.mark.usefixtures("enumerates_none")
@pytest.mark.parametrize("size", [None, "groups and costs"])
@pytest.mark.parametrize("sign", [0.0, -1.0])
def test_any_proxy_of_the_gains_is_safe(size, sign):
    solver = solver_of(size, "disf", 3, 16)
    start_N = solver.random_mask()
    mask_N, value = solver.polish(start_N, gains=lambda mask_N: sign * solver.gains(mask_N))
    assert solver.may_be(mask_N)
    assert value >= solver.oracle(start_N) - 1e-12
    assert value == pytest.approx(solver.oracle(mask_N), abs=1e-9)


@pytest.mark.parametrize("num_samples", [6, 20])
@pytest.mark.parametrize("size", [None, "groups"])
def test_where_all_masks_are_equally_good_the_start_stays(size, num_samples):
    constraint = size and constraints.make(size, num_samples)
    start_N = torch.arange(num_samples) % 2 == 0 if constraint is None else constraint.fill(torch.zeros(num_samples))
    mask_N, value = polish(
        start_N,
        values=lambda masks_RN: torch.zeros(len(masks_RN), dtype=torch.float64),
        gains=lambda mask_N: torch.randn(num_samples, generator=torch.Generator().manual_seed(0)).double(),
        constraint=constraint,
    )
    assert torch.equal(mask_N, start_N)
    assert value == 0.0


@pytest.mark.parametrize("num_samples", [1, 5, 20])
@pytest.mark.parametrize("interactions", [None, lambda rows_P: pytest.fail("nothing can be swapped")])
def test_a_mask_that_keeps_everything_is_returned_unchanged(num_samples, interactions):
    ones_N = torch.ones(num_samples, dtype=torch.bool)
    mask_N, value = polish(
        ones_N,
        values=lambda masks_RN: masks_RN.double().sum(1),
        gains=lambda mask_N: pytest.fail("nothing can be swapped"),
        interactions=interactions,
    )
    assert torch.equal(mask_N, ones_N)
    assert value == num_samples


@pytest.mark.parametrize("num_samples", [16, 17])
def test_of_up_to_16_samples_the_best_mask_is_found_though_no_gain_leads_there(num_samples):
    best_N, start_N = (torch.tensor(oracles.mask_of(rows, num_samples)) for rows in ([7, 12, 15], [0, 1, 2]))
    mask_N, value = polish(
        start_N,
        values=lambda masks_RN: (masks_RN == best_N).all(1).double(),
        gains=lambda mask_N: torch.zeros(num_samples, dtype=torch.float64),
    )
    assert torch.equal(mask_N, best_N if num_samples == 16 else start_N)
    assert value == (num_samples == 16)


# ---- the driver ------------------------------------------------------------------------------------------------------


def climb(gains, **options):
    """Searches where each round adds the next sample, which raises the value by so much: the number of rounds made."""

    def propose(mask_N):
        return [[(torch.arange(len(mask_N)) <= mask_N.sum())[None]]]

    mask_N, value = swap_search(
        torch.zeros(len(gains), dtype=torch.bool), propose,
        values=lambda masks_RN: masks_RN.double() @ torch.tensor(gains).double(), **options,
    )  # fmt: skip
    assert value == sum(gains[: int(mask_N.sum())])
    return int(mask_N.sum())


def test_rounds_are_at_most_so_many_a_hundred_unless_told_otherwise():
    assert [climb([1.0] * 120, max_rounds=rounds) for rounds in (0, 1, 3)] == [0, 1, 3]
    assert climb([1.0] * 120) == 100


@pytest.mark.parametrize("unit", [2.0**-30, 1.0, 2.0**30])
def test_rounds_end_with_the_first_that_gains_less_than_a_share_of_what_the_best_did(unit):
    gains = [unit * gain for gain in (8.0, 64.0, 2.0, 1.0, 0.75, 0.5)]
    assert climb(gains, least_share_gained=1 / 64) == 5
    assert climb(gains) == 6


@pytest.mark.parametrize("gain", [0.0, -1.0, float("nan")])
def test_a_mask_that_does_not_raise_the_value_is_not_kept(gain):
    masks = iter([torch.zeros(4), torch.full((1,), gain)])
    mask_N, value = swap_search(
        torch.zeros(4, dtype=torch.bool), lambda mask_N: [[~mask_N[None]]], values=lambda masks_RN: next(masks)[:1]
    )
    assert not mask_N.any()
    assert value == 0.0


def test_the_best_mask_of_the_first_set_with_a_better_one_wins_whatever_its_parts():
    worth = {0: 5.0, 1: 4.0, 2: 6.0, 3: 8.0, 4: 7.0, 5: 9.0}
    rows = torch.eye(6, dtype=torch.bool)

    def propose(mask_N):
        assert torch.equal(mask_N, rows[0]) or torch.equal(mask_N, rows[3])
        yield []
        yield [rows[1][None]]
        yield [rows[[1, 2]], rows[[3]], rows[[4, 1]]]
        if mask_N[0]:
            pytest.fail("a better mask was there")

    mask_N, value = swap_search(
        rows[0], propose, values=lambda masks_RN: masks_RN.double() @ torch.tensor([*worth.values()]).double()
    )
    assert torch.equal(mask_N, rows[3])
    assert value == 8.0


# ---- spread_out ------------------------------------------------------------------------------------------------------


def test_similar_rows_leave_only_the_first_of_them():
    features_CD = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0], [0.1, 1.0], [-1.0, 0.0]])
    assert spread_out(torch.tensor([10, 11, 12, 13, 14]), features_CD).tolist() == [10, 12, 14]


def test_spread_out_of_no_rows_and_of_zero_vectors():
    assert spread_out(torch.tensor([], dtype=torch.int64), torch.zeros(0, 3)).tolist() == []
    assert spread_out(torch.tensor([4, 2]), torch.zeros(2, 3)).tolist() == [4, 2]


def test_swaps_are_tried_together_in_halves_and_one_by_one():
    mask_N = torch.arange(6) < 3
    added, removed = torch.tensor([5, 4, 3]), torch.tensor([0, 2, 1])
    changed = [np.flatnonzero(trial_N != mask_N).tolist() for trial_N in search.joint_swaps(mask_N, added, removed)]
    assert changed == [[0, 1, 2, 3, 4, 5], [0, 5]]
    singles_RN = search.single_swaps(mask_N, added[:2], removed[:2])
    assert [np.flatnonzero(trial_N != mask_N).tolist() for trial_N in singles_RN] == [[0, 5], [2, 5], [0, 4], [2, 4]]
