"""Swaps by gains alone, and where interactions are known."""

import numpy as np
import pytest
import torch

from datamask_pl.functional.swaps import pooled as module
from datamask_pl.functional.swaps import search
from datamask_pl.functional.swaps.polish import polish
from tests.support import exchanges


def test_all_pairs_that_gain_are_tried_together_then_fewer_then_single_swaps():
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_swapping_ends_where_no_swap_gains_however_strong_the_interactions(dtype):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        interaction_CC = rng.standard_normal((30, 30)).astype(dtype) * rng.choice([0.1, 1.0, 3.0])
        interaction_CC = np.triu(interaction_CC, 1) + np.triu(interaction_CC, 1).T
        gain_C = rng.standard_normal(30)  # of the start, with what the interactions with its members add
        is_kept_C = rng.permutation(30) < rng.integers(1, 30)
        own_C = gain_C - interaction_CC.astype(float) @ is_kept_C

        def worth(mask_C, own_C=own_C, interaction_CC=interaction_CC):
            return own_C @ mask_C + mask_C @ interaction_CC.astype(float) @ mask_C / 2

        found_C = module.swap_candidates(is_kept_C, gain_C, interaction_CC)
        assert found_C.sum() == is_kept_C.sum()
        assert worth(found_C) >= worth(is_kept_C)
        for added in np.flatnonzero(~found_C):
            for removed in np.flatnonzero(found_C):
                trial_C = found_C.copy()
                trial_C[added], trial_C[removed] = True, False
                assert worth(trial_C) <= worth(found_C) + 1e-5


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("num_pooled", [6, 30])
@pytest.mark.parametrize("pool_chunk", [4, 4096])
def test_the_gains_of_the_pool_follow_what_is_exchanged(monkeypatch, kind, num_pooled, pool_chunk):
    """Gains are asked for once; at the end no exchange of the best candidates, by gains found anew, is better."""
    monkeypatch.setattr(module, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 4)  # 2 as long as there is something to exchange
    monkeypatch.setattr(module, "LEAST_SHARE_MOVED", 10**6)
    monkeypatch.setattr(module, "NUM_POOLED", num_pooled)
    monkeypatch.setattr(module, "POOL_CHUNK", pool_chunk)
    num_moved = []
    for seed in range(5):
        solver = exchanges.Solver(kind, seed, num_samples=40)
        num_selected = solver.ground.num_selected
        start_N = solver.random_mask(seed)
        pool = torch.cat(search.candidates(solver.gains(start_N), ~start_N, start_N, num_pooled))
        mask_N, value = polish(
            start_N, values=solver.values, gains=solver.gains, interactions=solver.interactions, max_rounds=1
        )
        assert value == pytest.approx(solver.oracle(mask_N), abs=1e-9)
        assert int(mask_N.sum()) == num_selected
        assert set((mask_N != start_N).nonzero().squeeze(1).tolist()) <= set(pool.tolist())
        num_moved.append(int((mask_N != start_N).sum()) // 2)
        in_pool_N = torch.zeros(40, dtype=torch.bool).scatter_(0, pool, True)
        gain_N = solver.gains(mask_N)
        added = (in_pool_N & ~mask_N).nonzero().squeeze(1)
        removed = (in_pool_N & mask_N).nonzero().squeeze(1)
        for a in added[gain_N[added].argsort(descending=True)[:2]].tolist():
            for r in removed[gain_N[removed].argsort()[:2]].tolist():
                trial_N = mask_N.numpy().copy()
                trial_N[a], trial_N[r] = True, False
                assert solver.oracle(trial_N) <= value + 2 * module.RELATIVE_ROUNDING * float(gain_N.abs().max())
    assert max(num_moved) > 2, "the first candidates were all there was: the test shows nothing"


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
def test_gains_are_asked_for_again_unless_no_other_sample_can_be_a_candidate(monkeypatch, kind):
    monkeypatch.setattr(module, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 4)
    for num_pooled, is_once in ((6, False), (100, True)):
        monkeypatch.setattr(module, "NUM_POOLED", num_pooled)
        num_asked = []
        for seed in range(4):
            solver = exchanges.Solver(kind, seed, num_samples=60)
            start_N = solver.random_mask(seed)
            asked = []

            def gains(mask_N, solver=solver, asked=asked):
                asked.append(mask_N)
                return solver.gains(mask_N)

            _, value = polish(start_N, values=solver.values, gains=gains, interactions=solver.interactions)
            assert value > float(solver.values(start_N[None])[0])
            num_asked.append(len(asked))
        assert (max(num_asked) == 1) if is_once else (min(num_asked) > 1), num_asked


def test_a_sample_outside_the_pool_is_missed_only_if_it_could_have_changed_enough(monkeypatch):
    monkeypatch.setattr(module, "NUM_POOLED", 3)
    pooled, last = torch.tensor([5.0, 4.0, 3.0]), torch.tensor([5.0, 4.5])
    assert not module._may_miss(pooled, last, torch.tensor(1.4))
    assert module._may_miss(pooled, last, torch.tensor(1.5))
    assert not module._may_miss(pooled[:2], last, torch.tensor(9.0)), "all samples are in the pool"


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("unit", [2.0**-30, 2.0**30])
def test_the_unit_of_the_objective_decides_nothing(monkeypatch, kind, unit):
    monkeypatch.setattr(module, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 4)
    monkeypatch.setattr(module, "NUM_POOLED", 6)
    for seed in range(4):
        solver = exchanges.Solver(kind, seed, num_samples=60)
        start_N = solver.random_mask(seed)

        def solve(factor, solver=solver, start_N=start_N):
            def interactions(rows_P):
                known = solver.interactions(rows_P)
                return lambda places, others: factor * known(places, others)

            mask_N, value = polish(
                start_N, values=lambda masks_RN: factor * solver.values(masks_RN),
                gains=lambda mask_N: factor * solver.gains(mask_N), interactions=interactions,
            )  # fmt: skip
            return mask_N, value / factor

        (mask_N, value), (expected_N, expected) = solve(unit), solve(1.0)
        assert torch.equal(mask_N, expected_N)
        assert value == expected


def test_swap_finds_what_the_best_single_gain_does_not():
    """The best to add interacts with all that could go; only the second best is worth an exchange."""
    interaction_CC = np.zeros((4, 4))
    interaction_CC[0, 2:] = interaction_CC[2:, 0] = 5.0
    is_kept_C = np.array([False, False, True, True])
    gain_C = np.array([4.0, 3.0, 1.0, 2.0])
    assert module.swap_candidates(is_kept_C, gain_C, interaction_CC).tolist() == [False, True, False, True]
    assert is_kept_C.tolist() == [False, False, True, True]
    assert gain_C.tolist() == [4.0, 3.0, 1.0, 2.0]


def in_sweeps(is_kept_C, own_C, interaction_CC):
    """Exchanges as `exchange` says, by the values of all masks."""
    kept_C = is_kept_C.copy()

    def best(added):
        """What the best exchange for it is worth, and what that removes."""
        inside = np.flatnonzero(kept_C)
        mask_RC = np.stack([kept_C, *[kept_C] * len(inside)]).astype(float)
        mask_RC[1:, added] = 1.0
        mask_RC[np.arange(len(inside)) + 1, inside] = 0.0
        value_R = mask_RC @ own_C + ((mask_RC @ interaction_CC) * mask_RC).sum(1) / 2
        return value_R[1:].max() - value_R[0], inside[value_R[1:].argmax()]

    while True:
        worth = {added: best(added)[0] for added in np.flatnonzero(~kept_C)}
        least = max(worth.values()) / 2
        if least < 1e-9:
            return kept_C
        for added in sorted(worth, key=lambda added: -worth[added]):
            now, removed = best(added)
            if worth[added] > least and now > least:
                kept_C[added], kept_C[removed] = True, False


def test_a_sweep_makes_the_exchanges_that_are_worth_half_of_the_best_when_their_turn_comes():
    num_added = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        interaction_CC = np.triu(rng.standard_normal((40, 40)), 1)
        interaction_CC = interaction_CC + interaction_CC.T
        own_C, is_kept_C = 0.5 * rng.standard_normal(40), rng.permutation(40) < 10
        found_C = module.swap_candidates(is_kept_C, own_C + interaction_CC @ is_kept_C, interaction_CC)
        np.testing.assert_array_equal(found_C, in_sweeps(is_kept_C, own_C, interaction_CC))
        num_added += np.count_nonzero(found_C & ~is_kept_C)
    assert num_added > 100, "hardly anything was exchanged: the test shows nothing"


@pytest.mark.parametrize("num_levels", [1, 2])
def test_of_equally_good_exchanges_those_of_the_first_are_made(num_levels):
    """As a sort that is not stable would not, of more than a few."""
    gain_C = np.concatenate([np.arange(200) % num_levels + 2.0, np.zeros(50)])
    found_C = module.swap_candidates(np.arange(250) >= 200, gain_C, np.zeros((250, 250)))
    assert np.flatnonzero(found_C).tolist() == sorted(np.argsort(-gain_C, kind="stable")[:50])


def test_sweeps_end_with_the_first_that_exchanges_nothing(monkeypatch):
    """Without interactions a sweep makes all exchanges that are worth half of the best."""
    swept = []
    worth = module._best_gains
    monkeypatch.setattr(module, "_best_gains", lambda *numbers: swept.append(numbers) or worth(*numbers))
    gain_C = np.concatenate([np.linspace(3.0, 4.0, 50), np.zeros(50)])
    assert module.swap_candidates(np.arange(100) >= 50, gain_C, np.zeros((100, 100)))[:50].all()
    assert len(swept) == 2


def test_where_the_first_half_of_the_candidates_has_no_better_swap_the_others_are_tried(monkeypatch):
    """The two that gain most are like all that is kept; only the third is worth an exchange."""
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 4)
    interaction_NN = torch.zeros(20, 20, dtype=torch.float64)
    interaction_NN[:2, 10:] = interaction_NN[10:, :2].T.copy_(torch.full((2, 10), 20.0))
    own_N = torch.tensor([-190.0, -191.0, 8.0, *[0.0] * 7, *[1.0] * 10], dtype=torch.float64)
    mask_N, value = polish(
        torch.arange(20) >= 10,
        values=lambda masks_RN: torch.stack([m @ own_N + m @ interaction_NN @ m / 2 for m in masks_RN.double()]),
        gains=lambda mask_N: own_N + interaction_NN @ mask_N.double(),
        interactions=lambda rows_P: lambda places, others: interaction_NN[rows_P][:, rows_P][places][:, others],
    )
    assert mask_N.nonzero().flatten().tolist() == [2, *range(11, 20)]
    assert value == 17.0


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
def test_whether_a_pool_misses_some_is_told_by_its_first_gains_its_last_ones_and_the_largest_change(monkeypatch, kind):
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 4)
    asked = []
    monkeypatch.setattr(module, "_may_miss", lambda *numbers: asked.append(numbers))
    num_moved = 0
    for seed in range(4):
        solver = exchanges.Solver(kind, seed, num_samples=30)
        start_N = solver.random_mask(seed)
        mask_N, _ = polish(start_N, values=solver.values, gains=solver.gains, interactions=solver.interactions)
        num_moved += int((mask_N != start_N).sum())
        before_N, after_N = solver.gains(start_N), solver.gains(mask_N)
        for sign, is_side, (pooled, last, change) in zip((1, -1), (False, True), asked[-2:], strict=True):
            first, now = sign * before_N[start_N == is_side], sign * after_N[mask_N == is_side]
            torch.testing.assert_close(pooled.sort().values, first.sort().values)
            torch.testing.assert_close(last, now.sort(descending=True).values[:4])
            torch.testing.assert_close(change, (after_N - before_N).abs().max())
    assert num_moved > 8, "hardly anything was exchanged: the test shows nothing"


