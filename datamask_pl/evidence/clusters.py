"""Principal plane, shares kept by cluster and quality. For pictures, on some thousands of samples.

Shapes: N samples, D features, J clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
