import itertools
import resource
from collections import Counter

import numpy as np
import pytest
import torch

from datamask_pl.functional.rollouts import plackett_luce
from datamask_pl.functional.rollouts.plackett_luce import draw_group, log_prob, masks_of, score
from tests.support import oracles
from tests.support.tiers import only


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(logits_N: torch.Tensor, num_selected: int, *, generator: torch.Generator) -> torch.Tensor:
    return draw_group(logits_N, num_selected, generators=[generator]).draws_RK[0]


def logits_of(num_samples: int, seed: int, scale: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=num_samples)


@pytest.mark.parametrize(
    ("num_samples", "num_selected"),
    [(4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(3, 1), (4, 4), (5, 3)])],
)
def test_draws_are_as_frequent_as_enumeration_says(num_samples, num_selected):
    logits_N = logits_of(num_samples, 0, scale=1.0)
    num_draws = 12_000
    source = generator()
    counts = Counter(
        tuple(draw(torch.tensor(logits_N), num_selected, generator=source).tolist()) for _ in range(num_draws)
    )
    outcomes = oracles.enumerate_draws(logits_N, num_selected)
    assert sum(counts[order] for order, _ in outcomes) == num_draws
    chi_square = sum((counts[order] - num_draws * p) ** 2 / (num_draws * p) for order, p in outcomes)
    degrees = len(outcomes) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("log_time", only(-4.0, 0.5, of=[-4.0, -1.2, -0.3, 0.5, 2.0]))
def test_no_time_by_which_clocks_are_told_apart_changes_the_law(log_time, monkeypatch):
    """The time is a matter of speed: where fewer than K clocks ring before it, all are looked at."""
    monkeypatch.setattr(plackett_luce, "_safe_log_time", lambda *_: log_time)
    test_draws_are_as_frequent_as_enumeration_says(4, 2)


@pytest.mark.parametrize("num_selected", [1, 2])
def test_draws_from_many_are_as_frequent_as_enumeration_says(num_selected):
    """60 samples are enough for most of them not to be looked at closely."""
    logits_N = logits_of(60, 0, scale=1.0)
    assert np.isfinite(plackett_luce._safe_log_time(torch.tensor(logits_N), num_selected))
    num_draws = 6_000
    draws_RK = draw_group(torch.tensor(logits_N), num_selected, generators=[generator()] * num_draws).draws_RK
    for position, probability_N in enumerate(
        ([p for _, p in oracles.enumerate_draws(logits_N, 1)], second_of(logits_N))[:num_selected]
    ):
        expected_N = num_draws * np.array(probability_N)
        counts_N = np.bincount(draws_RK[:, position].numpy(), minlength=60)
        assert ((counts_N - expected_N) ** 2 / expected_N).sum() < 59 + 4 * (2 * 59) ** 0.5


def second_of(logits_N: np.ndarray) -> np.ndarray:
    """Probability that each sample is drawn second."""
    probability_N = np.zeros(len(logits_N))
    for rows, probability in oracles.enumerate_draws(logits_N, 2):
        probability_N[rows[1]] += probability
    return probability_N


@pytest.mark.parametrize("num_selected", [1, 4, 30])
def test_the_last_clock_rings_when_the_order_statistics_of_exponentials_say(num_selected):
    group = draw_group(torch.full((200,), 0.7), num_selected, generators=[generator()] * 2000)
    expected = sum(1 / (200 - index) for index in range(num_selected)) / np.exp(np.float32(0.7))
    times_R = group.log_times_R.exp()
    assert abs(float(times_R.mean()) - expected) < 4 * float(times_R.std()) / 2000**0.5


def test_a_draw_of_a_group_depends_on_its_own_generator_alone():
    logits_N = torch.randn(500, generator=generator())
    together = draw_group(logits_N, 50, generators=[generator(seed) for seed in (3, 1, 2)]).draws_RK
    alone = [draw(logits_N, 50, generator=generator(seed)) for seed in (3, 1, 2)]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize(("num_samples", "num_selected"), [(1, 1), (2, 1), (4, 2), (5, 5), (6, 3)])
def test_log_prob_is_that_of_enumeration(num_samples, num_selected):
    logits_N = logits_of(num_samples, 1)
    outcomes = oracles.enumerate_draws(logits_N, num_selected)
    log_prob_R = log_prob(torch.tensor(logits_N), torch.tensor([order for order, _ in outcomes]))
    np.testing.assert_allclose(log_prob_R.exp(), [p for _, p in outcomes], rtol=1e-12)
    assert float(log_prob_R.exp().sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("num_samples", "num_selected"), [(1, 1), (2, 1), (4, 2), (5, 5), (6, 3)])
def test_score_is_the_gradient_of_the_naive_formula(num_samples, num_selected):
    logits_N = logits_of(num_samples, 2)
    draws = list(itertools.permutations(range(num_samples), num_selected))
    expected_RN = np.stack([oracles.log_prob_gradient(logits_N, order) for order in draws])
    np.testing.assert_allclose(score(torch.tensor(logits_N), torch.tensor(draws)), expected_RN, atol=1e-12)


@pytest.mark.parametrize("num_selected", [1, 3, 5])
def test_log_prob_itself_can_be_differentiated(num_selected):
    draws_RK = torch.stack([draw(torch.zeros(5), num_selected, generator=generator(seed)) for seed in range(4)])
    logits_N = torch.tensor(logits_of(5, 3), requires_grad=True)
    (gradient_N,) = torch.autograd.grad(log_prob(logits_N, draws_RK).sum(), logits_N)
    np.testing.assert_allclose(gradient_N, score(logits_N, draws_RK).sum(0), atol=1e-12)


