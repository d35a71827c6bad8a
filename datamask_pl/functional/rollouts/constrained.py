"""Rollouts of a constrained budget: the score of a draw, and the policy gradient of a linear reward.

Every group of samples has a Plackett-Luce draw of its own, of what still fits; see `constraint`.

Shapes: N samples, F free samples sorted by group, J free samples of a group, K samples drawn from a group, C rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.rollouts import control_variate


@dataclass(frozen=True)
class ConstrainedDraw:
    """One rollout: a draw from every group.

    Attributes:
        mask_N: bool (N,), the drawn samples and those that are always kept.
        drawn: per group, int64 (K,), positions among its free samples in the order in which they were drawn.
        last_step_F: int64 (F,), the last step of its group in which a sample could be drawn; -1 if it never could.
        log_times: per group, float64 (at most 1,), logarithm of the time at which the last one's clock rang, as in
            `control_variate`; empty if none was drawn.
    """

    mask_N: Tensor
    drawn: tuple[Tensor, ...]
    last_step_F: Tensor
    log_times: tuple[Tensor, ...]


@dataclass(frozen=True)
class ConstrainedRollouts:
    """Drawn masks, see `Rollouts`.

    Attributes:
        logits_N: float (N,), of the policy.
        rows_F: int64 (F,), the free samples, by group.
        lengths: numbers of free samples of the groups.
        draws: one per rollout.
        has_costs: True if samples have costs: the policy gradient of the linear part is then not known.
    """

    logits_N: Tensor
    rows_F: Tensor
    lengths: list[int]
    draws: list[ConstrainedDraw]
    has_costs: bool

    def masks(self) -> Tensor:
        """See `Rollouts.masks`."""
        return torch.stack([drawn.mask_N for drawn in self.draws])

    def scores(self, slopes_N: Tensor | None, *, num_rollouts: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See `Rollouts.scores`; all of them at once."""
        linear_sum_N = None
        if slopes_N is not None and not self.has_costs:
            linear_sum_N = self.linear_gradient_sum(slopes_N, num_rollouts=num_rollouts)
        scores = [self.score(drawn) for drawn in self.draws]
        yield torch.arange(len(scores)), torch.stack(scores), linear_sum_N

    def log_prob(self, drawn: ConstrainedDraw) -> Tensor:
        """Log-probability of a draw: float64 scalar, differentiable in the logits."""
        total = torch.zeros((), dtype=torch.float64, device=self.logits_N.device)
        for logits_J, chosen_K, last_step_J in self._by_group(self.logits_N, drawn):
            if len(chosen_K):
                total = total + (logits_J[chosen_K] - _log_normalizers(logits_J, last_step_J, len(chosen_K))).sum()
        return total

    def score(self, drawn: ConstrainedDraw) -> Tensor:
        """Gradient of the log-probability of a draw, in closed form.

        d log P / d logit_j = [j drawn] - exp(logit_j) * sum of 1 / Z_t over the steps t in which j could be drawn.

        Returns:
            float64 (N,), at most 1 and at least minus the number of samples drawn.
        """
        scores = []
        for logits_J, chosen_K, last_step_J in self._by_group(self.logits_N.detach(), drawn):
            score_J = torch.zeros_like(logits_J)
            if len(chosen_K):
                log_hazard_K = torch.logcumsumexp(-_log_normalizers(logits_J, last_step_J, len(chosen_K)), dim=0)
                expected_J = (logits_J + log_hazard_K[last_step_J.clamp(min=0)]).exp_()
                score_J = torch.where(last_step_J >= 0, -expected_J, 0.0)
                score_J[chosen_K] += 1.0
            scores.append(score_J)
        score_N = torch.zeros(self.logits_N.numel(), dtype=torch.float64, device=self.logits_N.device)
        score_N[self.rows_F] = torch.cat(scores)
        return score_N

    def linear_gradient_sum(self, slopes_N: Tensor, *, num_rollouts: int) -> Tensor:
        """`control_variate.linear_gradient_sum` of every group, each of which is a race of its own: float64 (N,)."""
        gradient_N = torch.zeros(self.logits_N.numel(), dtype=torch.float64, device=self.logits_N.device)
        for group, rows_J in enumerate(torch.split(self.rows_F, self.lengths)):
            log_times_C = torch.cat([drawn.log_times[group] for drawn in self.draws])
            if log_times_C.numel():
                gradient_N[rows_J] = control_variate.linear_gradient_sum(
                    self.logits_N[rows_J],
                    torch.stack([drawn.mask_N[rows_J] for drawn in self.draws]),
                    log_times_C,
                    slopes_N[rows_J],
                    num_rollouts=num_rollouts,
                )
        return gradient_N

    def _by_group(self, logits_N: Tensor, drawn: ConstrainedDraw) -> list[tuple[Tensor, Tensor, Tensor]]:
        logits = torch.split(logits_N[self.rows_F].double(), self.lengths)
        return list(zip(logits, drawn.drawn, torch.split(drawn.last_step_F, self.lengths), strict=True))


def gumbel_keys(logits_N: Tensor, *, generator: torch.Generator) -> Tensor:
    """Keys whose order is a Plackett-Luce draw of all samples: float64 (N,)."""
    noise_N = torch.empty(logits_N.shape, dtype=torch.float64, device=logits_N.device)
    noise_N.exponential_(generator=generator)
    return noise_N.log_().neg_().add_(logits_N.detach())


def _log_normalizers(logits_J: Tensor, last_step_J: Tensor, num_steps: int) -> Tensor:
    """Log Z_t: float64 (K,), log-sum-exp of the logits that could be drawn in step t."""
    late_first = last_step_J.argsort(descending=True, stable=True)
    from_last = logits_J[late_first].logcumsumexp(0)
    steps = torch.arange(num_steps, device=logits_J.device)
    # how many samples could still be drawn in each step
    num_open_K = len(late_first) - torch.searchsorted(last_step_J[late_first].flip(0), steps)
    return from_last[num_open_K - 1]
