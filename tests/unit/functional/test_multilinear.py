import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamask_pl.functional import multilinear
from datamask_pl.functional.multilinear import (
    ascent_direction,
    entropy_share,
    inclusion_probabilities,
    solve_threshold,
)


def normal(num_samples: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("logits_N", "num_selected"),
    [
        pytest.param(torch.tensor([0.0, 1000.0]), 1, id="two-samples-far-apart"),
        pytest.param(torch.tensor([0.0, 0.0]), 1, id="two-equal-samples"),
        pytest.param(torch.tensor([3.0]), 1, id="one-sample"),
        pytest.param(torch.tensor([-1000.0, 0.0, 0.0, 1000.0]), 2, id="a-tie-at-the-threshold"),
        pytest.param(torch.cat([torch.zeros(5), torch.full((5,), 1e3)]), 4, id="cut-within-the-upper-group"),
        pytest.param(torch.cat([torch.zeros(5), torch.full((5,), 1e3)]), 5, id="cut-within-the-gap"),
        pytest.param(torch.cat([torch.zeros(5), torch.full((5,), 1e3)]), 6, id="cut-within-the-lower-group"),
        pytest.param(normal(1000, 1e3), 1, id="keep-one"),
        pytest.param(normal(600_000), 60_000, id="more-than-sixteen-times-the-sample"),
        pytest.param(normal(1000, 1e3), 999, id="leave-one"),
        pytest.param(normal(1000, 1e3), 1000, id="keep-all"),
        pytest.param(normal(100_000, 1e3), 10_000, id="many"),
        pytest.param(normal(100_000, 1e-3), 1, id="one-of-many"),
        pytest.param(normal(1000) + 1e6, 100, id="far-from-zero"),
    ],
)
def test_probabilities_add_up_to_the_budget(logits_N, num_selected):
    p_N = inclusion_probabilities(logits_N, num_selected)
    assert p_N.dtype == torch.float64
    assert bool(((p_N >= 0) & (p_N <= 1)).all())
    assert float(p_N.sum()) == pytest.approx(num_selected, abs=1e-9 * max(1, num_selected))


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(data=st.data(), num_samples=st.integers(2, 30))
def test_probabilities_add_up_to_the_budget_and_rise_with_the_logits(data, num_samples):
    logits_N = torch.tensor(data.draw(st.lists(st.floats(-1e4, 1e4), min_size=num_samples, max_size=num_samples)))
    num_selected = data.draw(st.integers(1, num_samples))
    p_N = inclusion_probabilities(logits_N, num_selected)
    assert float(p_N.sum()) == pytest.approx(num_selected, abs=1e-9 * num_selected)
    # 1e-15: a vectorised sigmoid and that of the last few elements differ in the last bit
    assert bool((p_N[logits_N.argsort()].diff() >= -1e-15).all())
    assert 0.0 <= float(entropy_share(p_N, num_selected)) <= 1.0


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("num_selected", [1, 2_000, 99_990])
def test_the_sum_over_all_logits_is_taken_a_few_times_only(scale, num_selected):
    """Some of the logits tell roughly where the threshold is."""
    logits_N = normal(100_000, scale)
    num_passes = 0

    def over_slices(part):
        nonlocal num_passes
        num_passes += 1
        return torch.stack([part(slice(0, 40_000)), part(slice(40_000, 100_000))])

    p_N = inclusion_probabilities(logits_N, num_selected, over_slices=over_slices)
    assert float(p_N.sum()) == pytest.approx(num_selected, abs=1e-9 * max(1, num_selected))
    assert num_passes <= 5 + 5 * (num_selected in (1, 99_990))


@pytest.mark.parametrize("num_samples", [100_000, 600_000])
@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_from_where_some_of_the_logits_lead_the_sum_over_all_is_taken_twice(num_samples, scale, share):
    """From elsewhere it takes up to five times."""
    passes = []

    def over_slices(part):
        passes.append(part(slice(None)))
        return passes[-1][None]

    solve_threshold(normal(num_samples, scale), int(share * num_samples), over_slices=over_slices)
    assert len(passes) <= 2


