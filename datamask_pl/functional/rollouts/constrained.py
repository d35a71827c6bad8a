"""Plackett-Luce within a constraint: in every group, one after the other is drawn from softmax over what still fits.

Without costs this is a Plackett-Luce draw of its own in each group. With costs, taking samples in the order of
Gumbel keys and skipping those that no longer fit is the same as drawing, again and again, from the softmax over the
samples that still fit: what is left in the budget only falls, so a sample that does not fit never will, and the odds
between the others do not depend on it (Luce's choice axiom). So the probability of a draw is a product of softmaxes,
each over the samples that could have been drawn in that step, and so is its score. What is kept in any case has
no chance to be drawn, and no score.

Shapes: R rollouts, N samples, F free samples sorted by group, G groups, K samples drawn from one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.constraint import Constraint
from datamask_pl.functional.rollouts import control_variate


@dataclass(frozen=True)
class ConstrainedDraw:
    """One draw from every group.

    Attributes:
        mask_N: bool (N,), what is drawn and what is kept in any case.
        drawn: of every group, int64 (K,), positions among its free samples in the order in which they were drawn.
        last_step_F: int64 (F,), the last step of its group in which a sample could be drawn; -1 if it never could.
        log_times: of every group, float64 (at most 1,), logarithm of the time at which the last one's clock rang, as
            in `control_variate`; empty where none was drawn.
    """

    mask_N: Tensor
    drawn: tuple[Tensor, ...]
    last_step_F: Tensor
    log_times: tuple[Tensor, ...]


def gumbel_keys(logits_N: Tensor, *, generator: torch.Generator) -> Tensor:
    """Keys whose order is a Plackett-Luce draw of all samples: float64 (N,)."""
    noise_N = torch.empty(logits_N.shape, dtype=torch.float64, device=logits_N.device)
    noise_N.exponential_(generator=generator)
    return noise_N.log_().neg_().add_(logits_N.detach())


def draw(logits_N: Tensor, constraint: Constraint, *, generator: torch.Generator) -> ConstrainedDraw:
    """Draws what fits, group by group.

    Args:
        logits_N: float (N,), finite.
        constraint: which masks are allowed.
        generator: source of randomness, on the device of the logits.
    """
    keys_N = gumbel_keys(logits_N, generator=generator)
    mask_N = constraint.fill(keys_N)
    order = constraint.by_score(keys_N)
    order = order[mask_N[constraint.rows_F[order]]]
    last_step_F = torch.empty_like(constraint.rows_F)
    drawn, log_times = [], []
    start = 0
    for group, (length, room) in enumerate(zip(constraint.lengths, constraint.room_G, strict=True)):
        chosen_K = order[constraint.group_F[order] == group] - start if len(constraint.lengths) > 1 else order
        cost_K = constraint.cost_F[start : start + length][chosen_K]
        # ascending: what is left before the last step comes first
        left_K = (room - (cost_K.cumsum(0) - cost_K)).flip(0)
        num_late = torch.searchsorted(left_K, constraint.cost_F[start : start + length])
        last_step = len(chosen_K) - 1 - num_late
        last_step[chosen_K] = torch.arange(len(chosen_K), device=order.device)
        last_step_F[start : start + length] = last_step
        drawn.append(chosen_K)
        # minus a Gumbel key is the logarithm of a clock's time
        log_times.append(-keys_N[constraint.rows_F[start + chosen_K[-1:]]])
        start += length
    return ConstrainedDraw(mask_N, tuple(drawn), last_step_F, tuple(log_times))


def log_prob(logits_N: Tensor, constraint: Constraint, drawn: ConstrainedDraw) -> Tensor:
    """Log-probability of a draw: float64 scalar, differentiable in the logits."""
    total = torch.zeros((), dtype=torch.float64, device=logits_N.device)
    for logits_J, chosen_K, last_step_J in _by_group(logits_N, constraint, drawn):
        if len(chosen_K):
            total = total + (logits_J[chosen_K] - _log_normalizers(logits_J, last_step_J, len(chosen_K))).sum()
    return total


def score(logits_N: Tensor, constraint: Constraint, drawn: ConstrainedDraw) -> Tensor:
    """Gradient of the log-probability of a draw, in closed form.

    d log P / d logit_j = [j drawn] - exp(logit_j) * sum of 1 / Z_t over the steps t in which j could be drawn.

    Args:
        logits_N: float (N,).
        constraint: that of the draw.
        drawn: from `draw`.

    Returns:
        float64 (N,), at most 1 and at least minus the number of samples drawn.
    """
    scores = []
    for logits_J, chosen_K, last_step_J in _by_group(logits_N.detach(), constraint, drawn):
        score_J = torch.zeros_like(logits_J)
        if len(chosen_K):
            log_hazard_K = torch.logcumsumexp(-_log_normalizers(logits_J, last_step_J, len(chosen_K)), dim=0)
            expected_J = (logits_J + log_hazard_K[last_step_J.clamp(min=0)]).exp_()
            score_J = torch.where(last_step_J >= 0, -expected_J, 0.0)
            score_J[chosen_K] += 1.0
        scores.append(score_J)
    score_N = torch.zeros(logits_N.numel(), dtype=torch.float64, device=logits_N.device)
    score_N[constraint.rows_F] = torch.cat(scores)
    return score_N


def linear_gradient_sum(
    logits_N: Tensor, constraint: Constraint, draws: list[ConstrainedDraw], slopes_N: Tensor, *, num_rollouts: int
) -> Tensor:
    """`control_variate.linear_gradient_sum` of every group, each of which is a race of its own: float64 (N,).

    Args:
        logits_N: float (N,).
        constraint: that of the draws, without costs.
        draws: of a chunk.
        slopes_N: float64 (N,), the linear reward.
        num_rollouts: of all chunks.
    """
    assert not constraint.has_costs
    gradient_N = torch.zeros(logits_N.numel(), dtype=torch.float64, device=logits_N.device)
    for group, rows_J in enumerate(torch.split(constraint.rows_F, constraint.lengths)):
        log_times_C = torch.cat([drawn.log_times[group] for drawn in draws])
        if log_times_C.numel():
            gradient_N[rows_J] = control_variate.linear_gradient_sum(
                logits_N[rows_J],
                torch.stack([drawn.mask_N[rows_J] for drawn in draws]),
                log_times_C,
                slopes_N[rows_J],
                num_rollouts=num_rollouts,
            )
    return gradient_N


def dual_direction(logits_N: Tensor, constraint: Constraint, *, linear_N: Tensor, rest_N: Tensor) -> Tensor:
    """`control_variate.dual_direction` of every group, each of which is a race of its own: float64 (N,).

    Args:
        logits_N: float (N,).
        constraint: without costs.
        linear_N: float64 (N,), policy gradient of the rewards' linear part.
        rest_N: float64 (N,), estimated policy gradient of the rest.

    Returns:
        float64 (N,), zero for samples of groups that are decided, and those that are not free.
    """
    assert not constraint.has_costs
    direction_N = torch.zeros_like(linear_N)
    parts = zip(torch.split(constraint.rows_F, constraint.lengths), constraint.room_G.tolist(), strict=True)
    for rows_J, room in parts:
        if room:
            direction_N[rows_J] = control_variate.dual_direction(
                logits_N[rows_J], linear_N[rows_J], rest_N[rows_J], num_selected=int(room)
            )
    return direction_N


def _by_group(logits_N: Tensor, constraint: Constraint, drawn: ConstrainedDraw) -> list[tuple[Tensor, Tensor, Tensor]]:
    logits_F = logits_N[constraint.rows_F].double()
    lengths = constraint.lengths
    return list(zip(torch.split(logits_F, lengths), drawn.drawn, torch.split(drawn.last_step_F, lengths), strict=True))


def _log_normalizers(logits_J: Tensor, last_step_J: Tensor, num_steps: int) -> Tensor:
    """Log Z_t: float64 (K,), log-sum-exp of the logits that could be drawn in step t."""
    late_first = last_step_J.argsort(descending=True, stable=True)
    from_last = logits_J[late_first].logcumsumexp(0)
    steps = torch.arange(num_steps, device=logits_J.device)
    # how many samples could still be drawn in each step
    num_there_K = len(late_first) - torch.searchsorted(last_step_J[late_first].flip(0), steps)
    return from_last[num_there_K - 1]
