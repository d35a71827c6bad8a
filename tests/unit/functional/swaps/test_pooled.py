import numpy as np
import pytest
import torch

from datamask_pl.functional.swaps import pooled
from datamask_pl.functional.swaps.pooled import first_largest, polish, spread_out, top_k_mask
from tests.support import exchanges, oracles, problems

# ---- top_k_mask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_selected", [1, 2, 50, 99, 100])
@pytest.mark.parametrize("num_levels", [1, 2, 7, 1000])
def test_top_k_is_a_stable_sort_cut_at_the_budget(num_selected, num_levels):
    """torch #127196: ties in topk differ between devices."""
    logits_N = np.random.default_rng(num_levels).integers(0, num_levels, size=100).astype(np.float32)
    expected_N = oracles.mask_of(list(np.argsort(-logits_N, kind="stable")[:num_selected]), 100)
    mask_N = top_k_mask(torch.tensor(logits_N), num_selected)
    assert mask_N.dtype == torch.bool
    np.testing.assert_array_equal(mask_N, expected_N)


def test_minus_zero_ties_with_zero():
    logits_N = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0])
    assert top_k_mask(logits_N, 2).tolist() == [False, True, True, False, False]
    assert top_k_mask(-logits_N, 2).tolist() == [True, True, False, False, False]


def test_a_million_equal_logits_keep_the_first_rows():
    mask_N = top_k_mask(torch.zeros(1_000_000), 300_000)
    assert bool(mask_N[:300_000].all())
    assert not mask_N[300_000:].any()


def test_top_k_leaves_the_logits_alone_and_handles_extremes():
    logits_N = torch.tensor([3e38, -3e38, 1e-45, 0.0])
    assert top_k_mask(logits_N, 2).tolist() == [True, False, True, False]
    assert logits_N.tolist()[3] == 0.0


# ---- first_largest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_levels", [2, 9, 10_000])
@pytest.mark.parametrize("count", [1, 7, 299, 300, 400])
def test_the_first_largest_are_those_of_a_stable_sort(count, num_levels):
    values_N = np.random.default_rng(0).integers(0, num_levels, size=300).astype(float)
    expected = np.argsort(-values_N, kind="stable")[:count]
    assert first_largest(torch.tensor(values_N), count).tolist() == expected.tolist()


# ---- spread_out ------------------------------------------------------------------------------------------------------


def test_similar_rows_leave_only_the_first_of_them():
    features_CD = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0], [0.1, 1.0], [-1.0, 0.0]])
    assert spread_out(torch.tensor([10, 11, 12, 13, 14]), features_CD).tolist() == [10, 12, 14]


def test_spread_out_of_no_rows_and_of_zero_vectors():
    assert spread_out(torch.tensor([], dtype=torch.int64), torch.zeros(0, 3)).tolist() == []
    assert spread_out(torch.tensor([4, 2]), torch.zeros(2, 3)).tolist() == [4, 2]


# ---- polish ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", problems.DIVERSITIES)
def test_a_small_block_is_solved_to_within_one_percent_of_the_optimum(kind):
    for seed in range(15):
        solver, oracle = exchanges.random_solver(kind, seed)
        mask_N, value = polish(solver.top_k(), values=solver.values, gains=solver.gains)
        num_samples, num_selected = solver.ground.num_samples, solver.ground.num_selected
        values = [oracle(any_N) for any_N in oracles.masks_of_size(num_samples, num_selected)]
        assert int(mask_N.sum()) == num_selected
        assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)
        assert value - np.mean(values) >= 0.99 * (max(values) - np.mean(values)) - 1e-9


@pytest.mark.parametrize("kind", problems.DIVERSITIES)
@pytest.mark.parametrize("has_features", [True, False])
def test_exchanges_keep_the_budget_and_never_lose(monkeypatch, kind, has_features):
    monkeypatch.setattr(pooled, "MAX_ENUMERATED_SAMPLES", 0)
    num_improved = 0
    for seed in range(6):
        solver, oracle = exchanges.random_solver(kind, seed, num_samples=24)
        start_N = torch.tensor(problems.random_masks(1, 24, solver.ground.num_selected, seed)[0])
        before_N = start_N.clone()
        features = solver.ground.centered if has_features else None
        mask_N, value = polish(start_N, values=solver.values, gains=solver.gains, features=features)
        assert torch.equal(start_N, before_N)
        assert int(mask_N.sum()) == solver.ground.num_selected
        assert value >= oracle(start_N.numpy()) - 1e-12
        assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)
        num_improved += value > oracle(start_N.numpy()) + 1e-9
    assert num_improved >= 3, "nothing was exchanged: the test shows nothing"


