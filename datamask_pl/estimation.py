"""One step: from logits and an objective to the direction in which the logits move.

Shapes: M samples of the step, R rollouts of the group, C rollouts of a chunk, K samples kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datamask_pl.distributed import RankGroup
from datamask_pl.functional import plackett_luce
from datamask_pl.functional.estimators import (
    group_relative_advantage,
    has_spread,
    leave_one_out_advantage,
    weighted_score_sum,
)
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

RolloutEstimator = Literal["group_relative", "leave_one_out"]

# A rank takes whole chunks of rollouts: products with the same shapes round the same on any number of ranks.
ROLLOUTS_OF_CHUNK = 8


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
) -> Update:
    """The policy gradient from a group of Plackett-Luce rollouts, which the ranks share. Collective.

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

    Raises:
        ObjectiveError: If a term of any rollout is not finite; on all ranks.
    """
    chunks = list(torch.split(torch.arange(num_rollouts), ROLLOUTS_OF_CHUNK))
    objective.prepare(ground, num_masks=num_rollouts)
    draws: dict[int, Tensor] = {}
    term_values = torch.zeros(len(objective.terms), num_rollouts, dtype=torch.float64, device=logits_M.device)
    for index in ranks.share(len(chunks)):
        draws[index] = torch.stack(
            [_draw(logits_M, ground.num_selected, seed_of(rollout)) for rollout in chunks[index].tolist()]
        )
        masks_CM = plackett_luce.masks_of(draws[index], ground.num_samples)
        term_values[:, chunks[index]] = objective.term_values(masks_CM, ground)
    ranks.sum_(term_values)
    objective.check_finite(term_values, when=f"at {step_name}")
    rewards_R = objective.combine(term_values, scales)
    advantage = group_relative_advantage if estimator == "group_relative" else leave_one_out_advantage
    advantages_R = advantage(rewards_R)

    # |score| is at most 1 + K: see `plackett_luce.score`
    bound = float(advantages_R.abs().sum()) * (1 + ground.num_selected) or 1.0
    gradient_M = torch.zeros(logits_M.numel(), dtype=torch.float64, device=logits_M.device)
    for index, draws_CK in draws.items():
        advantages_C = advantages_R[chunks[index]]
        gradient_M += weighted_score_sum(plackett_luce.score(logits_M, draws_CK), advantages_C, bound=bound)
    ranks.sum_(gradient_M).div_(num_rollouts)

    best = int(rewards_R.argmax())
    best_draw_1K = _draw(logits_M, ground.num_selected, seed_of(best))[None]
    p_M = ground.probabilities(logits_M)
    metrics = {
        "objective/f": rewards_R.mean(),
        "objective/f_best": rewards_R[best],
        "policy/undecided": ground.undecided_share(p_M),
        "policy/advantage_spread": advantages_R.std(correction=0),
        "policy/reward_spread": rewards_R.std(correction=0),
        "policy/groups_without_spread": torch.tensor(float(not has_spread(rewards_R)), dtype=torch.float64),
    }
    metrics |= {f"objective/{term.name}": term_values[index].mean() for index, term in enumerate(objective.terms)}
    return Update(gradient_M, metrics, plackett_luce.masks_of(best_draw_1K, ground.num_samples)[0])


def _draw(logits_M: Tensor, num_selected: int, seed: int) -> Tensor:
    generator = torch.Generator(logits_M.device).manual_seed(seed)
    return plackett_luce.draw(logits_M, num_selected, generator=generator)
