from __future__ import annotations

import pytest
import torch

from datamask_pl.errors import BudgetError, ConfigError
from datamask_pl.evidence.baselines import semdedup as module
from datamask_pl.evidence.baselines.semdedup import cluster_by_cosine, semdedup
from tests.support.baseline_problems import generator, problem


def kept_by_threshold(cosines, order, clusters, threshold):
    """By definition: a sample goes if a preferred one of its cluster is more similar to it than the threshold."""
    kept = [False] * len(order)
    for position, row in enumerate(order):
        before = [other for other in order[:position] if clusters[other] == clusters[row]]
        kept[row] = all(cosines[row][other] <= threshold for other in before)
    return torch.tensor(kept)


@pytest.mark.parametrize("keep", ["far", "quality"])
@pytest.mark.parametrize("num_clusters", [1, 4])
def test_what_is_kept_is_what_some_threshold_leaves(keep, num_clusters):
    for seed in range(3):
        features, quality = problem(25, 4, seed)
        clusters, to_center = cluster_by_cosine(
            features, num_clusters=num_clusters, num_rounds=10, generator=generator(seed)
        )
        order = (to_center if keep == "far" else -quality).argsort().tolist()
        cosines = (features @ features.T).tolist()
        thresholds = sorted({cosine for row in cosines for cosine in row})
        masks = [kept_by_threshold(cosines, order, clusters.tolist(), threshold) for threshold in thresholds]
        by_size = {int(mask.sum()): mask for mask in masks}
        assert len(by_size) > 10
        for num_selected, expected in by_size.items():
            kwargs = {"num_selected": num_selected, "keep": keep, "num_clusters": num_clusters}
            found = semdedup(features, quality, generator=generator(seed), **kwargs)
            assert torch.equal(found, expected), num_selected


def test_of_copies_one_is_kept_for_as_long_as_there_are_others():
    features, quality = problem(12, 8, 0)
    copies = features.repeat(5, 1)
    mask = semdedup(copies, quality.repeat(5), num_selected=12, generator=generator(0), num_clusters=3)
    assert (mask.reshape(5, 12).sum(0) == 1).all()
    scores = torch.rand(60, generator=generator(1))
    mask = semdedup(copies, scores, num_selected=12, generator=generator(0), num_clusters=3, keep="quality")
    assert torch.equal(mask.reshape(5, 12), scores.reshape(5, 12) == scores.reshape(5, 12).amax(0))


@pytest.mark.parametrize("rows_at_once", [1, 7, 64])
def test_the_mask_does_not_depend_on_how_many_rows_are_compared_at_once(rows_at_once, monkeypatch):
    features, quality = problem(100, 4, 3)
    expected = semdedup(features, quality, num_selected=30, generator=generator(0), num_clusters=3)
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
    assert torch.equal(semdedup(features, quality, num_selected=30, generator=generator(0), num_clusters=3), expected)


def test_kmeans_finds_clusters_that_are_far_apart():
    centers = torch.eye(6, dtype=torch.float64)[:3]
    labels = torch.arange(90) % 3
    noise = torch.randn(90, 6, generator=generator(0), dtype=torch.float64)
    features = torch.nn.functional.normalize(centers[labels] + 0.05 * noise)
    # Seeds whose first centres lie in three different clusters.
    seeds = [s for s in range(20) if len(set(labels[torch.randperm(90, generator=generator(s))[:3]].tolist())) == 3]
    for seed in seeds[:3]:
        found, to_center = cluster_by_cosine(features, num_clusters=3, num_rounds=10, generator=generator(seed))
        pairs = {(int(a), int(b)) for a, b in zip(found, labels, strict=True)}
        assert len(pairs) == 3
        means = torch.stack([features[labels == label].mean(0) for label in range(3)])
        expected = (features * torch.nn.functional.normalize(means)[labels]).sum(1)
        torch.testing.assert_close(to_center, expected)


def test_more_rounds_of_kmeans_never_bring_samples_further_from_their_centers():
    features, _ = problem(200, 5, 0)
    cosines = [
        float(cluster_by_cosine(features, num_clusters=9, num_rounds=rounds, generator=generator(0))[1].sum())
        for rounds in range(1, 8)
    ]
    assert cosines == sorted(cosines)
    assert cosines[0] < cosines[-1]


def test_a_cluster_without_samples_does_no_harm():
    features = torch.tensor([[1.0, 0.0]]).repeat(10, 1)
    mask = semdedup(features, torch.ones(10), num_selected=4, generator=generator(0), num_clusters=5)
    assert int(mask.sum()) == 4


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("keep", "near", "keep must be one of far, quality, got 'near'"),
        ("num_clusters", 0, r"num_clusters must be in \[1, 4\], the number of samples, got 0"),
        ("num_clusters", 5, r"num_clusters must be in \[1, 4\], the number of samples, got 5"),
        ("num_rounds", 0, "num_rounds must be at least 1, got 0"),
    ],
)
def test_unusable_options_are_errors(option, value, rule):
    with pytest.raises(ConfigError, match=rule):
        semdedup(torch.eye(4), torch.ones(4), num_selected=2, generator=generator(0), **{option: value})
    with pytest.raises(BudgetError, match="got 9;"):
        semdedup(torch.eye(4), torch.ones(4), num_selected=9, generator=generator(0))
