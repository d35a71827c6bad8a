"""The policy that keeps every sample independently, and the ascent on its logits.

Every sample is kept with probability p = sigmoid(logit - threshold), the threshold such that the probabilities add up
to the budget. E f over these masks is the multilinear extension of f (Calinescu et al. 2011), and its gradient in p is
the policy gradient with the noise of every coordinate integrated out.

Shapes: N samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from datamask_pl.functional.budget import OverSlices, in_one_slice

MAX_STEPS = 100
RELATIVE_TOLERANCE = 1e-12
# A step of h leaves an error of at most h^3 / 2, since no derivative of sigmoid exceeds the one before. The sum of
# probabilities is then off by at most that share of the budget.
NEGLIGIBLE_STEP = 1e-4
# Before all logits are looked at, every 16th, and at most about 32,768, tell roughly where the threshold is.
SAMPLE_STRIDE, MAX_SAMPLE, SAMPLE_STEP = 16, 32_768, 1e-2
# A million samples of this probability add up to a millionth of one. Zeros can be skipped, and products of smaller
# numbers would be subnormal in float32, a hundred times slower.
NEGLIGIBLE = 1e-12


def solve_threshold(logits_N: Tensor, num_selected: int, *, over_slices: OverSlices = in_one_slice) -> Tensor:
    """Finds the threshold at which sigmoid(logits - threshold) adds up to the budget.

    Safeguarded Halley steps in float64, from a bracket that is known to hold the root: first on some of the logits,
    then on all.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].
        over_slices: how sums over the rows are taken, and shared among ranks that all hold the logits.

    Returns:
        float64 scalar; -inf if everything is kept.

    Example:
        >>> solve_threshold(torch.tensor([1.0, 1.0]), 1)
        tensor(1., dtype=torch.float64)
    """
    num_samples = logits_N.numel()
    if num_selected == num_samples:
        return torch.tensor(-torch.inf, dtype=torch.float64, device=logits_N.device)
    share = num_selected / num_samples
    uniform_logit = math.log(share / (1.0 - share))
    lowest, highest = torch.stack(logits_N.aminmax()).tolist()
    bracket = (lowest - uniform_logit, highest - uniform_logit)
    start = (bracket[0] + bracket[1]) / 2
    stride = max(SAMPLE_STRIDE, num_samples // MAX_SAMPLE)
    if num_samples >= SAMPLE_STRIDE * stride and bracket[0] < bracket[1]:
        sample_C = logits_N[::stride].double()
        start = _find_root(
            lambda threshold: _sums(sample_C, threshold),
            share * sample_C.numel(),
            sample_C.numel(),
            start=start,
            bracket=bracket,
            negligible_step=SAMPLE_STEP,
        )
    root = _find_root(
        lambda threshold: over_slices(lambda rows: _sums(logits_N[rows].double(), threshold)).sum(0),
        num_selected,
        num_samples,
        start=start,
        bracket=bracket,
        negligible_step=NEGLIGIBLE_STEP,
    )
    return torch.tensor(root, dtype=torch.float64, device=logits_N.device)


def _sums(logits_C: Tensor, threshold: float) -> Tensor:
    """Sums of p, p (1 - p) and p^2 (1 - p) over some logits: float64 (3,)."""
    p_C = (logits_C - threshold).sigmoid_()
    variance_C = p_C * (1 - p_C)
    return torch.stack([p_C.sum(), variance_C.sum(), p_C.mul_(variance_C).sum()])


def _find_root(
    sums: Callable[[float], Tensor],
    target: float,
    num_samples: int,
    *,
    start: float,
    bracket: tuple[float, float],
    negligible_step: float,
) -> float:
    """Where the sum of p is the target, to the tolerance or to a step that leaves no larger error."""
    low, high = bracket
    threshold = start
    for _ in range(MAX_STEPS):
        total, slope, skew = sums(threshold).tolist()
        excess = total - target
        if abs(excess) <= RELATIVE_TOLERANCE * target or low >= high:
            break
        low, high = (threshold, high) if excess > 0 else (low, threshold)
        if abs(excess) <= slope / 2:
            step = excess / (slope - excess * (1 - 2 * skew / slope) / 2)
        elif slope > 0 and total < num_samples:
            # Newton on the log-odds of the mean, which is straight far from the root, where the sum is not
            log_odds = math.log(total / (num_samples - total)) - math.log(target / (num_samples - target))
            step = log_odds * total * (1 - total / num_samples) / slope
        else:
            step = math.inf
        # a step out of the bracket is replaced by bisection
        is_inside = low < threshold + step < high
        threshold = threshold + step if is_inside else (low + high) / 2
        if is_inside and abs(step) <= negligible_step:
            break
    return threshold


def inclusion_probabilities(logits_N: Tensor, num_selected: int, *, over_slices: OverSlices = in_one_slice) -> Tensor:
    """Probability of keeping each sample.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].
        over_slices: see `solve_threshold`.

    Returns:
        float64 (N,), in [0, 1], with sum `num_selected`; below NEGLIGIBLE it is 0.

    Example:
        >>> inclusion_probabilities(torch.zeros(4), 1)
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    p_N = (logits_N.double() - solve_threshold(logits_N, num_selected, over_slices=over_slices)).sigmoid_()
    return torch.threshold_(p_N, NEGLIGIBLE, 0.0)


def ascent_direction(gradient_N: Tensor, p_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
    """Direction of entropic mirror ascent on the logits: (g - c) / rms(g - c).

    c = sum p (1 - p) g / sum p (1 - p) keeps the budget to first order. The factor p (1 - p) of plain gradient ascent
    on the logits does not appear, so a nearly settled sample can still change its mind.

    Args:
        gradient_N: float64 (N,), dF/dp.
        p_N: float64 (N,), inclusion probabilities.
        over_slices: how sums over the rows are taken, and shared among ranks that all hold both.

    Returns:
        float64 (N,), of root mean square 1; all zero if every sample has the same gradient.

    Example:
        >>> ascent_direction(torch.tensor([1.0, 3.0]).double(), torch.tensor([0.5, 0.5]).double())
        tensor([-1.,  1.], dtype=torch.float64)
    """
    origin = gradient_N[0]

    def part(rows: slice) -> Tensor:
        # from the first sample's gradient: squares of gradients that are all far from 0 would cancel
        gradient_C, p_C = gradient_N[rows] - origin, p_N[rows]
        variance_C = p_C * (1 - p_C)
        sums = [variance_C.sum(), variance_C.mul_(gradient_C).sum(), gradient_C.sum()]
        return torch.stack([*sums, gradient_C.square_().sum()])

    total, weighted, plain, squares = over_slices(part).sum(0)
    mean = plain / gradient_N.numel()
    center = torch.where(total > 0, weighted / total, mean)
    rms = (squares / gradient_N.numel() - center * (2 * mean - center)).clamp(min=0).sqrt()
    # below this the differences are the rounding of equal gradients
    factor = torch.where(rms > 1e-12 * origin.abs(), 1 / rms, 0.0)
    return (gradient_N - (origin + center)).mul_(factor)


def entropy_share(p_N: Tensor, num_selected: int | Tensor) -> Tensor:
    """Share of the budget that is still undecided: sum p (1 - p) / budget, scalar in [0, 1]."""
    return (1 - p_N.dot(p_N) / num_selected).clamp(min=0)
