"""SemDeDup: near-duplicates within clusters are dropped until the budget remains.

Shape suffixes: N samples, D features, M samples of a cluster, C clusters.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from datamask_pl.errors import ConfigError, check_choice
from datamask_pl.evidence.baselines.inputs import check_inputs, mask_of
from datamask_pl.functional.neighbors.kmeans import nearest_center, spherical_kmeans

Keep = Literal["far", "quality"]
# Rows whose products with others are held at once.
_ROWS_AT_ONCE = 4096


def semdedup(
    features_ND: Tensor,
    quality_N: Tensor,
    *,
    num_selected: int,
    generator: torch.Generator,
    keep: Keep = "far",
    num_clusters: int | None = None,
    num_rounds: int = 10,
) -> Tensor:
    """Drops the samples that have the closest duplicates in their cluster.

    Within each cluster of a spherical k-means the samples are put in order of preference. A sample is a duplicate if
    its cosine to any preferred one is above a threshold, which is the one at which exactly the budget remains: the
    highest cosines to a preferred sample are found, and the num_selected samples with the lowest of them are kept.

    Args:
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, in [1, N].
        generator: draws the first centres.
        keep: which of several near-duplicates is preferred: `far`, the one that is least similar to the cluster's
            centre, as the paper has it, or `quality`, the one of highest quality. Ties by row order.
        num_clusters: C, in [1, N]; by default the square root of N.
        num_rounds: rounds of k-means, at least 1.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree, or keep, num_clusters or num_rounds is not allowed.

    Source: arXiv:2303.09540, algorithm A7. There the threshold is given, and the size follows.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> kwargs = {"generator": torch.Generator().manual_seed(0), "num_clusters": 1}
        >>> semdedup(x, torch.tensor([0.1, 0.9, 0.5]), num_selected=2, keep="quality", **kwargs)
        tensor([False,  True,  True])
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, 0.0)
    check_choice("keep", keep, get_args(Keep))
    num_clusters = max(1, math.isqrt(num_samples)) if num_clusters is None else num_clusters
    if not 1 <= num_clusters <= num_samples:
        raise ConfigError(f"num_clusters must be in [1, {num_samples}], the number of samples, got {num_clusters}.")
    if num_rounds < 1:
        raise ConfigError(f"num_rounds must be at least 1, got {num_rounds}.")
    cluster_N, to_center_N = cluster_by_cosine(
        features_ND, num_clusters=num_clusters, num_rounds=num_rounds, generator=generator
    )
    order_N = torch.argsort(to_center_N if keep == "far" else -quality_N, stable=True)
    order_N = order_N[torch.argsort(cluster_N[order_N], stable=True)]
    sizes = torch.bincount(cluster_N, minlength=num_clusters).tolist()
    highest_N = torch.cat([_highest_to_preferred(features_ND, rows_M) for rows_M in torch.split(order_N, sizes)])
    kept = torch.argsort(highest_N, stable=True)[:num_selected]
    return mask_of(order_N[kept], num_samples)


def cluster_by_cosine(
    features_ND: Tensor, *, num_clusters: int, num_rounds: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Clusters by cosine, with the first centres drawn from the samples.

    Returns:
        cluster_N: int64 (N,), in [0, C); a cluster may be empty.
        to_center_N: float (N,), cosine to the centre of the sample's cluster.
    """
    num_samples = len(features_ND)
    sample_N = torch.randperm(num_samples, generator=generator, device=generator.device).to(features_ND.device)
    center_CD = spherical_kmeans(
        features_ND.__getitem__, sample_N, num_clusters=num_clusters, num_iterations=num_rounds, bound=num_samples
    )
    cluster_N = nearest_center(features_ND, center_CD)
    return cluster_N, (features_ND * center_CD[cluster_N]).sum(1)


def _highest_to_preferred(features_ND: Tensor, rows_M: Tensor) -> Tensor:
    """Highest cosine of each row to one before it, -inf for the first: float (M,)."""
    highest_M = features_ND.new_full(rows_M.shape, -torch.inf)
    for start in range(0, len(rows_M), _ROWS_AT_ONCE):
        own = rows_M[start : start + _ROWS_AT_ONCE]
        best = highest_M[start : start + len(own)]
        for before in range(0, start + len(own), _ROWS_AT_ONCE):
            others = rows_M[before : min(before + _ROWS_AT_ONCE, start + len(own))]
            cosine = features_ND[own] @ features_ND[others].T
            if before == start:
                cosine.masked_fill_(torch.ones_like(cosine, dtype=torch.bool).triu(), -torch.inf)
            torch.maximum(best, cosine.amax(dim=1), out=best)
    return highest_M
