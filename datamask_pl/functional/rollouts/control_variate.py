"""The policy gradient of a linear reward, with the noise of every sample's own clock integrated out.

A reward is largely linear in the mask: R(S) = sum over S of g_i, plus a rest of smaller spread. The score function
estimator is left with the rest alone, if the gradient of the linear part is known without it.

In the exponential race (see `exponential_race`) sample j is drawn if its clock rings before the K-th of the others
does, at tau; else that K-th other, c, is drawn in its place. Given the other clocks, which do not depend on logit_j,
the first has probability 1 - exp(-w_j tau), w = exp(logit), so that

    d/d logit_j of E[sum over S of g | other clocks] = w_j tau exp(-w_j tau) (g_j - g_c)

For a drawn j, tau is the time u of the (K+1)-th ring and c the sample that rings then. For another, tau is the time t
of the K-th and c the sample that rang then. Given S and t, the clocks outside S start anew: u - t is exponential with
rate W = sum over the rest of w, and independent of who rings, i with probability w_i / W. And the last to ring in S was
i with probability proportional to w_i / (exp(w_i t) - 1). With these expectations taken, too, one rollout gives

    j in S       w_j exp(-w_j t) (t + 1 / (W + w_j)) W / (W + w_j)  *  (g_j - mean of g over who may ring next)
    j not in S   w_j exp(-w_j t) t  *  (g_j - mean of g over who may have rung last)

whose mean is exactly the gradient of E sum over S of g_i. Nothing is approximated, and no reward is evaluated.

Dual coordinates. To within O(1 / K), t is the time T by which K clocks are expected to have rung, that gradient is
d_j (g_j - c) with d_j = w_j T exp(-w_j T), the derivative of sample j's inclusion probability in its logit, and c
common to all: the slope in p, times the policy's own Jacobian. `multilinear` ascends along the slope, without the
Jacobian, and so does `dual_direction`: it divides by d_j. A nearly settled sample is then free to change its mind, and
samples of different logits move in proportion to what they gain. This is a preconditioner with positive entries: it
changes the direction's length and angle, but not where it is zero.

Shapes: C rollouts of a chunk, N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.rollouts.exponential_race import ringing_rates, solve_log_time

# exp(exp(50)) is infinite, and exp(-700) the end of float64: hazards beyond them act as if they were there.
MIN_LOG_HAZARD, MAX_LOG_HAZARD = -700.0, 50.0
SMALLEST = torch.finfo(torch.float64).tiny
# Gradients below this share of the slopes are settled samples'; less than a millionth of them is the grid of sums.
MIN_RATE = 1e-9


def linear_gradient(logits_N: Tensor, masks_CN: Tensor, log_times_C: Tensor, slopes_N: Tensor) -> Tensor:
    """Unbiased estimates of the gradient of E sum_{i in S} slope_i with respect to the logits, one from each rollout.

    Args:
        logits_N: float (N,).
        masks_CN: bool (C, N), the sets drawn.
        log_times_C: float64 (C,), logarithm of the time of the last ring of each, from `plackett_luce.draw_group`.
        slopes_N: float64 (N,), the linear reward.

    Returns:
        float64 (C, N).

    Source: ours; conditional Monte Carlo on an exponential race.

    Example:
        >>> mask = torch.tensor([[True, False]])
        >>> linear_gradient(torch.zeros(2), mask, torch.zeros(1).double(), torch.tensor([1.0, 0.0]).double())
        tensor([[ 0.2759, -0.3679]], dtype=torch.float64)
    """
    # in units of t
    hazard_CN = (logits_N.detach().double() + log_times_C[:, None]).clamp_(MIN_LOG_HAZARD, MAX_LOG_HAZARD).exp_()
    rung_CN = torch.expm1(-hazard_CN).neg_()
    density_CN = torch.addcmul(hazard_CN, hazard_CN, rung_CN, value=-1.0)
    last_C1 = _weighted_mean((density_CN / rung_CN).masked_fill_(~masks_CN, 0.0), slopes_N)
    rest_CN = hazard_CN.masked_fill(masks_CN, 0.0)
    next_C1 = _weighted_mean(rest_CN, slopes_N)
    rest_C1 = rest_CN.sum(1, keepdim=True)
    both_CN = hazard_CN.add_(rest_C1)
    # t + 1 / (W + w_j) in units of t, times W / (W + w_j); where all are drawn W is 0 and nobody is next
    drawn_CN = both_CN.reciprocal_().add_(both_CN.square()).mul_(rest_C1)
    density_CN *= torch.where(masks_CN, drawn_CN, 1.0)
    return density_CN.mul_(slopes_N - torch.where(masks_CN, next_C1, last_C1))


def _weighted_mean(weights_CN: Tensor, slopes_N: Tensor) -> Tensor:
    """Mean of the slopes by the weights of each row: (C, 1), 0 where no weight is."""
    return (weights_CN @ slopes_N[:, None]) / weights_CN.sum(1, keepdim=True).clamp_(min=SMALLEST)


def linear_gradient_sum(
    logits_N: Tensor, masks_CN: Tensor, log_times_C: Tensor, slopes_N: Tensor, *, num_rollouts: int
) -> Tensor:
    """Sum of `linear_gradient` over a chunk of `num_rollouts`, on a grid: the order of chunks does not change a bit."""
    # the expectation of w u exp(-w u) is at most 1 / e, and the difference of slopes twice the largest
    bound = num_rollouts * float(slopes_N.abs().max()) or 1.0
    return round_to_grid(linear_gradient(logits_N, masks_CN, log_times_C, slopes_N), bound=bound).sum(0)


def dual_direction(logits_N: Tensor, linear_N: Tensor, rest_N: Tensor, *, num_selected: int) -> Tensor:
    """The linear part's gradient divided by each sample's d_j, plus the rest's divided by the mean of d.

    The rest is mostly noise, which is as large where d_j is small as elsewhere: dividing it by d_j would amplify it
    there. The linear part has hardly any.

    Args:
        logits_N: float (N,).
        linear_N: float64 (N,), policy gradient of the rewards' linear part.
        rest_N: float64 (N,), estimated policy gradient of the rest.
        num_selected: K, in [1, N].

    Returns:
        float64 (N,), along the slope in p of the expected reward; all zero if all are drawn.

    Source: ours; entropic mirror ascent, as in `multilinear.ascent_direction`.

    Example:
        >>> logits = torch.zeros(2)
        >>> linear = torch.tensor([1.0, -1.0]).double() * 0.3466  # 0.3466 = log(2) / 2
        >>> dual_direction(logits, linear, torch.zeros(2).double(), num_selected=1)
        tensor([ 1.0001, -1.0001], dtype=torch.float64)
    """
    if num_selected == logits_N.numel():
        return torch.zeros_like(linear_N)
    rate_N = ringing_rates(logits_N, solve_log_time(logits_N, num_selected))
    return linear_N / rate_N.clamp(min=MIN_RATE) + rest_N / rate_N.mean().clamp(min=MIN_RATE)
