"""Greedy selection inside random batches: DiSF's, and by leverage scores.

A random batch of 1,024 samples is small enough for a greedy that looks at every sample of it at every step, and the
batches are independent of each other: time and memory are linear in the size of the block. The price is that a batch
knows nothing of what the others keep. Every batch keeps its share of the budget.

Shape suffixes: N samples, B samples of a batch, D features, K samples kept of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from datamask_pl.errors import ConfigError
from datamask_pl.evidence.baselines.inputs import check_inputs, mask_of

BATCH_SIZE = 1024
# Added to variances, so that a dimension that is constant over the set has correlation 0.
_VARIANCE_FLOOR = 1e-8


def batched_disf(
    features_ND: Tensor,
    quality_N: Tensor,
    *,
    num_selected: int,
    quality_weight: float,
    generator: torch.Generator,
    batch_size: int = BATCH_SIZE,
    standardize: bool = False,
) -> Tensor:
    """DiSF's greedy: within each random batch, the samples that keep the set's covariance small are added one by one.

    Plain, a step adds the sample with the largest gain in quality_weight * Q(S) + (1 - quality_weight) * D(S) of the
    batch, D(S) = -|C|_F^2, C = (1/K) sum z z^T, z = x - mean of the block: `greedy_disf`, batch by batch.

    With `standardize`, as DiSF's own code has it: the first sample of a batch is drawn at random, and a step adds the
    sample that gives the largest f, where D(S) is minus the sum of the squared correlations between different
    dimensions over the set as it is, and Q(S) its mean quality.

    Args:
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, in [1, N].
        quality_weight: lambda in [0, 1]; 1 is pure quality. DiSF itself has none: 0.
        generator: draws the batches and, with `standardize`, their first samples.
        batch_size: samples of a batch, at least 1.
        standardize: correlations over the set, instead of the covariance of the centred features.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree, or quality_weight or batch_size is out of range.

    Source: arXiv:2504.20644, algorithm 1; there a batch keeps 16 of 1,024.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> batched_disf(x, torch.zeros(4), num_selected=1, quality_weight=0.0, generator=generator)
        tensor([False, False, False,  True])
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, quality_weight)
    mean_D = features_ND.mean(dim=0)
    kept = []
    for rows_B, num_kept in random_batches(num_samples, num_selected, batch_size, generator):
        on_device_B = rows_B.to(features_ND.device)
        batch_BD, quality_B = features_ND[on_device_B] - mean_D, quality_N[on_device_B].double()
        if standardize:
            first = int(torch.randint(len(rows_B), (), generator=generator, device=generator.device))
            chosen = _least_correlated(batch_BD, quality_B, first, num_kept, quality_weight)
        else:
            chosen = _smallest_covariance(batch_BD, quality_B, num_kept, quality_weight)
        kept.append(on_device_B[chosen])
    return mask_of(torch.cat(kept), num_samples)


