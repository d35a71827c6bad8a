"""The run's own method on other samples: what it keeps of a part of a block, where the others choose from that part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from datamask_pl.functional.schedule import linear_rate
from datamask_pl.learner.policy import Initialization, MaskPolicy
from datamask_pl.learner.solve import round_logits
from datamask_pl.learner.step import multilinear_update
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective


@torch.no_grad()
def learn_block(
    ground: GroundSet,
    *,
    objective: JointObjective,
    scales: Tensor,
    num_steps: int,
    max_lr: float,
    min_lr: float,
    init: Initialization,
    is_polished: bool,
    on_step: Callable[[int, Tensor], object] | None = None,
) -> Tensor:
    """The mask that the estimator `multilinear` learns for a ground set, as `fit` does for a block.

    Args:
        ground: the samples and the budget.
        objective: what is maximised; every term that counts has an expectation.
        scales: float64 (number of terms,), by which the terms are divided.
        num_steps: steps, all of which are taken.
        max_lr: learning rate of the first step.
        min_lr: of the last.
        init: with what the logits start.
        is_polished: whether samples near the threshold are exchanged at the end.
        on_step: called after every step with its number, from 0, and the logits, float32 (N,), which the next step
            changes in place.

    Returns:
        bool (N,), True = kept.
    """
    policy = MaskPolicy(ground.num_samples).to(ground.device)
    policy.reset(ground.quality_N, ground.num_selected, init=init, is_independent=True)
    logits_N = policy.logits.detach()
    for step in range(num_steps):
        update = multilinear_update(logits_N, objective=objective, ground=ground, scales=scales)
        rate = linear_rate(step, num_steps, max_lr=max_lr, min_lr=min_lr)
        logits_N += (rate * update.direction_M).to(logits_N.dtype)
        if on_step is not None:
            on_step(step, logits_N)
    return round_logits(
        logits_N,
        objective=objective,
        ground=ground,
        scales=scales,
        is_polished=is_polished,
        best_rollout_N=None,
    )
