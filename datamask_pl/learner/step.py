"""One step: from logits and an objective to the direction in which the logits move.

Shapes: M samples of the step, R rollouts of the group, C rollouts of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.budget import Rollouts
from datamask_pl.functional.rollouts.advantages import (
    group_relative_advantage,
    has_spread,
    leave_one_out_advantage,
    shrinkage,
    squared_noise_sum,
    weighted_score_sum,
)
from datamask_pl.learner.options import Method, check_logits
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

RolloutEstimator = Literal["group_relative", "leave_one_out"]

# A rank takes whole chunks of rollouts: products with the same shapes round the same on any number of ranks. As many
# ranks as there are chunks have something to do.
MAX_ROLLOUTS_OF_CHUNK, LEAST_NUM_CHUNKS = 16, 8


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


def take_step(
    logits_M: Tensor,
    *,
    objective: JointObjective,
    ground: GroundSet,
    scales: Tensor,
    method: Method,
    seed_of: Callable[[int], int],
    ranks: RankGroup | None = None,
    step_name: str = "a step",
) -> Update:
    """The direction of one step, by the estimator of the method. Collective.

    Args:
        logits_M: float (M,).
        objective: what is maximised.
        ground: the M samples; with rollouts local to each rank.
        scales: float64 (number of terms,), by which the terms are divided.
        method: the options.
        seed_of: seed of the rollout of an index in the group.
        ranks: who shares the rollouts; this process alone by default.
        step_name: for error messages.

    Raises:
        ConfigError: If the logits have left the range of float32; on all ranks.
        ObjectiveError: If a term is not finite; on all ranks.
    """
    check_logits(logits_M, step_name)
    if not ground.budget.can_keep_any:
        return Update(torch.zeros_like(logits_M, dtype=torch.float64), {})
    if method.estimator == "multilinear":
        return multilinear_update(logits_M, objective=objective, ground=ground, scales=scales, step_name=step_name)
    return rollout_update(
        logits_M,
        objective=objective,
        ground=ground,
        scales=scales,
        estimator=method.estimator,
        num_rollouts=method.num_rollouts,
        seed_of=seed_of,
        ranks=ranks or RankGroup(),
        step_name=step_name,
        control_variate=method.control_variate,
    )


def multilinear_update(
    logits_M: Tensor, *, objective: JointObjective, ground: GroundSet, scales: Tensor, step_name: str = "a step"
) -> Update:
    """The exact gradient of the expected objective, and the direction of mirror ascent. Collective.

    Args:
        logits_M: float (M,).
        objective: every term that counts has an expectation.
        ground: the M samples, shared by `ground.shares.ranks`.
        scales: float64 (number of terms,), by which the terms are divided.
        step_name: for error messages.

    Raises:
        ObjectiveError: If an expectation or its gradient is not finite; on all ranks.
    """
    budget, over_slices = ground.budget, ground.shares.stack_over_slices
    p_M = budget.probabilities(logits_M, over_slices=over_slices)
    expectation, term_values = objective.value_and_gradient(p_M, ground, scales, when=f"at {step_name}")
    metrics = {
        "objective/f": expectation.value,
        "policy/undecided": budget.entropy_share(p_M),
    }
    for term, value, scale in zip(objective.terms, term_values, scales.tolist(), strict=True):
        if term.weight > 0 and scale > 0:
            metrics[f"objective/{term.name}"] = value
    metrics |= {f"objective/{name}": value for name, value in expectation.diagnostics.items()}
    return Update(budget.ascent_direction(expectation.gradient_N, p_M, over_slices=over_slices), metrics)


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
    """The policy gradient from a group of rollouts, which the ranks share. Collective.

    With a control variate, the linear part sum_i g_i m_i is subtracted from the rewards, g the gradient of the
    objective's expectation at the inclusion probabilities. The policy gradient of the linear part is added from
    `control_variate.linear_gradient`, which needs no rewards; the sum is unbiased for any g. The direction is not this
    sum. The rest, which is estimated from rollouts, is shrunk by its noise, most of it where g is good: a bias towards
    the linear part. `Budget.controlled_direction` then takes both to dual coordinates, which is another angle with the
    same zeros, and divides by the scale, so that both estimators have the same direction.

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
    budget = ground.budget
    objective.prepare(ground, num_masks=num_rollouts)
    p_M: Tensor | None = None
    slopes_M: Tensor | None = None
    if control_variate and objective.has_expectation:
        p_M = budget.rollout_probabilities(logits_M)
        slopes_M = objective.value_and_gradient(p_M, ground, scales, when=f"at {step_name}")[0].gradient_N
    group = RolloutGroup(logits_M, ground, slopes_M, num_rollouts=num_rollouts, seed_of=seed_of, ranks=ranks)
    term_values, linear_R = group.values(objective)
    objective.check_finite(term_values, when=f"at {step_name}")
    rewards_R = objective.combine(term_values, scales)
    if p_M is None or slopes_M is None:
        advantage = group_relative_advantage if estimator == "group_relative" else leave_one_out_advantage
        advantages_R = advantage(rewards_R)
        direction_M = group.gradient(advantages_R)[0]
    else:
        advantages_R = leave_one_out_advantage(rewards_R - linear_R)
        rest_M, linear_M, squared_noise = group.gradient(advantages_R)
        rest_M *= shrinkage(rest_M, squared_noise)
        direction_M = budget.controlled_direction(logits_M, p_M, slopes_M, linear_N=linear_M, rest_N=rest_M)
    best = int(rewards_R.argmax())
    metrics = {
        "objective/f": rewards_R.mean(),
        "objective/f_best": rewards_R[best],
        "policy/undecided": budget.entropy_share(budget.probabilities(logits_M)),
        "policy/advantage_spread": advantages_R.std(correction=0),
        "policy/reward_spread": rewards_R.std(correction=0),
        "policy/groups_without_spread": torch.tensor(float(not has_spread(rewards_R)), dtype=torch.float64),
    }
    metrics |= {f"objective/{term.name}": term_values[index].mean() for index, term in enumerate(objective.terms)}
    return Update(direction_M, metrics, group.mask(best))


