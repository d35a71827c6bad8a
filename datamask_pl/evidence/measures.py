"""What a mask is worth, by the formulas alone: shares no code with what the optimiser maximises.

Shapes: N samples, K kept samples, C samples of a chunk, D features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Rows of one product with all others: 4,096 x 20,000 float32 numbers are 330 MB.
_CHUNK_ROWS = 4096


def facility_location(mask_N: Tensor, features_ND: Tensor) -> float:
    """Mean over all samples of max(0, cosine) to the most similar kept one.

    Args:
        mask_N: bool (N,), at least one kept.
        features_ND: float32 or float64 (N, D), rows of unit L2 norm.

    Returns:
        A number in [0, 1].

    Example:
        >>> facility_location(torch.tensor([True, False]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        0.5
    """
    kept_KD = features_ND[mask_N]
    total = math.fsum(
        float((features_CD @ kept_KD.T).amax(dim=1).clamp(min=0.0).double().sum())
        for features_CD in torch.split(features_ND, _CHUNK_ROWS)
    )
    return total / len(features_ND)


def pairwise_similarity(mask_N: Tensor, features_ND: Tensor) -> float:
    """Minus the mean cosine between two different kept samples; 0 if one is kept.

    Args:
        mask_N: bool (N,), at least one kept.
        features_ND: float32 or float64 (N, D), rows of unit L2 norm.

    Returns:
        A number in [-1, 1].

    Example:
        >>> pairwise_similarity(torch.tensor([True, True]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        -1.0
    """
    kept_KD = features_ND[mask_N].double()
    k = len(kept_KD)
    if k == 1:
        return 0.0
    total = math.fsum(float((chunk_CD @ kept_KD.T).sum()) for chunk_CD in torch.split(kept_KD, _CHUNK_ROWS))
    return -(total - float(kept_KD.square().sum())) / (k * (k - 1))


def disf(mask_N: Tensor, features_ND: Tensor) -> float:
    """Minus the squared Frobenius norm of the kept samples' second moment about the mean of all samples.

    Args:
        mask_N: bool (N,), at least one kept.
        features_ND: float32 or float64 (N, D), rows of unit L2 norm.

    Returns:
        A number that is not positive.

    Example:
        >>> disf(torch.tensor([True, True]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        -1.0
    """
    centered_KD = features_ND[mask_N].double() - features_ND.double().mean(dim=0)
    return -float((centered_KD.T @ centered_KD / len(centered_KD)).square().sum())


def near_duplicate_share(mask_N: Tensor, features_ND: Tensor, *, cosine: float) -> float:
    """Share of the kept samples that have another kept sample nearer than a cosine.

    Args:
        mask_N: bool (N,), at least one kept.
        features_ND: float32 or float64 (N, D), rows of unit L2 norm.
        cosine: above this two samples are near-duplicates.

    Returns:
        A number in [0, 1].

    Example:
        >>> features_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> near_duplicate_share(torch.tensor([True, False, True]), features_ND, cosine=0.95)
        0.0
    """
    kept_KD = features_ND[mask_N]
    k = len(kept_KD)
    num_near = 0
    for start in range(0, k, _CHUNK_ROWS):
        similarity_CK = kept_KD[start : start + _CHUNK_ROWS] @ kept_KD.T
        rows_C = torch.arange(len(similarity_CK), device=kept_KD.device)
        similarity_CK[rows_C, rows_C + start] = -torch.inf
        num_near += int((similarity_CK > cosine).any(dim=1).sum())
    return num_near / k


def jaccard(one_N: Tensor, other_N: Tensor) -> float:
    """Samples that both masks keep, as a share of those that either keeps.

    Args:
        one_N: bool (N,).
        other_N: bool (N,).

    Returns:
        A number in [0, 1]; 1 if both keep nothing.

    Example:
        >>> jaccard(torch.tensor([True, True, False]), torch.tensor([True, False, True]))
        0.3333333333333333
    """
    either = int((one_N | other_N).sum())
    return int((one_N & other_N).sum()) / either if either else 1.0