@pytest.mark.parametrize("kind", ["facility_location", "pairwise", "disf"])
def test_exchanges_end_where_no_single_one_is_better(monkeypatch, kind):
    monkeypatch.setattr(pooled, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(pooled, "NUM_SINGLES", 24)
    for seed in range(4):
        solver, oracle = exchanges.random_solver(kind, seed, num_samples=12)
        mask_N, value = polish(solver.top_k(), values=solver.values, gains=solver.gains)
        for added in np.flatnonzero(~mask_N.numpy()):
            for removed in np.flatnonzero(mask_N.numpy()):
                trial_N = mask_N.numpy().copy()
                trial_N[added], trial_N[removed] = True, False
                assert oracle(trial_N) <= value + 1e-12


def test_all_pairs_that_promise_something_are_tried_together_then_fewer_then_single_exchanges():
    gain_N = torch.tensor([9.0, 8.0, 7.0, 6.0, 2.0, *range(10)]).double()
    gain_N = torch.cat([gain_N, torch.tensor([5.0, 3.0, 2.0, 2.0, 2.0])]).double()
    mask_N = torch.arange(20) >= 5  # left out: 9, 8, 7, 6, 2; kept: 0, 1, 2, 2, 2, 2, 3, ...
    asked = []

    def values(masks_RN):
        asked.extend(masks_RN)
        return torch.zeros(len(masks_RN), dtype=torch.float64)

    polish(mask_N, values=values, gains=lambda mask_N: gain_N)
    tried = [(trial_N != mask_N).nonzero().squeeze(1).tolist() for trial_N in asked]
    kept = sorted(range(5, 20), key=lambda row: (float(gain_N[row]), row))
    # the fifth pair would exchange 2 for 2
    joint = [sorted([*range(count), *kept[:count]]) for count in (4, 2, 1)]
    singles = [sorted([one, other]) for one in range(4) for other in kept[:4]]
    assert tried == [[], *joint, *singles]


@pytest.mark.parametrize("max_enumerated", [0, 16])
@pytest.mark.parametrize("proxy", ["constant", "misleading"])
def test_any_proxy_of_the_gains_is_safe(monkeypatch, max_enumerated, proxy):
    monkeypatch.setattr(pooled, "MAX_ENUMERATED_SAMPLES", max_enumerated)
    solver, oracle = exchanges.random_solver("disf", 3, num_samples=14)
    start_N = solver.top_k()
    gains = {"constant": lambda mask_N: torch.zeros(14, dtype=torch.float64), "misleading": lambda m: -solver.gains(m)}
    mask_N, value = polish(start_N, values=solver.values, gains=gains[proxy])
    assert int(mask_N.sum()) == solver.ground.num_selected
    assert value >= oracle(start_N.numpy()) - 1e-12
    assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)


@pytest.mark.parametrize("num_samples", [1, 5, 20])
@pytest.mark.parametrize("interactions", [None, lambda rows_P: pytest.fail("nothing can be exchanged")])
def test_a_mask_that_keeps_everything_is_returned_unchanged(num_samples, interactions):
    ones_N = torch.ones(num_samples, dtype=torch.bool)
    mask_N, value = polish(
        ones_N,
        values=lambda masks_RN: masks_RN.double().sum(1),
        gains=lambda mask_N: pytest.fail("nothing can be exchanged"),
        interactions=interactions,
    )
    assert torch.equal(mask_N, ones_N)
    assert value == num_samples


@pytest.mark.parametrize("num_samples", [6, 20])
def test_where_all_masks_are_equally_good_the_start_stays(num_samples):
    start_N = oracles.mask_of([1, 3, 4], num_samples)
    mask_N, value = polish(
        torch.tensor(start_N),
        values=lambda masks_RN: torch.zeros(len(masks_RN), dtype=torch.float64),
        gains=lambda mask_N: torch.arange(num_samples, dtype=torch.float64),
    )
    np.testing.assert_array_equal(mask_N, start_N)
    assert value == 0.0


@pytest.mark.parametrize("change", [0.0, -1.0])
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_promised_and_does_not_make_the_value_larger_is_not_kept(is_known, change):
    start_N = torch.arange(20) >= 15
    mask_N, value = polish(
        start_N,
        values=lambda masks_RN: 5.0 + change * (masks_RN != start_N).any(1).double(),
        gains=lambda mask_N: torch.arange(20, 0, -1, dtype=torch.float64),
        interactions=(lambda rows_P: lambda places, others: torch.zeros(len(rows_P), len(rows_P))[places][:, others])
        if is_known
        else None,
    )
    assert torch.equal(mask_N, start_N)
    assert value == 5.0


@pytest.mark.parametrize("is_known", [False, True])
def test_rounds_are_at_most_so_many(monkeypatch, is_known):
    """Of one candidate on either side each, so that a round exchanges one pair."""
    for name, number in (("NUM_CANDIDATES", 1), ("NUM_SINGLES", 1), ("NUM_POOLED", 1), ("NUM_KNOWN_CANDIDATES", 1)):
        monkeypatch.setattr(pooled, name, number)
    gain_N = torch.cat([torch.full((10,), 2.0), torch.full((10,), 1.0)]).double()

    def exchanged(max_rounds):
        mask_N, value = polish(
            torch.arange(20) >= 10,
            values=lambda masks_RN: masks_RN.double() @ gain_N,
            gains=lambda mask_N: gain_N,
            interactions=(lambda rows_P: lambda places, others: torch.zeros(2, 2)[places][:, others])
            if is_known
            else None,
            max_rounds=max_rounds,
        )
        assert value == float(gain_N[mask_N].sum())
        return int(mask_N[:10].sum())

    assert [exchanged(max_rounds) for max_rounds in (0, 1, 3, 10, 11)] == [0, 1, 3, 10, 10]


@pytest.mark.parametrize("num_samples", [16, 17])
def test_of_up_to_16_samples_the_best_mask_is_found_though_no_gain_leads_there(num_samples):
    best_N = oracles.mask_of([7, 12, 15], num_samples)
    start_N = oracles.mask_of([0, 1, 2], num_samples)
    mask_N, value = polish(
        torch.tensor(start_N),
        values=lambda masks_RN: (masks_RN == torch.tensor(best_N)).all(1).double(),
        gains=lambda mask_N: torch.zeros(num_samples, dtype=torch.float64),
    )
    assert mask_N.tolist() == (best_N if num_samples == 16 else start_N).tolist()
    assert value == (num_samples == 16)
