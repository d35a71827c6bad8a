import numpy as np
import oracles
import problems
import pytest
import torch

from datamask_pl.functional import multilinear, rounding
from datamask_pl.functional.rounding import first_largest, polish, spread_out, top_k_mask
from datamask_pl.joint_objective import JointObjective

SCALES = torch.ones(2, dtype=torch.float64)


class Solver:
    """A block solved by the multilinear method, with what `polish` needs."""

    def __init__(self, features_ND, num_selected, *, kind, quality_weight, quality_N):
        self.ground = problems.ground_set(features_ND, num_selected, quality_N=quality_N)
        self.objective = JointObjective(quality_weight=quality_weight, diversity=problems.DIVERSITIES[kind])

    def values(self, masks_RN):
        return self.objective.combine(self.objective.term_values(masks_RN, self.ground), SCALES)

    def gains(self, mask_N):
        return self.objective.linearize(mask_N.double(), self.ground, SCALES)[0].gradient_N

    def interactions(self, rows_P):
        pool = self.ground.part(rows_P)
        return lambda places, others: self.objective.interactions(places, others, pool, SCALES)

    def top_k(self, num_steps=20):
        logits_N = torch.zeros(self.ground.num_samples, dtype=torch.float64)
        for step in range(num_steps):
            p_N = multilinear.inclusion_probabilities(logits_N, self.ground.num_selected)
            gradient_N = self.objective.linearize(p_N, self.ground, SCALES)[0].gradient_N
            logits_N += (1.0 - 0.9 * step / (num_steps - 1)) * multilinear.ascent_direction(gradient_N, p_N)
        return top_k_mask(logits_N, self.ground.num_selected)


