"""One step: from logits and an objective to the direction in which the logits move.

Shapes: M samples of the step, R rollouts of the group, C rollouts of a chunk, K samples kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.constraint import Constraint
from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.rollouts import constrained, exponential_race, plackett_luce
from datamask_pl.functional.rollouts.advantages import (
    group_relative_advantage,
    has_spread,
    leave_one_out_advantage,
    normalized,
    shrinkage,
    squared_noise_sum,
    weighted_score_sum,
)
from datamask_pl.functional.rollouts.control_variate import dual_direction, linear_gradient_sum
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

RolloutEstimator = Literal["group_relative", "leave_one_out"]

# A rank takes whole chunks of rollouts: products with the same shapes round the same on any number of ranks. As many
# ranks as there are chunks have something to do.
MAX_ROLLOUTS_OF_CHUNK, LEAST_NUM_CHUNKS = 16, 8
# Numbers of float64 of which a few arrays fit the second-level cache of a CPU's core.
ELEMENTS_AT_ONCE = 2**17


@dataclass(frozen=True)
class Update:
    """What a step found out.

    Attributes:
        direction_M: float64 (M,), ascent direction, before the learning rate.
        metrics: float64 scalars by name, on the device.
        best_mask_M: bool (M,), the rollout of highest reward, or None where nothing was drawn.
    """

    direction_M: Tensor
    metrics: dict[str, Tensor]
    best_mask_M: Tensor | None = None


def multilinear_update(
    logits_M: Tensor, *, objective: JointObjective, ground: GroundSet, scales: Tensor, step_name: str = "a step"
) -> Update:
    """The exact gradient of the expected objective, and the direction of mirror ascent. Collective.

    Args:
        logits_M: float (M,).
        objective: every term that counts has an expectation.
        ground: the M samples, shared by `ground.ranks`.
        scales: float64 (number of terms,), by which the terms are divided.
        step_name: for error messages.

    Raises:
        ObjectiveError: If an expectation or its gradient is not finite; on all ranks.
    """
    p_M = ground.probabilities(logits_M, is_shared=True)
    expectation, term_values = objective.linearize(p_M, ground, scales, when=f"at {step_name}")
    metrics = {
        "objective/f": expectation.value,
        "policy/undecided": ground.undecided_share(p_M),
    }
    for term, value, scale in zip(objective.terms, term_values, scales.tolist(), strict=True):
        if term.weight > 0 and scale > 0:
            metrics[f"objective/{term.name}"] = value
    metrics |= {f"objective/{name}": value for name, value in expectation.diagnostics.items()}
    return Update(ground.ascent_direction(expectation.gradient_N, p_M), metrics)


def rollout_update(
    logits_M: Tensor,
    *,
    objective: JointObjective,
    ground: GroundSet,
    scales: Tensor,
    estimator: RolloutEstimator,
    num_rollouts: int,
    seed_of: Callable[[int], int],
    ranks: RankGroup,
    step_name: str,
    control_variate: bool,
) -> Update:
    """The policy gradient from a group of Plackett-Luce rollouts, which the ranks share. Collective.

    With a control variate, the rewards are left without their linear part sum_i g_i m_i, g the gradient of the
    objective's expectation at the inclusion probabilities, and that part's own policy gradient is added from
    `control_variate.linear_gradient`, which needs no rewards. The sum is unbiased whatever g is. The direction is not
    that sum: what is left to chance is shrunk by the noise that is seen in it, which is most of it where g is good
    (a bias towards the linear part), the two are taken to dual coordinates by `control_variate.dual_direction`
    (another angle, the same zeros), and the scale is divided out, so that both estimators give the same direction.
    Where samples have costs the linear part's policy gradient is not known, and its slope, with the rest divided by the
    mean of p (1 - p), takes its place, as in `multilinear`.

    Args:
        logits_M: float (M,).
        objective: what the rollouts are rewarded by.
        ground: the M samples; local to each rank.
        scales: float64 (number of terms,), by which the terms are divided.
        estimator: how rewards become advantages.
        num_rollouts: R, over all ranks.
        seed_of: seed of the rollout of an index in the group.
        ranks: who shares the rollouts.
        step_name: for error messages.
        control_variate: use one if every term that counts has an expectation.

    Raises:
        ObjectiveError: If a term of any rollout, or an expectation, is not finite; on all ranks.
    """
    objective.prepare(ground, num_masks=num_rollouts)
    slopes_M: Tensor | None = None
    if control_variate and objective.has_expectation:
        if ground.constraint is None:
            p_M = exponential_race.inclusion_probabilities(logits_M, ground.num_selected)
        else:
            p_M = ground.probabilities(logits_M)
        slopes_M = objective.linearize(p_M, ground, scales, when=f"at {step_name}")[0].gradient_N
    kind: type[_Group] = _Group if ground.constraint is None else _ConstrainedGroup
    group = kind(logits_M, ground, slopes_M, num_rollouts=num_rollouts, seed_of=seed_of, ranks=ranks)
    values = group.values(objective)
    term_values, linear_R = values[:-1], values[-1]
    objective.check_finite(term_values, when=f"at {step_name}")
    rewards_R = objective.combine(term_values, scales)
    if slopes_M is None:
        advantage = group_relative_advantage if estimator == "group_relative" else leave_one_out_advantage
        advantages_R = advantage(rewards_R)
        direction_M = group.gradient(advantages_R)[0]
    else:
        advantages_R = leave_one_out_advantage(rewards_R - linear_R)
        rest_M, linear_M, squared_noise = group.gradient(advantages_R)
        rest_M *= shrinkage(rest_M, squared_noise)
        if ground.has_free_size:
            curvature = (p_M * (1 - p_M)).mean().clamp(min=torch.finfo(torch.float64).tiny)
            direction_M = ground.ascent_direction(slopes_M + rest_M / curvature, p_M)
        elif ground.constraint is not None:
            direction_M = normalized(
                constrained.dual_direction(logits_M, ground.constraint, linear_N=linear_M, rest_N=rest_M)
            )
        else:
            direction_M = normalized(dual_direction(logits_M, linear_M, rest_M, num_selected=ground.num_selected))

    best = int(rewards_R.argmax())
    undecided_p_M = ground.probabilities(logits_M)
    metrics = {
        "objective/f": rewards_R.mean(),
        "objective/f_best": rewards_R[best],
        "policy/undecided": ground.undecided_share(undecided_p_M),
        "policy/advantage_spread": advantages_R.std(correction=0),
        "policy/reward_spread": rewards_R.std(correction=0),
        "policy/groups_without_spread": torch.tensor(float(not has_spread(rewards_R)), dtype=torch.float64),
    }
    metrics |= {f"objective/{term.name}": term_values[index].mean() for index, term in enumerate(objective.terms)}
    return Update(direction_M, metrics, group.mask(best))


class _Group:
    """The rollouts of a step, in chunks that the ranks share.

    Args:
        logits_M: float (M,).
        ground: the M samples.
        slopes_M: float64 (M,), the linear part of the rewards that is treated apart, or None.
        num_rollouts: R, over all ranks.
        seed_of: seed of the rollout of an index in the group.
        ranks: who shares the chunks.
    """

    def __init__(
        self,
        logits_M: Tensor,
        ground: GroundSet,
        slopes_M: Tensor | None,
        *,
        num_rollouts: int,
        seed_of: Callable[[int], int],
        ranks: RankGroup,
    ) -> None:
        self._logits_M, self._ground, self._slopes_M, self._ranks = logits_M, ground, slopes_M, ranks
        self._num_rollouts, self._seed_of = num_rollouts, seed_of
        num_of_chunk = max(1, min(MAX_ROLLOUTS_OF_CHUNK, num_rollouts // LEAST_NUM_CHUNKS))
        chunks = list(torch.split(torch.arange(num_rollouts), num_of_chunk))
        self._own: list[Any] = [(chunks[index], self._draw(chunks[index])) for index in ranks.share(len(chunks))]

    def _draw(self, rollouts: Tensor) -> plackett_luce.Draws:
        device = self._logits_M.device
        generators = [torch.Generator(device).manual_seed(self._seed_of(rollout)) for rollout in rollouts.tolist()]
        return plackett_luce.draw_group(self._logits_M, self._ground.num_selected, generators=generators)

    def _masks(self, draws: plackett_luce.Draws) -> Tensor:
        return plackett_luce.masks_of(draws.draws_RK, self._ground.num_samples)

    def mask(self, rollout: int) -> Tensor:
        """The mask of one rollout, of any rank: bool (M,)."""
        return self._masks(self._draw(torch.tensor([rollout])))[0]

    def values(self, objective: JointObjective) -> Tensor:
        """Terms of every rollout, then their linear parts: float64 (number of terms + 1, R). Collective."""
        values = torch.zeros(
            len(objective.terms) + 1, self._num_rollouts, dtype=torch.float64, device=self._logits_M.device
        )
        for chunk, draws in self._own:
            masks_CM = self._masks(draws)
            values[:-1, chunk] = objective.term_values(masks_CM, self._ground)
            if self._slopes_M is not None:
                values[-1, chunk] = masks_CM.double() @ self._slopes_M
        return self._ranks.sum_(values)

    def gradient(self, advantages_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of advantage * score, mean of the linear part's gradient, squared noise of the first. Collective."""
        # a score is at most 1 + K, and 0 in sum with at most K above 0: see `plackett_luce.score`
        k = self._max_drawn
        bound = float(advantages_R.abs().sum()) * (1 + k) or 1.0
        noise_bound = float(advantages_R.square().sum()) * 2 * k * (1 + k) or 1.0
        # apart until they are whole, for their sums are exact on grids of their own
        squared_noise = torch.zeros(1, dtype=torch.float64, device=self._logits_M.device)
        sums = torch.zeros(2, self._logits_M.numel(), dtype=torch.float64, device=self._logits_M.device)
        for chunk, draws in self._own:
            for rollouts, scores_CM, linear_sum_M in self._scores(chunk, draws):
                squared_noise += squared_noise_sum(scores_CM, advantages_R[rollouts], bound=noise_bound)
                sums[0] += weighted_score_sum(scores_CM, advantages_R[rollouts], bound=bound)
                if linear_sum_M is not None:
                    sums[1] += linear_sum_M
        score_M, linear_M = self._ranks.sum_(sums).div_(self._num_rollouts)
        return score_M, linear_M, self._ranks.sum_(squared_noise)[0] / self._num_rollouts**2

    @property
    def _max_drawn(self) -> int:
        """The most samples that a rollout can draw."""
        return self._ground.num_selected

    def _scores(self, chunk: Tensor, draws: plackett_luce.Draws) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Some rollouts of a chunk at a time: their indices, their scores, and the sum of their linear gradients."""
        # so many that their scores are in a CPU's second-level cache together
        at_once = max(1, rows_at_once(ELEMENTS_AT_ONCE, self._logits_M.device) // self._logits_M.numel())
        for part in torch.split(torch.arange(len(chunk)), at_once):
            linear_sum_M = None
            if self._slopes_M is not None:
                linear_sum_M = linear_gradient_sum(
                    self._logits_M,
                    plackett_luce.masks_of(draws.draws_RK[part], self._ground.num_samples),
                    draws.log_times_R[part],
                    self._slopes_M,
                    num_rollouts=self._num_rollouts,
                )
            yield chunk[part], plackett_luce.score(self._logits_M, draws.draws_RK[part]), linear_sum_M


class _ConstrainedGroup(_Group):
    """The same under a constraint: draws are of each group of samples, and what fits."""

    def _draw(self, rollouts: Tensor) -> list[constrained.ConstrainedDraw]:  # type: ignore[override]
        return [
            constrained.draw(
                self._logits_M,
                self._constraint,
                generator=torch.Generator(self._logits_M.device).manual_seed(self._seed_of(rollout)),
            )
            for rollout in rollouts.tolist()
        ]

    def _masks(self, draws: list[constrained.ConstrainedDraw]) -> Tensor:  # type: ignore[override]
        return torch.stack([drawn.mask_N for drawn in draws])

    @property
    def _max_drawn(self) -> int:
        return self._ground.num_samples  # with costs any number

    def _scores(  # type: ignore[override]
        self, chunk: Tensor, draws: list[constrained.ConstrainedDraw]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See `_Group._scores`; with costs there is no linear part's gradient."""
        linear_sum_M = None
        if self._slopes_M is not None and not self._constraint.has_costs:
            linear_sum_M = constrained.linear_gradient_sum(
                self._logits_M, self._constraint, draws, self._slopes_M, num_rollouts=self._num_rollouts
            )
        scores = [constrained.score(self._logits_M, self._constraint, drawn) for drawn in draws]
        yield chunk, torch.stack(scores), linear_sum_M

    @property
    def _constraint(self) -> Constraint:
        assert self._ground.constraint is not None
        return self._ground.constraint
