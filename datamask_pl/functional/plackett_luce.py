"""Plackett-Luce: k samples without replacement from softmax(logits), and the score of a draw.

Shapes: R rollouts, N samples, K samples drawn in a rollout.

Source: arXiv:2512.24265, section 3, draws sequentially and renormalises; the Gumbel-top-k trick (Yellott 1977;
arXiv:1903.06059) draws from the same distribution in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.functional.device import largest


def draw(logits_N: Tensor, num_selected: int, *, generator: torch.Generator) -> Tensor:
    """Draws one ordered sample of `num_selected` without replacement.

    Nothing is exponentiated, so no gap between logits makes a sample impossible or another one certain by underflow,
    and there is no limit on the number of samples.

    Args:
        logits_N: float (N,), finite.
        num_selected: K, in [1, N].
        generator: source of randomness, on the device of the logits.

    Returns:
        int64 (K,), rows in the order in which they were drawn.

    Example:
        >>> logits = torch.tensor([0.0, 200.0, -200.0])
        >>> draw(logits, 2, generator=torch.Generator().manual_seed(0)).tolist()
        [1, 0]
    """
    # float64: a 24-bit uniform has ties among the largest of 2^24 Gumbel keys
    noise_N = torch.empty(logits_N.shape, dtype=torch.float64, device=logits_N.device)
    noise_N.exponential_(generator=generator)
    keys_N = noise_N.log_().neg_().add_(logits_N.detach())
    return largest(keys_N, num_selected)


def masks_of(draws_RK: Tensor, num_samples: int) -> Tensor:
    """Turns draws into masks.

    Args:
        draws_RK: int64 (R, K), rows drawn.
        num_samples: N.

    Returns:
        bool (R, N), True where drawn.
    """
    masks_RN = torch.zeros(draws_RK.shape[0], num_samples, dtype=torch.bool, device=draws_RK.device)
    return masks_RN.scatter_(1, draws_RK, True)


def log_prob(logits_N: Tensor, draws_RK: Tensor) -> Tensor:
    """Log-probability of ordered draws: sum over t of logit_t - log Z_t.

    Args:
        logits_N: float (N,).
        draws_RK: int64 (R, K), distinct rows in each draw.

    Returns:
        float64 (R,).

    Example:
        >>> log_prob(torch.zeros(3), torch.tensor([[0, 1]])).exp()
        tensor([0.1667], dtype=torch.float64)
    """
    drawn_RK = logits_N.double()[draws_RK]
    return (drawn_RK - _log_normalizers(logits_N, draws_RK)).sum(1)


def score(logits_N: Tensor, draws_RK: Tensor) -> Tensor:
    """Gradient of the log-probability of ordered draws with respect to the logits, in O(N + K) a rollout.

    d log P / d logit_j = [j drawn] - exp(logit_j) * sum over t up to j's position (all t if not drawn) of 1 / Z_t.
    Z_t comes from a cumulative log-sum-exp that starts at the last draw, so that nothing cancels.

    Args:
        logits_N: float (N,).
        draws_RK: int64 (R, K), distinct rows in each draw.

    Returns:
        float64 (R, N).

    Example:
        >>> score(torch.zeros(4), torch.tensor([[2]]))
        tensor([[-0.2500, -0.2500,  0.7500, -0.2500]], dtype=torch.float64)
    """
    logits64_N = logits_N.detach().double()
    # log of sum_{s <= t} 1 / Z_s
    log_hazard_RK = torch.logcumsumexp(-_log_normalizers(logits64_N, draws_RK), dim=1)
    score_RN = (logits64_N + log_hazard_RK[:, -1:]).exp_().neg_()
    drawn_RK = 1.0 - (logits64_N[draws_RK] + log_hazard_RK).exp_()
    return score_RN.scatter_(1, draws_RK, drawn_RK)


def _log_normalizers(logits_N: Tensor, draws_RK: Tensor) -> Tensor:
    """Log Z_t: float64 (R, K), log-sum-exp of the logits that are not drawn before position t."""
    logits64_N = logits_N.double()
    undrawn_RN = logits64_N.expand(draws_RK.shape[0], -1).masked_fill(masks_of(draws_RK, logits_N.numel()), -torch.inf)
    rest_R1 = undrawn_RN.logsumexp(1, keepdim=True)
    from_last_RK = torch.cat([rest_R1, logits64_N[draws_RK].flip(1)], dim=1).logcumsumexp(1)[:, 1:]
    return from_last_RK.flip(1)