def leverage_scores(
    features_ND: Tensor,
    quality_N: Tensor,
    *,
    num_selected: int,
    quality_weight: float,
    generator: torch.Generator,
    batch_size: int = BATCH_SIZE,
    num_at_once: int = 2,
    ridge: float = 0.1,
) -> Tensor:
    """Within each random batch, the samples of highest ridge leverage score over those kept before, a few a step.

    The score of x is x^T (A + ridge I)^-1 x with A = sum x x^T over what the batch keeps so far: large where x points
    in a direction that they do not. Times `ridge` it is in [0, 1] for unit rows, as scaled quality is, and a step adds
    the samples with the largest quality_weight * quality + (1 - quality_weight) * ridge * score. Adding the highest
    score is adding the largest gain in log det (A + ridge I).

    Args:
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, in [1, N].
        quality_weight: lambda in [0, 1]; 1 is pure quality.
        generator: draws the batches.
        batch_size: samples of a batch, at least 1.
        num_at_once: samples added by the same scores, at least 1.
        ridge: positive; small against 1 asks for new directions alone, as long as there are any.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree, or quality_weight, batch_size, num_at_once or ridge is out of range.

    Source: ridge leverage scores, Alaoui and Mahoney 2015; batches and two samples a step as arXiv:2609.32484 is
    described, whose text was not available: the ridge and the way quality enters are ours.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> kwargs = {"quality_weight": 0.0, "generator": generator, "num_at_once": 1}
        >>> int(leverage_scores(x, torch.zeros(3), num_selected=2, **kwargs).sum())
        2
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, quality_weight)
    if num_at_once < 1:
        raise ConfigError(f"num_at_once must be at least 1, got {num_at_once}.")
    if not ridge > 0:
        raise ConfigError(f"ridge must be positive, got {ridge}; without it scores are infinite.")
    kept = []
    for rows_B, num_kept in random_batches(num_samples, num_selected, batch_size, generator):
        on_device_B = rows_B.to(features_ND.device)
        bonus_B = quality_weight * quality_N[on_device_B].double()
        chosen = _highest_leverage(
            features_ND[on_device_B], bonus_B, num_kept, 1.0 - quality_weight, num_at_once, ridge
        )
        kept.append(on_device_B[chosen])
    return mask_of(torch.cat(kept), num_samples)


def random_batches(
    num_samples: int, num_selected: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, int]]:
    """Deals all samples into random batches of equal size, as far as possible, each with its share of the budget.

    Args:
        num_samples: N.
        num_selected: the budget, in [1, N].
        batch_size: samples of a batch, at most.
        generator: of the permutation.

    Yields:
        Rows int64 (B,) in ascending order, and how many of them to keep, in [0, B]; these add up to the budget.

    Raises:
        ConfigError: If batch_size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}.")
    rows_N = torch.randperm(num_samples, generator=generator, device=generator.device)
    num_batches = -(-num_samples // batch_size)
    for index in range(num_batches):
        start, stop = index * num_samples // num_batches, (index + 1) * num_samples // num_batches
        num_kept = stop * num_selected // num_samples - start * num_selected // num_samples
        if num_kept:
            yield rows_N[start:stop].sort().values, num_kept


def _smallest_covariance(z_BD: Tensor, quality_B: Tensor, num_kept: int, quality_weight: float) -> Tensor:
    """Rows in the order in which plain DiSF's greedy adds them: int64 (K,)."""
    squared_BB = (z_BD @ z_BD.T).square_().double()
    gain_B = quality_weight * num_kept * quality_B
    gain_B -= (1.0 - quality_weight) * squared_BB.diagonal()
    squared_BB *= 2.0 * (1.0 - quality_weight)
    chosen = []
    for _ in range(num_kept):
        row = gain_B.argmax()
        chosen.append(row)
        gain_B -= squared_BB[row]
        gain_B[row] = -torch.inf
    return torch.stack(chosen)


def _least_correlated(x_BD: Tensor, quality_B: Tensor, first: int, num_kept: int, quality_weight: float) -> Tensor:
    """Rows in the order in which the greedy for correlations adds them, the given one first: int64 (K,).

    With d = x - mean of the set of m, the covariance of the set with x is C' = a C + b d d^T, a = (m - 1) / m,
    b = 1 / (m + 1). With w = 1 / diag C' the sum of squared correlations, diagonal included, is
    a^2 w^T C^2 w + 2 a b (w d)^T C (w d) + b^2 (w . d^2)^2, C^2 elementwise: two products of B D^2 for all candidates.
    """
    is_open_B = torch.ones_like(quality_B, dtype=torch.bool)
    is_open_B[first] = False
    mean_D, chosen = x_BD[first].clone(), [torch.tensor(first, device=x_BD.device)]
    covariance_DD = x_BD.new_zeros(x_BD.shape[1], x_BD.shape[1])
    for size in range(1, num_kept):
        a, b = (size - 1) / size, 1 / (size + 1)
        d_BD = x_BD - mean_D
        variance_BD = a * covariance_DD.diagonal() + b * d_BD.square()
        w_BD = 1.0 / (variance_BD + _VARIANCE_FLOOR)
        wd_BD = w_BD * d_BD
        squares_B = a**2 * ((w_BD @ covariance_DD.square()) * w_BD).sum(1).double()
        squares_B += 2 * a * b * ((wd_BD @ covariance_DD) * wd_BD).sum(1).double()
        squares_B += b**2 * (wd_BD * d_BD).sum(1).double().square()
        squares_B -= (variance_BD * w_BD).square().sum(1).double()
        score_B = quality_weight / (size + 1) * quality_B - (1.0 - quality_weight) * squares_B
        row = torch.where(is_open_B, score_B, -torch.inf).argmax()
        chosen.append(row)
        is_open_B[row] = False
        covariance_DD = a * covariance_DD + b * torch.outer(d_BD[row], d_BD[row])
        mean_D += d_BD[row] / (size + 1)
    return torch.stack(chosen)


def _highest_leverage(
    x_BD: Tensor, bonus_B: Tensor, num_kept: int, weight: float, num_at_once: int, ridge: float
) -> Tensor:
    """Rows in the order in which they are added by bonus + weight * ridge * leverage score: int64 (K,).

    ridge * score = |x|^2 - g^T (G + ridge I)^-1 g, with the Gram matrix G of the kept rows and their products g with x
    (Woodbury): what a Cholesky factor of G + ridge I, grown by a row a sample, leaves of |x|^2.
    """
    # float64: the rest is a small difference
    gram_BB = (x_BD @ x_BD.T).double()
    left_B = gram_BB.diagonal().clone()
    is_open_B = torch.ones_like(left_B, dtype=torch.bool)
    factor_KB = gram_BB.new_empty(num_kept, len(left_B))
    chosen: list[Tensor] = []
    while len(chosen) < num_kept:
        score_B = torch.where(is_open_B, bonus_B + weight * left_B, -torch.inf)
        # a stable sort and not topk, whose choice among ties differs between devices
        for row in score_B.argsort(descending=True, stable=True)[: min(num_at_once, num_kept - len(chosen))]:
            done = len(chosen)
            projected_B = gram_BB[row] - factor_KB[:done].T @ factor_KB[:done, row]
            factor_KB[done] = projected_B / (left_B[row] + ridge).sqrt()
            left_B -= factor_KB[done].square()
            is_open_B[row] = False
            chosen.append(row)
    return torch.stack(chosen)
