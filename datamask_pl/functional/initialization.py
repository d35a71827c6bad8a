"""Logits to start from, so that better samples start with better odds.

Shapes: N samples.
"""

from __future__ import annotations

from torch import Tensor

# No sample starts with less than this share of the mean score: its logit stays finite, and it can still be drawn.
MIN_SHARE = 1e-3


def positive_scores(quality_N: Tensor) -> Tensor:
    """Scores with mean 1, all positive: shifted to a minimum of 0 if any is negative, then raised to MIN_SHARE.

    Args:
        quality_N: float (N,), scaled quality, finite.

    Returns:
        float64 (N,); all 1 if the scores are equal to each other.

    Example:
        >>> import torch
        >>> positive_scores(torch.tensor([0.0, 1.0, 1.0]))
        tensor([1.0000e-03, 1.5000e+00, 1.5000e+00], dtype=torch.float64)
    """
    scores_N = quality_N.double()
    scores_N = scores_N - scores_N.min().clamp(max=0.0)
    mean = scores_N.mean()
    if mean == 0:
        return scores_N + 1.0
    return (scores_N / mean).clamp(min=MIN_SHARE)


def quality_logits(quality_N: Tensor) -> Tensor:
    """Plackett-Luce logits whose softmax is proportional to the score: log score.

    Args:
        quality_N: float (N,), scaled quality, finite.

    Returns:
        float64 (N,).

    Source: arXiv:2512.24265; the treatment of zero and negative scores is ours.
    """
    return positive_scores(quality_N).log()


def quality_log_odds(quality_N: Tensor, num_selected: int) -> Tensor:
    """Logits of independent inclusion with probability proportional to the score, as far as that is below 1.

    Args:
        quality_N: float (N,), scaled quality, finite.
        num_selected: the budget, in [1, N].

    Returns:
        float64 (N,).

    Example:
        >>> import torch
        >>> quality_log_odds(torch.tensor([1.0, 1.0, 2.0, 4.0]), 1).sigmoid()
        tensor([0.1250, 0.1250, 0.2500, 0.5000], dtype=torch.float64)
    """
    p_N = positive_scores(quality_N) * (num_selected / quality_N.numel())
    return p_N.clamp(max=1.0 - MIN_SHARE).logit()
