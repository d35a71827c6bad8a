"""DiSF: minus the squared Frobenius norm of a set's covariance. Small when no direction is preferred.

Source: DiSF (ICLR 2025), dimensional collapse of selected files. Two normalisations: plain, of the covariance of
z = x - mean of the block, and standardised, of the correlations over the selected set, as DiSF's own code.

Shapes: R masks, C samples of a slice, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.kernels import multiply_bfloat16

# Rows of a band of the Gram matrix: of 2,400 samples half of it and an eighth more are computed.
GRAM_ROWS = 320
# Rows that are multiplied at once: 2048 x 768 float32 products are 6 MiB.
PIECE_ROWS = 2048


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


def squared_gram(centered_ND: Tensor) -> list[Tensor]:
    """Squared inner products of a small ground set's centred features, for `disf_values_from_gram`.

    Args:
        centered_ND: float (N, D).

    Returns:
        What lies on and right of the diagonal, in bands of GRAM_ROWS rows: float (C, N - first row of the band). Pairs
        in different bands are there once, and count twice.
    """
    starts = range(0, centered_ND.shape[0], GRAM_ROWS)
    bands = [(centered_ND[start : start + GRAM_ROWS] @ centered_ND[start:].T).square_() for start in starts]
    for band_CN in bands:
        band_CN[:, GRAM_ROWS:] *= 2.0
    return bands


def disf_values_from_gram(masks_RN: Tensor, bands: list[Tensor], *, num_selected: int) -> Tensor:
    """The same for many masks of a small ground set: |M|_F^2 = sum over i, j in S of (z_i . z_j)^2.

    Args:
        masks_RN: bool (R, N).
        bands: from `squared_gram`.
        num_selected: k, the budget.

    Returns:
        float64 (R,).
    """
    weights_RN = masks_RN.to(bands[0].dtype)
    total_R = torch.zeros(masks_RN.shape[0], dtype=torch.float64, device=masks_RN.device)
    for index, band_CN in enumerate(bands):
        right_RN = weights_RN[:, index * GRAM_ROWS :]
        total_R += ((right_RN[:, :GRAM_ROWS] @ band_CN) * right_RN).double().sum(1)
    return -total_R / num_selected**2


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


def quick_moment(centered_CD: Tensor, weights_C: Tensor) -> Tensor:
    """`weighted_moment` by products of bfloat16, for weights that are not negative: float (D, D).

    On a processor with hardware for them it takes a fifth of the time.
    """
    root_CD = (centered_CD * weights_C.sqrt().to(centered_CD.dtype)[:, None]).bfloat16()
    return multiply_bfloat16(root_CD.T, root_CD.T).to(centered_CD.dtype)


def quick_quadratic_forms(centered_CD: Tensor, matrix_DD: Tensor, squared_norm_C: Tensor) -> Tensor:
    """`quadratic_forms` by products of bfloat16: float (C,).

    The mean of the diagonal is taken apart, and exact: the error is relative to how forms of unit vectors differ.

    Args:
        centered_CD: float32 (C, D).
        matrix_DD: float64 (D, D).
        squared_norm_C: float64 (C,), |z_i|^2.
    """
    level = matrix_DD.diagonal().mean()
    rest_DD = matrix_DD - level * torch.eye(len(matrix_DD), device=matrix_DD.device)
    rest_C = multiply_bfloat16(centered_CD, rest_DD.T).to(centered_CD.dtype).mul_(centered_CD).sum(1)
    return rest_C + (level * squared_norm_C).to(centered_CD.dtype)


def pieces(rows: slice, device: torch.device) -> Iterator[slice]:
    """Parts of a slice whose centred features and products stay in a CPU's caches. At least one."""
    num_rows = rows_at_once(PIECE_ROWS, device)
    for start in range(rows.start, max(rows.stop, rows.start + 1), num_rows):
        yield slice(start, min(start + num_rows, rows.stop))


def disf_interactions(centered_CD: Tensor, others_OD: Tensor, *, num_selected: int) -> Tensor:
    """By how much keeping one sample changes what keeping another adds: -2 (z_i . z_j)^2 / k^2.

    Args:
        centered_CD: float (C, D).
        others_OD: float (O, D), centred as well.
        num_selected: k, the budget.

    Returns:
        float (C, O), of the features' type.
    """
    return (centered_CD @ others_OD.T).square_().mul_(-2.0 / num_selected**2)


def standardized_value(sum_D: Tensor, moment_DD: Tensor, *, num_selected: int | Tensor) -> Tensor:
    """Minus the sum of squared correlations between different dimensions over the selected set.

    A dimension without variance in the set has correlation 0. Differentiable in both moments, and in the budget.

    Args:
        sum_D: float64 (D,), sum of z over the set, or sum p z.
        moment_DD: float64 (D, D), sum of z z^T over the set, or sum p z z^T.
        num_selected: k, the budget, a number or a float64 scalar.

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
    # relative: the rest of a constant dimension after the subtraction is rounding
    is_constant_D = variance_D <= 1e-12 * (moment_DD.diagonal() / num_selected) + 1e-10
    inverse_D = torch.where(is_constant_D, 0.0, 1.0 / torch.where(is_constant_D, 1.0, variance_D))
    squared_DD = covariance_DD.square() * inverse_D[:, None] * inverse_D[None, :]
    return -(squared_DD.sum() - squared_DD.diagonal().sum())