def random_solver(kind, seed, *, num_samples=None):
    rng = np.random.default_rng(seed)
    num_samples = num_samples or int(rng.integers(4, 11))
    num_selected = int(rng.integers(1, num_samples // 2 + 1))
    features_ND = problems.unit_rows(num_samples, int(rng.choice([3, 6])), seed)
    quality_N, quality_weight = problems.qualities(num_samples, seed), float(rng.choice([0.0, 0.3]))
    solver = Solver(features_ND, num_selected, kind=kind, quality_weight=quality_weight, quality_N=quality_N)
    oracle = oracles.objective(kind, features_ND, quality_N, num_selected=num_selected, quality_weight=quality_weight)
    return solver, oracle


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
        solver, oracle = random_solver(kind, seed)
        mask_N, value = polish(solver.top_k(), values=solver.values, gains=solver.gains)
        num_samples, num_selected = solver.ground.num_samples, solver.ground.num_selected
        values = [oracle(any_N) for any_N in oracles.masks_of_size(num_samples, num_selected)]
        assert int(mask_N.sum()) == num_selected
        assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)
        assert value - np.mean(values) >= 0.99 * (max(values) - np.mean(values)) - 1e-9


@pytest.mark.parametrize("kind", problems.DIVERSITIES)
@pytest.mark.parametrize("has_features", [True, False])
def test_exchanges_keep_the_budget_and_never_lose(monkeypatch, kind, has_features):
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    num_improved = 0
    for seed in range(6):
        solver, oracle = random_solver(kind, seed, num_samples=24)
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
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_SINGLES", 24)
    for seed in range(4):
        solver, oracle = random_solver(kind, seed, num_samples=12)
        mask_N, value = polish(solver.top_k(), values=solver.values, gains=solver.gains)
        for added in np.flatnonzero(~mask_N.numpy()):
            for removed in np.flatnonzero(mask_N.numpy()):
                trial_N = mask_N.numpy().copy()
                trial_N[added], trial_N[removed] = True, False
                assert oracle(trial_N) <= value + 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exchange_ends_where_none_is_better_however_strong_the_interactions(dtype):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        interaction_CC = rng.standard_normal((30, 30)).astype(dtype) * rng.choice([0.1, 1.0, 3.0])
        interaction_CC = np.triu(interaction_CC, 1) + np.triu(interaction_CC, 1).T
        gain_C = rng.standard_normal(30)  # of the start, with what the interactions with its members add
        is_kept_C = rng.permutation(30) < rng.integers(1, 30)
        own_C = gain_C - interaction_CC.astype(float) @ is_kept_C

        def worth(mask_C, own_C=own_C, interaction_CC=interaction_CC):
            return own_C @ mask_C + mask_C @ interaction_CC.astype(float) @ mask_C / 2

        found_C = rounding.exchange(is_kept_C, gain_C, interaction_CC)
        assert found_C.sum() == is_kept_C.sum()
        assert worth(found_C) >= worth(is_kept_C)
        for added in np.flatnonzero(~found_C):
            for removed in np.flatnonzero(found_C):
                trial_C = found_C.copy()
                trial_C[added], trial_C[removed] = True, False
                assert worth(trial_C) <= worth(found_C) + 1e-5


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("num_candidates", [3, 24])
def test_with_interactions_no_exchange_at_all_is_better_and_the_value_is_the_masks(monkeypatch, kind, num_candidates):
    """With 3 candidates on either side it takes rounds, and single exchanges beyond them are not looked at."""
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", num_candidates)
    num_improved = 0
    for seed in range(6):
        solver, oracle = random_solver(kind, seed, num_samples=18)
        start_N = torch.tensor(problems.random_masks(1, 18, solver.ground.num_selected, seed)[0])
        before_N = start_N.clone()
        mask_N, value = polish(
            start_N, values=solver.values, gains=solver.gains, interactions=solver.interactions, features=None
        )
        assert torch.equal(start_N, before_N)
        assert int(mask_N.sum()) == solver.ground.num_selected
        assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)
        assert value >= oracle(start_N.numpy()) - 1e-12
        num_improved += value > oracle(start_N.numpy()) + 1e-9
        if num_candidates < 18:
            continue
        gain = float(solver.gains(mask_N).abs().max())
        for added in np.flatnonzero(~mask_N.numpy()):
            for removed in np.flatnonzero(mask_N.numpy()):
                trial_N = mask_N.numpy().copy()
                trial_N[added], trial_N[removed] = True, False
                assert oracle(trial_N) <= value + 2 * rounding.RELATIVE_ROUNDING * gain
    assert num_improved >= 3, "nothing was exchanged: the test shows nothing"


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("num_pooled", [6, 30])
@pytest.mark.parametrize("pool_chunk", [4, 4096])
def test_the_gains_of_the_pool_follow_what_is_exchanged(monkeypatch, kind, num_pooled, pool_chunk):
    """Gains are asked for once; at the end no exchange of the best candidates, by gains found anew, is better."""
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", 4)  # 2 as long as there is something to exchange
    monkeypatch.setattr(rounding, "LEAST_SHARE_MOVED", 10**6)
    monkeypatch.setattr(rounding, "NUM_POOLED", num_pooled)
    monkeypatch.setattr(rounding, "POOL_CHUNK", pool_chunk)
    num_moved = []
    for seed in range(5):
        solver, oracle = random_solver(kind, seed, num_samples=40)
        num_selected = solver.ground.num_selected
        start_N = torch.tensor(problems.random_masks(1, 40, num_selected, seed)[0])
        pool = torch.cat(rounding.candidates(start_N, solver.gains(start_N), num_pooled))
        mask_N, value = polish(
            start_N, values=solver.values, gains=solver.gains, interactions=solver.interactions, max_rounds=1
        )
        assert value == pytest.approx(oracle(mask_N.numpy()), abs=1e-9)
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
                assert oracle(trial_N) <= value + 2 * rounding.RELATIVE_ROUNDING * float(gain_N.abs().max())
    assert max(num_moved) > 2, "the first candidates were all there was: the test shows nothing"


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
def test_gains_are_asked_for_again_unless_no_other_sample_can_be_a_candidate(monkeypatch, kind):
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", 4)
    for num_pooled, is_once in ((6, False), (100, True)):
        monkeypatch.setattr(rounding, "NUM_POOLED", num_pooled)
        num_asked = []
        for seed in range(4):
            solver, _ = random_solver(kind, seed, num_samples=60)
            start_N = torch.tensor(problems.random_masks(1, 60, solver.ground.num_selected, seed)[0])
            asked = []

            def gains(mask_N, solver=solver, asked=asked):
                asked.append(mask_N)
                return solver.gains(mask_N)

            _, value = polish(start_N, values=solver.values, gains=gains, interactions=solver.interactions)
            assert value > float(solver.values(start_N[None])[0])
            num_asked.append(len(asked))
        assert (max(num_asked) == 1) if is_once else (min(num_asked) > 1), num_asked


