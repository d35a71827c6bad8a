from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.errors import BadRowError, BudgetError, ConfigError
from datamask_pl.evidence.baselines.batches import batched_disf, leverage_scores, random_batches
from datamask_pl.evidence.baselines.greedy import top_quality_mask
from tests.support import oracles
from tests.support.baseline_problems import generator, problem

BATCHED = {"disf": batched_disf, "leverage": leverage_scores}
WEIGHTS = [0.0, 0.3, 1.0]


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_batches_deal_every_sample_once_and_spend_the_budget(num_samples, batch_size, data):
    num_selected = data.draw(st.integers(1, num_samples))
    batches = list(random_batches(num_samples, num_selected, batch_size, generator(0)))
    rows = torch.cat([rows for rows, _ in batches])
    assert len(set(rows.tolist())) == len(rows)
    assert sum(kept for _, kept in batches) == num_selected
    for rows, kept in batches:
        assert 1 <= kept <= len(rows) <= batch_size
        assert abs(kept - len(rows) * num_selected / num_samples) < 1
    if num_selected == num_samples:
        assert sorted(torch.cat([rows for rows, _ in batches]).tolist()) == list(range(num_samples))


@pytest.mark.parametrize("quality_weight", WEIGHTS)
@pytest.mark.parametrize(("num_samples", "num_selected"), [(1, 1), (9, 1), (12, 7), (5, 5)])
def test_one_batch_of_disf_is_naive_greedy(quality_weight, num_samples, num_selected):
    for seed in range(3):
        features, quality = problem(num_samples, 4, seed)
        value = oracles.objective(
            "disf", features.numpy(), quality.numpy(), num_selected=num_selected, quality_weight=quality_weight
        )
        kwargs = {"num_selected": num_selected, "quality_weight": quality_weight, "generator": generator(seed)}
        found = batched_disf(features, quality, **kwargs)
        np.testing.assert_array_equal(found.numpy(), oracles.naive_greedy(num_samples, num_selected, value))


@pytest.mark.parametrize("quality_weight", [0.0, 0.9, 1.0])
def test_one_batch_of_published_disf_is_greedy_on_correlations(quality_weight):
    for seed in range(4):
        features, quality = problem(14, 3, seed)
        first = int(torch.randint(14, (), generator=after_permutation(14, seed)))
        chosen = [first]
        while len(chosen) < 8:
            scores = [
                f_by_correlations(features, quality, [*chosen, row], quality_weight) if row not in chosen else -np.inf
                for row in range(14)
            ]
            chosen.append(int(np.argmax(scores)))
        kwargs = {"num_selected": 8, "quality_weight": quality_weight, "generator": generator(seed)}
        found = batched_disf(features, quality, standardize=True, **kwargs)
        assert found.nonzero().flatten().tolist() == sorted(chosen)


def after_permutation(num_samples, seed):
    drawn = generator(seed)
    torch.randperm(num_samples, generator=drawn)
    return drawn


def f_by_correlations(features, quality, rows, quality_weight):
    # Two samples have correlations of 1 and -1 whichever they are: what is added to the variances decides.
    covariance = np.cov(features[rows].numpy().T)
    deviation = np.sqrt(np.diag(covariance) + 1e-8)
    correlation = covariance / np.outer(deviation, deviation)
    off_diagonal = np.sum(correlation**2) - np.sum(np.diag(correlation) ** 2)
    return quality_weight * float(quality[rows].mean()) - (1 - quality_weight) * off_diagonal