def test_the_expected_score_is_zero():
    logits_N = logits_of(5, 4)
    outcomes = oracles.enumerate_draws(logits_N, 3)
    score_RN = score(torch.tensor(logits_N), torch.tensor([order for order, _ in outcomes]))
    expected_N = torch.tensor([p for _, p in outcomes], dtype=torch.float64) @ score_RN
    np.testing.assert_allclose(expected_N, 0.0, atol=1e-12)


@pytest.mark.parametrize("gap", [0.0, 1.0, 120.0, 1000.0])
def test_scores_of_a_draw_sum_to_zero(gap):
    """A constant added to all logits changes no probability."""
    logits_N = torch.randn(500, generator=generator(), dtype=torch.float64) + gap * (torch.arange(500) % 3)
    draws_RK = torch.stack([draw(logits_N, 100, generator=generator(seed)) for seed in range(5)])
    score_RN = score(logits_N, draws_RK)
    assert torch.isfinite(score_RN).all()
    np.testing.assert_allclose(score_RN.sum(1), 0.0, atol=1e-9)


@pytest.mark.parametrize("gap", [120.0, 1000.0])
@pytest.mark.parametrize("num_selected", [1, 2, 4])
def test_score_and_log_prob_survive_gaps_that_exp_does_not(gap, num_selected):
    """torch #48841: with a gap of 120, probabilities underflow."""
    logits_N = np.array([0.0, gap, -gap, gap - 1.0])
    draws = list(itertools.permutations(range(4), num_selected))
    expected_R = [float(oracles.log_prob_of_draw(torch.tensor(logits_N), order)) for order in draws]
    expected_RN = np.stack([oracles.log_prob_gradient(logits_N, order) for order in draws])
    np.testing.assert_allclose(log_prob(torch.tensor(logits_N), torch.tensor(draws)), expected_R, rtol=1e-12)
    np.testing.assert_allclose(score(torch.tensor(logits_N), torch.tensor(draws)), expected_RN, atol=1e-9)


@pytest.mark.parametrize("gap", [120.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_samples_are_never_drawn(gap, dtype):
    """torch #48841: multinomial drew samples of probability zero two times in three."""
    logits_N = torch.full((1000,), -gap, dtype=dtype)
    possible = torch.arange(0, 1000, 10)
    logits_N[possible] = 0.0
    for seed in range(50):
        rows_K = draw(logits_N, 100, generator=generator(seed))
        assert torch.equal(rows_K.sort().values, possible)


def test_when_the_possible_run_out_the_impossible_follow():
    logits_N = torch.tensor([0.0, -1000.0, 0.0, -2000.0])
    for seed in range(50):
        assert draw(logits_N, 4, generator=generator(seed)).tolist()[2:] == [1, 3]


@pytest.mark.parametrize(("num_samples", "num_selected"), [(1, 1), (7, 7), (7, 6), (5000, 1), (5000, 4999)])
def test_a_draw_is_exactly_k_different_rows(num_samples, num_selected):
    rows_K = draw(torch.zeros(num_samples), num_selected, generator=generator())
    assert rows_K.dtype == torch.int64
    assert rows_K.unique().numel() == num_selected == rows_K.numel()


@pytest.mark.slow
def test_more_than_2_to_the_24_samples_can_be_drawn_from():
    """torch #2576: multinomial stops at 2^24 categories."""
    num_samples = 2**24 + 1
    logits_N = torch.zeros(num_samples)
    logits_N[-1] = 50.0
    rows_K = draw(logits_N, 3, generator=generator())
    assert rows_K[0] == num_samples - 1
    assert rows_K.unique().numel() == 3


# with 10 of 2000 a draw looks at the early clocks alone; with 900, and of 20 samples, at all
@pytest.mark.parametrize(("num_samples", "num_selected"), [(2000, 10), (2000, 900), (20, 3)])
def test_randomness_is_the_generators_alone_and_all_of_it_is_used(num_samples, num_selected):
    logits_N = torch.randn(num_samples, generator=torch.Generator().manual_seed(1))
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(draw_group(logits_N, num_selected, generators=[torch.Generator().manual_seed(7)]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0].draws_RK, found[1].draws_RK)
    assert torch.equal(found[0].log_times_R, found[1].log_times_R)
    assert found[0].log_times_R.dtype == torch.float64


def test_late_clocks_are_of_the_generator_too(monkeypatch):
    """Where fewer than K have rung by the time that tells clocks apart."""
    monkeypatch.setattr(plackett_luce, "_safe_log_time", lambda *_: -9.0)
    test_randomness_is_the_generators_alone_and_all_of_it_is_used(50, 10)


def test_large_draws_need_no_table_of_samples_by_draws():
    """200,000 x 50,000 booleans would be 10 GB."""
    logits_N = torch.randn(200_000, generator=generator())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draws_RK = draw(logits_N, 50_000, generator=generator())[None]
    score_RN = score(logits_N, draws_RK)
    assert torch.isfinite(log_prob(logits_N, draws_RK)).all()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert grown_mib < 200
    assert abs(float(score_RN.sum())) < 1e-6


def test_the_same_seed_gives_the_same_draw_and_another_seed_another():
    logits_N = torch.randn(1000, generator=generator())
    first, again, other = (draw(logits_N, 100, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_drawing_and_scoring_leave_a_parameter_and_its_graph_alone():
    logits_N = torch.nn.Parameter(torch.randn(20, generator=generator()))
    before_N = logits_N.detach().clone()
    draws_RK = draw(logits_N, 5, generator=generator())[None]
    assert not score(logits_N, draws_RK).requires_grad
    assert torch.equal(logits_N.detach(), before_N)


def test_masks_keep_what_was_drawn():
    assert masks_of(torch.tensor([[2, 0], [1, 2]]), 4).tolist() == [
        [True, False, True, False],
        [False, True, True, False],
    ]