class RolloutGroup:
    """The rollouts of a step, in chunks that the ranks share.

    Args:
        logits_M: float (M,).
        ground: the M samples.
        slopes_M: float64 (M,), the linear part of the rewards, if it is differentiated apart.
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
        self._own = [(chunks[index], self._draw(chunks[index])) for index in ranks.share(len(chunks))]

    def _draw(self, rollouts: Tensor) -> Rollouts:
        device = self._logits_M.device
        generators = [torch.Generator(device).manual_seed(self._seed_of(rollout)) for rollout in rollouts.tolist()]
        return self._ground.budget.draw(self._logits_M, generators=generators)

    def mask(self, rollout: int) -> Tensor:
        """The mask of one rollout, of any rank: bool (M,)."""
        return self._draw(torch.tensor([rollout])).masks()[0]

    def values(self, objective: JointObjective) -> tuple[Tensor, Tensor]:
        """Terms of every rollout, float64 (number of terms, R), and their linear parts, float64 (R,). Collective."""
        values = torch.zeros(
            len(objective.terms) + 1, self._num_rollouts, dtype=torch.float64, device=self._logits_M.device
        )
        for chunk, drawn in self._own:
            masks_CM = drawn.masks()
            values[:-1, chunk] = objective.term_values(masks_CM, self._ground)
            if self._slopes_M is not None:
                values[-1, chunk] = masks_CM.double() @ self._slopes_M
        values = self._ranks.sum_(values)
        return values[:-1], values[-1]

    def gradient(self, advantages_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of advantage * score, mean of the linear part's gradient, squared noise of the first. Collective."""
        # a score is at most 1 + K, and 0 in sum with at most K above 0: see `plackett_luce.score`
        k = self._ground.budget.max_drawn
        bound = float(advantages_R.abs().sum()) * (1 + k) or 1.0
        noise_bound = float(advantages_R.square().sum()) * 2 * k * (1 + k) or 1.0
        # apart until they are whole, for their sums are exact on grids of their own
        squared_noise = torch.zeros(1, dtype=torch.float64, device=self._logits_M.device)
        sums = torch.zeros(2, self._logits_M.numel(), dtype=torch.float64, device=self._logits_M.device)
        for chunk, drawn in self._own:
            for part, scores_CM, linear_sum_M in drawn.scores(self._slopes_M, num_rollouts=self._num_rollouts):
                advantages_C = advantages_R[chunk[part]]
                squared_noise += squared_noise_sum(scores_CM, advantages_C, bound=noise_bound)
                sums[0] += weighted_score_sum(scores_CM, advantages_C, bound=bound)
                if linear_sum_M is not None:
                    sums[1] += linear_sum_M
        score_M, linear_M = self._ranks.sum_(sums).div_(self._num_rollouts)
        return score_M, linear_M, self._ranks.sum_(squared_noise)[0] / self._num_rollouts**2
