"""From the rewards of a group of rollouts to advantages, and from advantages to a gradient.

Shapes: R rollouts of a group, C rollouts of a chunk, N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.functional.exact_sum import round_to_grid

# Rewards closer together than this share of their size differ by rounding alone.
RELATIVE_SPREAD = 1e-12


def has_spread(rewards_R: Tensor) -> bool:
    """True if the rewards differ by more than rounding.

    Args:
        rewards_R: float64 (R,), finite.
    """
    spread = rewards_R.max() - rewards_R.min()
    return bool(spread > RELATIVE_SPREAD * rewards_R.abs().max())


def group_relative_advantage(rewards_R: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """The paper's advantage: (reward - mean) / (standard deviation + epsilon), over the group.

    Args:
        rewards_R: float64 (R,), R at least 2.
        epsilon: keeps the division finite, in units of the reward.

    Returns:
        float64 (R,), all zero if the rewards do not differ.

    Source: arXiv:2512.24265, section 3; the deviation is the population's.

    Example:
        >>> group_relative_advantage(torch.tensor([1.0, 3.0]).double())
        tensor([-1.0000,  1.0000], dtype=torch.float64)
    """
    if not has_spread(rewards_R):
        return torch.zeros_like(rewards_R)
    return (rewards_R - rewards_R.mean()) / (rewards_R.std(correction=0) + epsilon)


def leave_one_out_advantage(rewards_R: Tensor) -> Tensor:
    """Reward minus the mean of the other rewards; its policy gradient is unbiased.

    Args:
        rewards_R: float64 (R,), R at least 2.

    Returns:
        float64 (R,), all zero if the rewards do not differ.

    Source: Kool, van Hoof, Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free!".

    Example:
        >>> leave_one_out_advantage(torch.tensor([1.0, 2.0, 6.0]).double())
        tensor([-3.0000, -1.5000,  4.5000], dtype=torch.float64)
    """
    num_rollouts = rewards_R.numel()
    if not has_spread(rewards_R):
        return torch.zeros_like(rewards_R)
    return (rewards_R - rewards_R.mean()) * (num_rollouts / (num_rollouts - 1))


def weighted_score_sum(scores_CN: Tensor, advantages_C: Tensor, *, bound: float) -> Tensor:
    """Sum over rollouts of advantage * score, on a grid: the order of the rollouts does not change a bit.

    Args:
        scores_CN: float64 (C, N), from `plackett_luce.score`; overwritten.
        advantages_C: float64 (C,).
        bound: upper bound on the sum of |advantage * score| of one sample over all rollouts of the group.

    Returns:
        float64 (N,).
    """
    return round_to_grid(scores_CN.mul_(advantages_C[:, None]), bound=bound).sum(0)


def squared_noise_sum(scores_CN: Tensor, advantages_C: Tensor, *, bound: float) -> Tensor:
    """Sum over rollouts of |advantage * score|^2, on a grid; R^2 times the squared length of a mean that is all noise.

    Args:
        scores_CN: float64 (C, N), from `plackett_luce.score`.
        advantages_C: float64 (C,).
        bound: upper bound on the sum over all rollouts of the group.

    Returns:
        float64 scalar.
    """
    return round_to_grid(scores_CN.square().sum(1) * advantages_C.square(), bound=bound).sum()


def shrinkage(estimate_N: Tensor, squared_noise: Tensor) -> Tensor:
    """By how much to shrink an estimate of which part is noise: 1 - noise / |estimate|^2, and 0 where that is negative.

    Args:
        estimate_N: float64 (N,).
        squared_noise: float64 scalar, expected squared length of the estimate if it were noise alone.

    Returns:
        float64 scalar in [0, 1].

    Source: James and Stein 1961; the positive part.

    Example:
        >>> shrinkage(torch.tensor([3.0, 4.0]).double(), torch.tensor(5.0).double())
        tensor(0.8000, dtype=torch.float64)
    """
    squared_length = estimate_N.square().sum()
    return (1.0 - squared_noise / squared_length.clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0.0)


def normalized(gradient_N: Tensor) -> Tensor:
    """The gradient divided by its root mean square; all zero where it is.

    Args:
        gradient_N: float64 (N,).

    Example:
        >>> normalized(torch.tensor([3.0, -3.0]).double())
        tensor([ 1., -1.], dtype=torch.float64)
    """
    rms = gradient_N.square().mean().sqrt()
    return gradient_N / torch.where(rms > 0, rms, 1.0)