def test_a_sample_outside_the_pool_is_missed_only_if_it_could_have_changed_enough(monkeypatch):
    monkeypatch.setattr(rounding, "NUM_POOLED", 3)
    pooled, last = torch.tensor([5.0, 4.0, 3.0]), torch.tensor([5.0, 4.5])
    assert not rounding._may_miss(pooled, last, torch.tensor(1.4))
    assert rounding._may_miss(pooled, last, torch.tensor(1.5))
    assert not rounding._may_miss(pooled[:2], last, torch.tensor(9.0)), "all samples are in the pool"


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("unit", [2.0**-30, 2.0**30])
def test_the_unit_of_the_objective_decides_nothing(monkeypatch, kind, unit):
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", 4)
    monkeypatch.setattr(rounding, "NUM_POOLED", 6)
    for seed in range(4):
        solver, _ = random_solver(kind, seed, num_samples=60)
        start_N = torch.tensor(problems.random_masks(1, 60, solver.ground.num_selected, seed)[0])

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


@pytest.mark.parametrize("num_levels", [2, 9, 10_000])
@pytest.mark.parametrize("count", [1, 7, 299, 300, 400])
def test_the_first_largest_are_those_of_a_stable_sort(count, num_levels):
    values_N = np.random.default_rng(0).integers(0, num_levels, size=300).astype(float)
    expected = np.argsort(-values_N, kind="stable")[:count]
    assert first_largest(torch.tensor(values_N), count).tolist() == expected.tolist()


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


def test_exchange_finds_what_the_best_single_gain_does_not():
    """The best to add interacts with all that could go; only the second best is worth an exchange."""
    interaction_CC = np.zeros((4, 4))
    interaction_CC[0, 2:] = interaction_CC[2:, 0] = 5.0
    is_kept_C = np.array([False, False, True, True])
    gain_C = np.array([4.0, 3.0, 1.0, 2.0])
    assert rounding.exchange(is_kept_C, gain_C, interaction_CC).tolist() == [False, True, False, True]
    assert is_kept_C.tolist() == [False, False, True, True]


@pytest.mark.parametrize("max_enumerated", [0, 16])
@pytest.mark.parametrize("proxy", ["constant", "misleading"])
def test_any_proxy_of_the_gains_is_safe(monkeypatch, max_enumerated, proxy):
    monkeypatch.setattr(rounding, "MAX_ENUMERATED_SAMPLES", max_enumerated)
    solver, oracle = random_solver("disf", 3, num_samples=14)
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
        monkeypatch.setattr(rounding, name, number)
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


def test_where_the_first_half_of_the_candidates_has_no_better_exchange_the_others_are_tried(monkeypatch):
    """The two that gain most are like all that is kept; only the third is worth an exchange."""
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", 4)
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
    monkeypatch.setattr(rounding, "NUM_KNOWN_CANDIDATES", 4)
    asked = []
    monkeypatch.setattr(rounding, "_may_miss", lambda *numbers: asked.append(numbers))
    num_moved = 0
    for seed in range(4):
        solver, _ = random_solver(kind, seed, num_samples=30)
        start_N = torch.tensor(problems.random_masks(1, 30, solver.ground.num_selected, seed)[0])
        mask_N, _ = polish(start_N, values=solver.values, gains=solver.gains, interactions=solver.interactions)
        num_moved += int((mask_N != start_N).sum())
        before_N, after_N = solver.gains(start_N), solver.gains(mask_N)
        for sign, is_side, (pooled, last, change) in zip((1, -1), (False, True), asked[-2:], strict=True):
            first, now = sign * before_N[start_N == is_side], sign * after_N[mask_N == is_side]
            torch.testing.assert_close(pooled.sort().values, first.sort().values)
            torch.testing.assert_close(last, now.sort(descending=True).values[:4])
            torch.testing.assert_close(change, (after_N - before_N).abs().max())
    assert num_moved > 8, "hardly anything was exchanged: the test shows nothing"
