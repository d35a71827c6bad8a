"""The policy that keeps every sample independently, and the ascent on its logits.

Every sample is kept with probability p = sigmoid(logit - threshold), the threshold such that the probabilities add up
to the budget. E f over these masks is the multilinear extension of f (Calinescu et al. 2011), and its gradient in p is
the policy gradient with the noise of every coordinate integrated out.

Shapes: N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_NEWTON_STEPS = 100
RELATIVE_TOLERANCE = 1e-12
# A million samples of this probability add up to a millionth of one. Zeros can be skipped, and products of smaller
# numbers would be subnormal in float32, a hundred times slower.
NEGLIGIBLE = 1e-12


def solve_threshold(logits_N: Tensor, num_selected: int) -> Tensor:
    """Finds the threshold at which sigmoid(logits - threshold) adds up to the budget.

    Safeguarded Newton in float64, from a bracket that is known to hold the root.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].

    Returns:
        float64 scalar; -inf if everything is kept.

    Example:
        >>> solve_threshold(torch.tensor([1.0, 1.0]), 1)
        tensor(1., dtype=torch.float64)
    """
    logits64_N = logits_N.double()
    num_samples = logits64_N.numel()
    if num_selected == num_samples:
        return torch.tensor(-torch.inf, dtype=torch.float64, device=logits_N.device)
    uniform_logit = torch.tensor(num_selected / num_samples, dtype=torch.float64).logit().item()
    low, high = logits64_N.min().item() - uniform_logit, logits64_N.max().item() - uniform_logit
    threshold = (low + high) / 2
    for _ in range(MAX_NEWTON_STEPS):
        p_N = torch.sigmoid(logits64_N - threshold)
        excess = p_N.sum().item() - num_selected
        if abs(excess) <= RELATIVE_TOLERANCE * num_selected or low == high:
            break
        low, high = (threshold, high) if excess > 0 else (low, threshold)
        slope = (p_N * (1 - p_N)).sum().item()
        newton = threshold + excess / slope if slope > 0 else low
        # a Newton step out of the bracket is replaced by bisection
        threshold = newton if low < newton < high else (low + high) / 2
    return torch.tensor(threshold, dtype=torch.float64, device=logits_N.device)


def inclusion_probabilities(logits_N: Tensor, num_selected: int) -> Tensor:
    """Probability of keeping each sample.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].

    Returns:
        float64 (N,), in [0, 1], with sum `num_selected`; below NEGLIGIBLE it is 0.

    Example:
        >>> inclusion_probabilities(torch.zeros(4), 1)
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    p_N = torch.sigmoid(logits_N.double() - solve_threshold(logits_N, num_selected))
    return p_N.masked_fill_(p_N < NEGLIGIBLE, 0.0)


def ascent_direction(gradient_N: Tensor, p_N: Tensor) -> Tensor:
    """Direction of entropic mirror ascent on the logits: (g - c) / rms(g - c).

    c = sum p (1 - p) g / sum p (1 - p) keeps the budget to first order. The factor p (1 - p) of plain gradient ascent
    on the logits does not appear, so a nearly settled sample can still change its mind.

    Args:
        gradient_N: float64 (N,), dF/dp.
        p_N: float64 (N,), inclusion probabilities.

    Returns:
        float64 (N,), of root mean square 1; all zero if every sample has the same gradient.

    Example:
        >>> ascent_direction(torch.tensor([1.0, 3.0]).double(), torch.tensor([0.5, 0.5]).double())
        tensor([-1.,  1.], dtype=torch.float64)
    """
    variance_N = p_N * (1 - p_N)
    total = variance_N.sum()
    center = (variance_N * gradient_N).sum() / total if total > 0 else gradient_N.mean()
    centered_N = gradient_N - center
    rms = centered_N.square().mean().sqrt()
    # below this the differences are the rounding of equal gradients
    if rms <= 1e-12 * gradient_N.abs().max():
        return torch.zeros_like(centered_N)
    return centered_N / rms


def undecided_share(p_N: Tensor, num_selected: int) -> Tensor:
    """How much of the budget is still undecided: sum p (1 - p) / budget, scalar in [0, 1]."""
    return (p_N * (1 - p_N)).sum() / num_selected