@pytest.mark.parametrize("quality_weight", WEIGHTS)
@pytest.mark.parametrize("num_at_once", [1, 2, 3])
@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_leverage_scores_are_those_of_the_inverse(quality_weight, num_at_once, ridge):
    for seed in range(3):
        # More samples are kept than there are features: the ridge decides from there on. Of unit rows all would be tied
        # at first.
        features, quality = problem(12, 3, seed)
        features *= 1 - 0.1 * quality.flip(0)[:, None]
        chosen: list[int] = []
        while len(chosen) < 7:
            moment = features[chosen].T @ features[chosen] + ridge * torch.eye(3, dtype=torch.float64)
            scores = ridge * torch.einsum("nd,de,ne->n", features, torch.linalg.inv(moment), features)
            scores = quality_weight * quality + (1 - quality_weight) * scores
            scores[chosen] = -torch.inf
            chosen += scores.argsort(descending=True)[: min(num_at_once, 7 - len(chosen))].tolist()
        found = leverage_scores(
            features,
            quality,
            num_selected=7,
            quality_weight=quality_weight,
            generator=generator(seed),
            num_at_once=num_at_once,
            ridge=ridge,
        )
        assert found.nonzero().flatten().tolist() == sorted(chosen)


@pytest.mark.parametrize("select", BATCHED.values(), ids=BATCHED)
def test_batches_are_solved_apart(select):
    """What a batch keeps is what it would keep alone. The mean of the block is 0, so that DiSF knows it there, too."""
    features, _ = problem(40, 5, 0)
    _, quality = problem(80, 5, 1)
    features = torch.cat([features, -features])
    kwargs = {"num_selected": 20, "quality_weight": 0.2, "batch_size": 20}
    mask = select(features, quality, generator=generator(3), **kwargs)
    for rows, _ in random_batches(80, 20, 20, generator(3)):
        if select is leverage_scores:
            expected = select(features[rows], quality[rows], num_selected=5, quality_weight=0.2, generator=generator(9))
        else:
            expected = naive_disf_without_mean(features[rows], quality[rows], 5, 0.2)
        assert torch.equal(mask[rows], expected)


def naive_disf_without_mean(features, quality, num_selected, quality_weight):
    def value(mask):
        kept = features[torch.from_numpy(mask)]
        moment = kept.T @ kept / num_selected
        total = float(quality[torch.from_numpy(mask)].sum()) / num_selected
        return quality_weight * total - (1 - quality_weight) * float(moment.square().sum())

    return torch.from_numpy(oracles.naive_greedy(len(features), num_selected, value))


@pytest.mark.parametrize("standardize", [False, True])
def test_a_dimension_that_is_constant_counts_nothing(standardize):
    features, quality = problem(30, 4, 5)
    constant = torch.cat([features, torch.ones(30, 1, dtype=torch.float64)], dim=1)
    kwargs = {"num_selected": 6, "quality_weight": 0.0, "standardize": standardize}
    expected = batched_disf(features, quality, generator=generator(1), **kwargs)
    assert torch.equal(batched_disf(constant, quality, generator=generator(1), **kwargs), expected)


@pytest.mark.parametrize("select", BATCHED.values(), ids=BATCHED)
def test_pure_quality_is_top_quality_of_a_batch(select):
    features, quality = problem(40, 3, 1)
    mask = select(features, quality, num_selected=7, quality_weight=1.0, generator=generator(0))
    assert torch.equal(mask, top_quality_mask(quality, 7))


@pytest.mark.parametrize("select", BATCHED.values(), ids=BATCHED)
def test_unusable_inputs_are_errors_that_name_them(select):
    features, quality = torch.eye(4), torch.ones(4)
    kwargs = {"quality_weight": 0.5, "generator": generator(0)}
    with pytest.raises(BudgetError, match=r"num_selected must be in \[1, 4\].*got 5;"):
        select(features, quality, num_selected=5, **kwargs)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        select(features, quality, num_selected=2, batch_size=0, **kwargs)
    with pytest.raises(BadRowError, match="quality_N must be finite, but row 0"):
        select(features, quality * torch.nan, num_selected=2, **kwargs)


@pytest.mark.parametrize(("option", "value"), [("num_at_once", 0), ("ridge", 0.0), ("ridge", float("nan"))])
def test_unusable_options_of_leverage_scores_are_errors(option, value):
    kwargs = {"num_selected": 2, "quality_weight": 0.5, "generator": generator(0), option: value}
    with pytest.raises(ConfigError, match=rf"{option} must be .*got {value}"):
        leverage_scores(torch.eye(4), torch.ones(4), **kwargs)
