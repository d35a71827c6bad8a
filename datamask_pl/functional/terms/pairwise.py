"""Pairwise similarity: minus the mean cosine over the ordered pairs of a set, from the set's sum alone.

sum over pairs i != j of x_i . x_j = |sum x_i|^2 - sum |x_i|^2, so one pass of n d products serves any number of pairs.

Shapes: R masks, C samples of a slice, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_sums(features_CD: Tensor, weights_RC: Tensor) -> Tensor:
    """A slice's part of sum_i w_i x_i for each mask: float (R, D)."""
    return weights_RC.to(features_CD.dtype) @ features_CD


def pairwise_value(sums_RD: Tensor, squared_norms_R: Tensor, *, num_selected: int) -> Tensor:
    """Minus the mean cosine between different members of each set.

    Args:
        sums_RD: float64 (R, D), sum of the unit features kept, or sum p x for the expectation.
        squared_norms_R: float64 (R,), sum of |x_i|^2 over the set, or sum p^2 |x_i|^2 for the expectation.
        num_selected: k, the budget.

    Returns:
        float64 (R,), in [-1, 1 / (k - 1)]; 0 for a set of one.

    Example:
        >>> pairwise_value(torch.tensor([[1.0, 1.0]]).double(), torch.tensor([2.0]).double(), num_selected=2)
        tensor([0.], dtype=torch.float64)
    """
    if num_selected == 1:
        return torch.zeros_like(squared_norms_R)
    return (squared_norms_R - sums_RD.square().sum(1)) / num_pairs(num_selected)


def pairwise_gradient(
    features_CD: Tensor, p_C: Tensor, squared_norm_C: Tensor, sum_D: Tensor, *, num_selected: int
) -> Tensor:
    """Marginal gain of each sample of a slice: -2 (x_i . s - p_i |x_i|^2) / (k (k - 1)), with s = sum p x.

    Args:
        features_CD: float (C, D), unit rows.
        p_C: float64 (C,), inclusion probabilities.
        squared_norm_C: float64 (C,), |x_i|^2.
        sum_D: float64 (D,), sum of p x over the whole ground set.
        num_selected: k, the budget.

    Returns:
        float (C,), of the features' type.
    """
    if num_selected == 1:
        return features_CD.new_zeros(features_CD.shape[0])
    factor = -2.0 / num_pairs(num_selected)
    own_C = (p_C * squared_norm_C).mul_(-factor).to(features_CD.dtype)
    return own_C.add_(features_CD @ (factor * sum_D).to(features_CD.dtype))


def concave_gradient(features_CD: Tensor, squared_norm_C: Tensor, sum_D: Tensor, *, sizes: tuple[int, int]) -> Tensor:
    """Slopes of a tangent above `pairwise_value`: |x_i|^2 / pairs(smallest) - 2 x_i . s / pairs(largest).

    Args:
        features_CD: float (C, D), unit rows.
        squared_norm_C: float64 (C,), |x_i|^2.
        sum_D: float64 (D,), s = sum p x over the whole ground set.
        sizes: the smallest and the largest number of kept samples.

    Returns:
        float64 (C,).
    """
    products_C = features_CD @ (-2.0 / num_pairs(sizes[1]) * sum_D).to(features_CD.dtype)
    return products_C.double() + squared_norm_C / num_pairs(sizes[0])


def pairwise_interactions(features_CD: Tensor, others_OD: Tensor, *, num_selected: int) -> Tensor:
    """By how much keeping one sample changes what keeping another adds: -2 x_i . x_j / (k (k - 1)).

    Args:
        features_CD: float (C, D), unit rows.
        others_OD: float (O, D), unit rows.
        num_selected: k, the budget.

    Returns:
        float (C, O), of the features' type.
    """
    factor = -2.0 / (num_selected * (num_selected - 1)) if num_selected > 1 else 0.0
    return (features_CD @ others_OD.T).mul_(factor)


def relative_pairs_slope(size: float) -> float:
    """Derivative of log(k (k - 1)) by the size k, for sizes that are expectations.

    Example:
        >>> relative_pairs_slope(3), relative_pairs_slope(1.5)
        (0.8333333333333334, 0.0)
    """
    return (2 * size - 1) / num_pairs(size) if size >= 2 else 0.0


def num_pairs(size: float) -> float:
    """Ordered pairs of different members. An expected size may be below 2: as many as 2 have, not one of none."""
    return max(size, 2) * (max(size, 2) - 1)
