"""DiSF: minus the squared Frobenius norm of a set's covariance. Small when no direction is preferred.

Source: DiSF (ICLR 2025), dimensional collapse of selected files. Two normalisations: plain, of the covariance of
z = x - mean of the block, and standardised, of the correlations over the selected set, as DiSF's own code.

Shapes: R masks, C samples of a slice, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_moment(centered_CD: Tensor, weights_C: Tensor) -> Tensor:
    """A slice's part of sum_i w_i z_i z_i^T: float (D, D), 2 C D^2 flops."""
    return (centered_CD * weights_C.to(centered_CD.dtype)[:, None]).T @ centered_CD


def disf_value(moment_DD: Tensor, *, num_selected: int) -> Tensor:
    """-|M / k|_F^2.

    Args:
        moment_DD: float64 (D, D), sum of z z^T over the set.
        num_selected: k, the budget.

    Returns:
        float64 scalar, at most 0.

    Example:
        >>> disf_value(torch.eye(2).double() * 4, num_selected=4)
        tensor(-2., dtype=torch.float64)
    """
    return -moment_DD.square().sum() / num_selected**2


def disf_values_from_gram(masks_RN: Tensor, squared_gram_NN: Tensor, *, num_selected: int) -> Tensor:
    """The same for many masks of a small ground set: |M|_F^2 = sum over i, j in S of (z_i . z_j)^2.

    Args:
        masks_RN: bool (R, N).
        squared_gram_NN: float (N, N), squared inner products of the centred features.
        num_selected: k, the budget.

    Returns:
        float64 (R,).
    """
    weights_RN = masks_RN.to(squared_gram_NN.dtype)
    return -((weights_RN @ squared_gram_NN) * weights_RN).double().sum(1) / num_selected**2


def disf_expectation(moment_DD: Tensor, p_N: Tensor, fourth_powers_N: Tensor, *, num_selected: int) -> Tensor:
    """E of `disf_value` when every sample is kept independently: -(|M|_F^2 + sum p (1 - p) |z|^4) / k^2.

    Args:
        moment_DD: float64 (D, D), sum p z z^T.
        p_N: float64 (N,), inclusion probabilities.
        fourth_powers_N: float64 (N,), |z_i|^4.
        num_selected: k, the budget.

    Returns:
        float64 scalar.
    """
    sampling_noise = (p_N * (1 - p_N) * fourth_powers_N).sum()
    return -(moment_DD.square().sum() + sampling_noise) / num_selected**2


def quadratic_forms(centered_CD: Tensor, matrix_DD: Tensor) -> Tensor:
    """z_i^T A z_i for each sample of a slice: float (C,), 2 C D^2 flops."""
    return (centered_CD @ matrix_DD.to(centered_CD.dtype)).mul_(centered_CD).sum(1)


def standardized_value(sum_D: Tensor, moment_DD: Tensor, *, num_selected: int) -> Tensor:
    """Minus the sum of squared correlations between different dimensions over the selected set.

    A dimension without variance in the set has correlation 0. Differentiable in both moments.

    Args:
        sum_D: float64 (D,), sum of z over the set, or sum p z.
        moment_DD: float64 (D, D), sum of z z^T over the set, or sum p z z^T.
        num_selected: k, the budget.

    Returns:
        float64 scalar, at most 0.

    Example:
        >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double()
        >>> standardized_value(z.sum(0), z.T @ z, num_selected=2)
        tensor(-2., dtype=torch.float64)
    """
    mean_D = sum_D / num_selected
    covariance_DD = moment_DD / num_selected - torch.outer(mean_D, mean_D)
    variance_D = covariance_DD.diagonal()
    # relative: what is left of a constant dimension after the subtraction is rounding
    is_constant_D = variance_D <= 1e-12 * (moment_DD.diagonal() / num_selected) + 1e-10
    inverse_D = torch.where(is_constant_D, 0.0, 1.0 / torch.where(is_constant_D, 1.0, variance_D))
    squared_DD = covariance_DD.square() * inverse_D[:, None] * inverse_D[None, :]
    return -(squared_DD.sum() - squared_DD.diagonal().sum())