def test_everything_is_kept_at_a_threshold_of_minus_infinity():
    assert float(solve_threshold(torch.tensor([1.0, -1e30]), 2)) == -np.inf
    assert inclusion_probabilities(torch.tensor([1.0, -1e30]), 2).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("num_selected", [1, 50, 500, 999])
def test_a_constant_added_to_the_logits_changes_nothing(num_selected):
    logits_N = normal(1000, 5.0).double()
    shifted_N = inclusion_probabilities(logits_N + 7.0, num_selected)
    np.testing.assert_allclose(shifted_N, inclusion_probabilities(logits_N, num_selected), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_direction_has_root_mean_square_one_and_keeps_the_budget(seed):
    p_N = inclusion_probabilities(normal(500, 3.0, seed), 50)
    gradient_N = normal(500, 10.0**-seed, seed + 1).double()
    direction_N = ascent_direction(gradient_N, p_N)
    assert float(direction_N.square().mean().sqrt()) == pytest.approx(1.0, abs=1e-12)
    assert float((p_N * (1 - p_N) * direction_N).sum()) == pytest.approx(0.0, abs=1e-9)
    # a larger gradient is a larger step
    assert torch.equal(direction_N.argsort(), gradient_N.argsort())
    in_slices_N = ascent_direction(
        gradient_N, p_N, over_slices=lambda part: torch.stack([part(slice(0, 200)), part(slice(200, 500))])
    )
    torch.testing.assert_close(in_slices_N, direction_N, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7])
@pytest.mark.parametrize("p", [0.1, 0.0, 1.0])
def test_equal_gradients_give_no_direction(value, p):
    gradient_N = torch.full((1001,), value, dtype=torch.float64)
    direction_N = ascent_direction(gradient_N, torch.full_like(gradient_N, p))
    assert not direction_N.any()


def test_a_settled_mask_still_has_a_direction():
    """p (1 - p) is 0 everywhere: nothing saturates, so a sample can still change its mind."""
    p_N = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    direction_N = ascent_direction(torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64), p_N)
    assert torch.isfinite(direction_N).all()
    assert direction_N[0] > direction_N[2] > direction_N[1]
    assert float(entropy_share(p_N, 1)) == 0.0


def one_step(monkeypatch, logits_N: torch.Tensor, target: float, start: float) -> float:
    """Where a single step from the start leads."""
    with monkeypatch.context() as patch:
        patch.setattr(multilinear, "MAX_STEPS", 1)
        return multilinear._find_root(
            lambda threshold: multilinear._sums(logits_N, threshold), target, logits_N.numel(),
            start=start, bracket=(-50.0, 50.0), negligible_step=0.0,
        )  # fmt: skip


@pytest.mark.parametrize("off", [0.3, -0.3, 0.1, -0.1, 0.03])
def test_near_the_root_a_step_leaves_the_cube_of_what_was_missing(monkeypatch, off):
    for seed in range(5):
        logits_N = normal(200, 2.0, seed).double()
        root = float(solve_threshold(logits_N, 40))
        assert abs(one_step(monkeypatch, logits_N, 40.0, root + off) - root) <= abs(off) ** 3 / 2


@pytest.mark.parametrize("off", [0.7, 2.0, 5.0, -5.0, 20.0])
def test_far_from_the_root_a_step_along_the_log_odds_finds_that_of_equal_logits(monkeypatch, off):
    logits_N = torch.full((3,), 0.25, dtype=torch.float64)
    root = 0.25 + np.log(2.0)
    assert one_step(monkeypatch, logits_N, 1.0, root + off) == pytest.approx(root, abs=1e-9)


