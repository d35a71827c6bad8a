"""Spherical k-means: clusters by cosine, the same on every rank.

Shapes: S samples that are clustered, P of them at a time, C clusters, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.neighbors.exact import PANEL_ROWS
from datamask_pl.functional.neighbors.pairs import Features


def spherical_kmeans(
    features: Features, sample_S: Tensor, *, num_clusters: int, num_iterations: int, bound: float
) -> Tensor:
    """The centres: every sample goes to its most similar one, every centre to its samples' mean direction.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        sample_S: int64 (S,), the samples; the first `num_clusters` are the first centres.
        num_clusters: C, in [1, S].
        num_iterations: at most; it ends where no centre moves.
        bound: at least S; sums have the same bits for the same bound.

    Returns:
        (C, D), unit rows; a cluster may be empty, whose centre stays where it was.
    """
    centers_CD = features(sample_S[:num_clusters])
    for _ in range(num_iterations):
        sums_CD = torch.zeros(centers_CD.shape, dtype=torch.float64, device=centers_CD.device)
        for rows in torch.split(sample_S, rows_at_once(PANEL_ROWS, centers_CD.device)):
            features_PD = features(rows)
            # exact sums: on a GPU the order of additions is another each time
            sums_CD.index_add_(0, nearest_center(features_PD, centers_CD), round_to_grid(features_PD, bound=bound))
        norm_C1 = sums_CD.norm(dim=1, keepdim=True)
        before_CD = centers_CD
        centers_CD = torch.where(norm_C1 > 0, sums_CD / norm_C1.clamp(min=1e-30), before_CD).to(before_CD.dtype)
        if torch.equal(centers_CD, before_CD):
            break
    return centers_CD


def nearest_center(features_PD: Tensor, centers_CD: Tensor) -> Tensor:
    """The cluster of each sample: int64 (P,).

    Example:
        >>> nearest_center(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.eye(2))
        tensor([0, 1])
    """
    parts = torch.split(features_PD, rows_at_once(PANEL_ROWS, features_PD.device))
    return torch.cat([(part_PD @ centers_CD.T).argmax(1) for part_PD in parts])