@pytest.mark.parametrize(("num_pairs", "is_whole", "is_left"), [(9, False, True), (8, False, False), (9, True, False)])
def test_a_pool_is_left_after_a_round_of_less_than_an_eighth_of_the_best_unless_it_misses_none(
    monkeypatch, num_pairs, is_whole, is_left
):
    """After so many pairs a single one is better; only with that one kept does another become so."""
    monkeypatch.setattr(module, "NUM_KNOWN_CANDIDATES", 2 * num_pairs)
    monkeypatch.setattr(module, "NUM_POOLED", 100 if is_whole else num_pairs + 2)
    left_out = [10.0] * num_pairs + [5.0, -20.0] + [-30.0] * 5
    kept = [0.0] * num_pairs + [1.0, 9.0] + [30.0] * 5
    one, other = num_pairs, num_pairs + 1
    own_N, start_N = torch.tensor([*left_out, *kept]).double(), torch.arange(2 * len(kept)) >= len(kept)
    interaction_NN = torch.zeros(len(own_N), len(own_N), dtype=torch.float64)
    interaction_NN[one, other] = interaction_NN[other, one] = 40.0
    asked = []

    def gains(mask_N):
        asked.append(mask_N)
        return own_N + interaction_NN @ mask_N.double()

    mask_N, value = polish(
        start_N,
        values=lambda masks_RN: torch.stack([m @ own_N + m @ interaction_NN @ m / 2 for m in masks_RN.double()]),
        gains=gains,
        interactions=lambda rows_P: lambda places, others: interaction_NN[rows_P][:, rows_P][places][:, others],
    )
    assert mask_N[: other + 1].all()
    assert not mask_N[len(kept) : len(kept) + other + 1].any()
    assert value == 10.0 * num_pairs + 5.0 - 20.0 + 40.0 + 150.0
    second_N = [*asked, mask_N][1]
    assert bool(second_N[one])
    assert bool(second_N[other]) is not is_left
