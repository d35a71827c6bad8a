"""Where samples lie: clusters, and the plane of largest variance. For pictures, on some thousands of samples.

Shapes: N samples, D features, J clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_ROUNDS = 25


def spherical_k_means(features_ND: Tensor, num_clusters: int, *, generator: torch.Generator) -> Tensor:
    """Clusters by cosine: Lloyd's rounds from centres that are spread as k-means++ does.

    Args:
        features_ND: float32 (N, D), rows of unit L2 norm.
        num_clusters: J, at most N.
        generator: decides the first centres; on the features' device.

    Returns:
        int64 (N,), the cluster of each sample, in [0, J); a cluster may be empty.

    Example:
        >>> features_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> labels_N = spherical_k_means(features_ND, 2, generator=torch.Generator().manual_seed(0))
        >>> bool(labels_N[0] == labels_N[1]), bool(labels_N[0] == labels_N[2])
        (True, False)
    """
    centers_JD = _spread_centers(features_ND, num_clusters, generator)
    labels_N = (features_ND @ centers_JD.T).argmax(dim=1)
    for _ in range(NUM_ROUNDS):
        sums_JD = torch.zeros_like(centers_JD).index_add_(0, labels_N, features_ND)
        norm_J = sums_JD.norm(dim=1, keepdim=True)
        # a cluster that lost all its samples keeps its centre
        centers_JD = torch.where(norm_J > 0, sums_JD / norm_J.clamp(min=1e-12), centers_JD)
        before_N, labels_N = labels_N, (features_ND @ centers_JD.T).argmax(dim=1)
        if torch.equal(before_N, labels_N):
            break
    return labels_N


def _spread_centers(features_ND: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Rows drawn one by one, in proportion to their squared distance to those before. Source: k-means++, 2007."""
    num_samples = len(features_ND)
    rows = [int(torch.randint(num_samples, (1,), generator=generator, device=generator.device))]
    distance_N = (2.0 - 2.0 * features_ND @ features_ND[rows[0]]).clamp(min=0.0)
    for _ in range(1, num_clusters):
        if float(distance_N.sum()) > 0:
            row = int(torch.multinomial(distance_N, 1, generator=generator))
        else:  # fewer different samples than clusters
            row = rows[-1]
        rows.append(row)
        distance_N = torch.minimum(distance_N, (2.0 - 2.0 * features_ND @ features_ND[row]).clamp(min=0.0))
    return features_ND[rows].clone()


def principal_plane(features_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of the samples in the two directions of largest variance.

    Args:
        features_ND: float32 (N, D).

    Returns:
        float32 (N, 2), and (2,), the shares of the whole variance; zeros where there are fewer than two directions.

    Example:
        >>> points_N2, share_2 = principal_plane(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> points_N2.abs()
        tensor([[1., 0.],
                [1., 0.]])
    """
    centered_ND = features_ND.double() - features_ND.double().mean(dim=0)
    values_D, vectors_DD = torch.linalg.eigh(centered_ND.T @ centered_ND)
    vectors_D2 = vectors_DD[:, -2:].flip(1)
    # the sign of a direction is arbitrary: its largest part is positive, so that two reports show one picture
    largest_2 = vectors_D2.gather(0, vectors_D2.abs().argmax(dim=0, keepdim=True))
    points_N2 = centered_ND @ (vectors_D2 * largest_2.sign())
    shares_2 = values_D[-2:].flip(0).clamp(min=0.0) / values_D.clamp(min=0.0).sum().clamp(min=1e-30)
    pad = 2 - points_N2.shape[1]
    return (
        torch.nn.functional.pad(points_N2, (0, pad)).float(),
        torch.nn.functional.pad(shares_2, (0, pad)).float(),
    )


def share_kept(mask_N: Tensor, labels_N: Tensor, decile_N: Tensor, *, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Which share of the samples is kept, by cluster and tenth of quality.

    Args:
        mask_N: bool (N,), True = kept.
        labels_N: int64 (N,), cluster.
        decile_N: int64 (N,), in [0, 10).
        num_clusters: J.

    Returns:
        float64 (J, 10), NaN where there is no sample, and int64 (J, 10), the number of samples.
    """
    cell_N = labels_N * 10 + decile_N
    count = torch.bincount(cell_N, minlength=10 * num_clusters).view(num_clusters, 10)
    kept = torch.bincount(cell_N[mask_N], minlength=10 * num_clusters).view(num_clusters, 10)
    return kept.double() / count.double(), count


def deciles(values_N: Tensor) -> Tensor:
    """The tenth, by rank, that each value is in; equal values are in one.

    Args:
        values_N: float (N,).

    Returns:
        int64 (N,), in [0, 10); 9 is the highest tenth.

    Example:
        >>> deciles(torch.tensor([0.1, 0.9, 0.1, 0.5]))
        tensor([0, 7, 0, 5])
    """
    sorted_N = values_N.sort().values
    below_N = torch.searchsorted(sorted_N, values_N, right=False)
    return below_N * 10 // len(values_N)
