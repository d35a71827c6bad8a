"""The whole method for one block, without Lightning: `learn_block` from tensors, `learn` from a ground set.

`MaskLearner` takes the same steps, with checkpoints, a log and several processes around them.

Shapes: N samples, D features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from datamask_pl.functional.budget import Budget, num_to_keep
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.schedule import linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner.options import Estimator, Method, make_method
from datamask_pl.learner.policy import Initialization, first_logits
from datamask_pl.learner.solve import CALIBRATION, calibrate_terms, round_logits
from datamask_pl.learner.step import take_step
from datamask_pl.objectives.base import Objective
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective, WeightedObjective

OnStep = Callable[[int, Tensor], object]


def learn_block(
    features_ND: Tensor,
    quality_N: Tensor,
    *,
    select_ratio: float = 0.1,
    budget: Budget | None = None,
    quality_weight: float = 0.5,
    diversity: str | Objective | list[WeightedObjective] = "facility_location",
    calibrate: bool = True,
    estimator: Estimator = "multilinear",
    num_rollouts: int | None = None,
    control_variate: bool = True,
    num_steps: int | None = None,
    max_lr: float | None = None,
    min_lr: float | None = None,
    init: Initialization = "same",
    polish: bool = True,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Tensor:
    """Learns the mask of samples in memory, as `fit` does for a block; every step sees all samples.

    Args:
        features_ND: float16 or float32 (N, D), no row all zero; rows are scaled to length 1.
        quality_N: float32 (N,), scaled quality, such as ranks in [0, 1]; higher is better.
        select_ratio: share of the samples to keep, above 0 and at most 1.
        budget: replaces `select_ratio`: a `Constrained` budget with costs, quotas or forced samples.
        quality_weight: see `MaskLearner`, as for all options up to `polish`.
        diversity: see above.
        calibrate: see above.
        estimator: see above.
        num_rollouts: see above.
        control_variate: see above.
        num_steps: see above.
        max_lr: see above.
        min_lr: see above.
        init: see above.
        polish: see above.
        seed: of everything random.
        on_step: called after every step with its number, from 0, and the logits; see `learn`.

    Returns:
        bool (N,), True = kept.

    Raises:
        BudgetError: If the ratio keeps no sample.
        ConfigError: If an option is not allowed.
        ObjectiveError: If the objective is not finite.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> quality = torch.tensor([0.9, 0.2, 0.1, 0.8])
        >>> learn_block(features, quality, select_ratio=0.5)
        tensor([ True, False, False,  True])
    """
    objective = JointObjective(quality_weight=quality_weight, diversity=diversity)
    method = make_method(
        objective,
        estimator=estimator,
        num_rollouts=num_rollouts,
        control_variate=control_variate,
        num_steps=num_steps,
        max_lr=max_lr,
        min_lr=min_lr,
        init=init,
        calibrate=calibrate,
        polish=polish,
    )
    num_samples = len(features_ND)
    budget = budget or FixedSize(num_samples, num_to_keep(select_ratio, num_samples), select_ratio)
    ground = GroundSet.of(features_ND, quality_N, budget, inv_norm_N=1.0 / features_ND.float().norm(dim=1))
    with torch.no_grad():
        scales = calibrate_terms(objective, ground, method, seed=derive_seed(seed, 0, CALIBRATION))
    return learn(ground, objective=objective, scales=scales, method=method, seed=seed, on_step=on_step)


@torch.no_grad()
def learn(
    ground: GroundSet,
    *,
    objective: JointObjective,
    scales: Tensor,
    method: Method,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Tensor:
    """The method: ascent on one logit per sample, then rounding, then swaps.

    Args:
        ground: the samples and the budget.
        objective: what is maximised.
        scales: float64 (number of terms,), by which the terms are divided.
        method: the options.
        seed: of the rollouts.
        on_step: called after every step with its number, from 0, and the logits, float32 (N,), which the next step
            changes in place.

    Returns:
        bool (N,), True = kept.
    """
    logits_N = first_logits(ground.quality_N, ground.num_selected, method.init, is_independent=method.is_whole_block)
    best_N, best_reward = None, -torch.inf
    for step in range(method.num_steps):
        update = take_step(
            logits_N,
            objective=objective,
            ground=ground,
            scales=scales,
            method=method,
            seed_of=lambda rollout, step=step: derive_seed(seed, 0, step, rollout),  # type: ignore[misc]
        )
        rate = linear_rate(step, method.num_steps, max_lr=method.max_lr, min_lr=method.min_lr)
        logits_N += (rate * update.direction_M).to(logits_N.dtype)
        # rollouts are masks of the whole block here: the best one may beat the rounded logits
        if update.best_mask_M is not None and float(update.metrics["objective/f_best"]) > best_reward:
            best_N, best_reward = update.best_mask_M, float(update.metrics["objective/f_best"])
        if on_step is not None:
            on_step(step, logits_N)
    return round_logits(
        logits_N, objective=objective, ground=ground, scales=scales, is_polished=method.polish, best_rollout_N=best_N
    )
