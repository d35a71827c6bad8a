"""Plackett-Luce: k samples without replacement from softmax(logits), and the score of a draw.

Shapes: R rollouts, N samples, K samples drawn in a rollout.

Source: arXiv:2512.24265, section 3, draws sequentially and renormalises; the Gumbel-top-k trick (Yellott 1977;
arXiv:1903.06059) draws from the same distribution in one pass. Minus a Gumbel key is the logarithm of a clock's time in
the exponential race, which we use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from datamask_pl.functional.kernels import positions, smallest
from datamask_pl.functional.rollouts.exponential_race import rung_probabilities, solve_log_time

# Values of the part of a uniform number that every sample gets.
COARSE = 2**31


class Draws(NamedTuple):
    """Ordered draws.

    Attributes:
        draws_RK: int64 (R, K), rows in the order in which they were drawn.
        log_times_R: float64 (R,), logarithm of the time at which the clock of the last one rang.
    """

    draws_RK: Tensor
    log_times_R: Tensor


def draw_group(logits_N: Tensor, num_selected: int, *, generators: list[torch.Generator]) -> Draws:
    """Draws ordered samples of `num_selected` without replacement, each from randomness of its own.

    A uniform number a sample, in two parts: 31 bits for all, 53 more for those that may be among the first K to ring.
    They are those that ring before a time by which more than K are expected to. Where fewer than K do, the others get
    their second part, too: the distribution is exact whatever the time. Nothing depends on exp(logit) being
    representable, so no gap between logits makes a sample impossible or another one certain by underflow, and there is
    no limit on the number of samples.

    Args:
        logits_N: float (N,), finite.
        num_selected: K, in [1, N].
        generators: R sources of randomness, on the device of the logits; a draw depends on its own alone.

    Returns:
        The draws, and when their last clocks rang.
    """
    draws, log_times = zip(*draw_each(logits_N, num_selected, generators=generators), strict=True)
    return Draws(torch.stack(draws), torch.stack(log_times))


def draw_each(
    logits_N: Tensor, num_selected: int, *, generators: Iterable[torch.Generator]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The draws of `draw_group` one by one, for those who need not have all at once.

    Args:
        logits_N: float (N,), finite.
        num_selected: K, in [1, N].
        generators: a source of randomness for each draw, on the device of the logits; may all be the same.

    Yields:
        int64 (K,), rows in the order in which they were drawn, and the logarithm of when the last clock rang.

    Example:
        >>> logits = torch.tensor([0.0, 200.0, -200.0])
        >>> [rows.tolist() for rows, _ in draw_each(logits, 2, generators=[torch.Generator().manual_seed(0)])]
        [[1, 0]]
    """
    logits64_N = logits_N.detach().double()
    log_time = _safe_log_time(logits64_N, num_selected)
    highest_N = rung_probabilities(logits64_N, log_time).mul_(COARSE).clamp_(max=COARSE - 1).int()
    coarse_N = torch.empty_like(highest_N)
    for generator in generators:
        coarse_N.random_(generator=generator)
        is_early_N = coarse_N <= highest_N
        rows = positions(is_early_N)
        log_clock = _log_clocks(logits64_N, coarse_N, rows, generator)
        if rows.numel() < num_selected or (log_clock <= log_time).sum() < num_selected:
            late = positions(~is_early_N)
            log_clock = torch.cat([log_clock, _log_clocks(logits64_N, coarse_N, late, generator)])
            rows = torch.cat([rows, late])
        first_K = smallest(log_clock, num_selected)
        yield rows[first_K], log_clock[first_K[-1]]


def _safe_log_time(logits64_N: Tensor, num_selected: int) -> float:
    """Logarithm of a time by which K clocks have rung all but once in 1,000 draws, or infinity for few samples."""
    # the number that has rung by then is a sum of independent 0s and 1s: Chernoff's bound is exp(-(m - k)^2 / 2m)
    num_expected = num_selected + 5.0 * math.sqrt(num_selected) + 12.0
    return solve_log_time(logits64_N, num_expected) if 2 * num_expected < logits64_N.numel() else math.inf


def _log_clocks(logits64_N: Tensor, coarse_N: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Logarithms of ringing times, from 31 random bits and 53 new ones below them: no ties among 2^24 clocks."""
    uniform = torch.rand(rows.shape, dtype=torch.float64, device=rows.device, generator=generator)
    uniform.add_(coarse_N.index_select(0, rows)).mul_(1.0 / COARSE)
    return uniform.neg_().log1p_().neg_().log_().sub_(logits64_N.index_select(0, rows))


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