@pytest.mark.parametrize("start", [-49.0, -36.5, -10.0, 0.0, 10.0, 36.5, 49.0])
def test_the_root_is_found_from_anywhere_also_where_all_or_nothing_but_a_rounding_is_kept(start):
    """At -36.5 the first sample is not settled, and the sum is 10 for rounding."""
    logits_N = torch.tensor([0.0, *[100.0] * 9]).double()
    found = multilinear._find_root(
        lambda threshold: multilinear._sums(logits_N, threshold), 9.5, 10,
        start=start, bracket=(-50.0, 50.0), negligible_step=1e-4,
    )  # fmt: skip
    assert found == pytest.approx(0.0, abs=1e-9)


def test_where_everything_is_kept_the_threshold_is_minus_infinity_in_float64():
    threshold = solve_threshold(torch.zeros(3), 3)
    assert threshold.dtype == torch.float64
    assert float(threshold) == -np.inf


def in_parts(edges):
    """Slices between the edges, as if they were of several ranks."""
    taken = []

    def over_slices(part):
        taken.append([part(slice(*pair)) for pair in itertools.pairwise(edges)])
        return torch.stack(taken[-1])

    return over_slices, taken


def test_sums_are_taken_over_the_slices_that_are_given_also_empty_ones():
    logits_N, gradient_N = normal(50).double(), normal(50, seed=1).double()
    over_slices, taken = in_parts([0, 20, 20, 50])
    p_N = inclusion_probabilities(logits_N, 7, over_slices=over_slices)
    assert taken
    assert torch.allclose(p_N, inclusion_probabilities(logits_N, 7), rtol=1e-9)
    taken.clear()
    direction_N = ascent_direction(gradient_N, p_N, over_slices=over_slices)
    assert len(taken) == 1
    assert torch.allclose(direction_N, ascent_direction(gradient_N, p_N))


def test_all_rows_as_one_slice_are_asked_for_by_a_slice():
    asked = []
    rows_N = torch.arange(5)
    stacked_RN = multilinear.in_one_slice(lambda rows: asked.append(rows) or rows_N[rows])
    assert stacked_RN.tolist() == [[0, 1, 2, 3, 4]]
    assert asked == [slice(None)]


@pytest.mark.parametrize("row", [0, 500_000])
@pytest.mark.parametrize("level", [0.0, 0.7])
def test_one_sample_of_a_million_that_differs_gives_a_direction(row, level):
    gradient_N, p_N = torch.full((1_000_000,), level).double(), torch.full((1_000_000,), 0.1).double()
    gradient_N[row] += 1e-6
    direction_N = ascent_direction(gradient_N, p_N)
    assert float(direction_N.square().mean()) == pytest.approx(1.0, rel=1e-5)
    assert int(direction_N.argmax()) == row


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_of_a_few_nearly_settled_samples_the_direction_keeps_the_budget_in_any_unit(unit):
    p_N, gradient_N = torch.tensor([0.1, 0.1, 0.8]).double(), torch.tensor([1.0, 2.0, 5.0]).double()
    direction_N = ascent_direction(unit * gradient_N, p_N)
    assert float((p_N * (1 - p_N)).dot(direction_N)) == pytest.approx(0.0, abs=1e-12)
    assert float(direction_N.square().mean()) == pytest.approx(1.0)
    assert torch.allclose(direction_N, ascent_direction(gradient_N, p_N))


def test_gradients_that_differ_by_rounding_give_no_direction_nor_does_one_alone():
    gradient_N = 0.7 + torch.tensor([0.0, 1e-15, -1e-15, 2e-15]).double()
    assert ascent_direction(gradient_N, torch.full((4,), 0.5).double()).tolist() == [0.0] * 4
    assert ascent_direction(torch.tensor([3.0]).double(), torch.ones(1).double()).tolist() == [0.0]


def test_undecided_is_what_variance_there_is_for_a_kept_sample():
    p_N = torch.tensor([0.5, 0.25, 0.25, 1.0]).double()
    assert float(entropy_share(p_N, 2)) == pytest.approx(float((p_N * (1 - p_N)).sum()) / 2)
    assert float(entropy_share(torch.ones(3).double(), torch.tensor(3 - 1e-12, dtype=torch.float64))) == 0.0
