"""The package's estimators as bare functions, with the masks that they have found on the way.

Shape suffixes: N samples, M samples of a step, D features.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from common import Kind
from torch import Tensor

from datamask_pl.block_solution import round_logits
from datamask_pl.distributed import RankGroup
from datamask_pl.estimation import multilinear_update, rollout_update
from datamask_pl.functional.budget import budget, share_of
from datamask_pl.functional.initialization import quality_logits
from datamask_pl.functional.rounding import top_k_mask
from datamask_pl.functional.schedule import default_schedule, linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

# configs/paper.yaml
PAPER_STEPS, PAPER_ROLLOUTS, PAPER_PARTIAL, PAPER_MAX_LR, PAPER_MIN_LR = 5000, 128, 0.1, 10.0, 1.0


class Problem(NamedTuple):
    """A block, and what is to be maximised on it."""

    features_ND: Tensor
    quality_N: Tensor
    num_selected: int
    kind: Kind
    quality_weight: float


class Point(NamedTuple):
    """A mask, and the seconds after which it was there."""

    label: str
    seconds: float
    mask_N: Tensor


def multilinear(problem: Problem, *, num_steps: tuple[int, ...] = (4, 8, 20)) -> list[Point]:
    """The default estimator with few and more steps, unpolished and polished; the lists of neighbours serve all."""
    points = []
    start_s = time.perf_counter()
    ground = GroundSet(features_ND=problem.features_ND, quality_N=problem.quality_N, num_selected=problem.num_selected)
    objective = JointObjective(quality_weight=problem.quality_weight, diversity=problem.kind)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    objective.prepare(ground, num_masks=ground.num_samples)
    prepared_s = time.perf_counter() - start_s
    _, max_lr, min_lr = default_schedule("multilinear", is_polish_quick=False)
    for num in num_steps:
        start_s = time.perf_counter()
        logits_N = torch.zeros(ground.num_samples)
        for step in range(num):
            update = multilinear_update(logits_N, objective=objective, ground=ground, scales=scales)
            logits_N += linear_rate(step, num, max_lr=max_lr, min_lr=min_lr) * update.direction_M.float()
        mask_N = top_k_mask(logits_N, problem.num_selected)
        points.append(Point(f"{num} steps", prepared_s + time.perf_counter() - start_s, mask_N))
        mask_N = round_logits(
            logits_N, objective=objective, ground=ground, scales=scales, is_polished=True, best_rollout_N=None
        )
        points.append(Point(f"{num} steps, polished", prepared_s + time.perf_counter() - start_s, mask_N))
    return points


def paper(problem: Problem, *, limit_s: float) -> list[Point]:
    """The paper's estimator at the settings of configs/paper.yaml, for a limited time: top-k of the logits.

    Masks are recorded after 1/16, 1/8, ... of the time, and at its end.
    """
    points, next_s = [], limit_s / 16
    num_samples = len(problem.features_ND)
    num_batch = share_of(PAPER_PARTIAL, num_samples)
    num_kept = budget(problem.num_selected / num_samples, num_batch)
    objective = JointObjective(quality_weight=problem.quality_weight, diversity=problem.kind)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    start_s = time.perf_counter()
    logits_N = quality_logits(problem.quality_N).float()
    for step in range(PAPER_STEPS):
        rows_M = torch.randperm(num_samples, generator=generator)[:num_batch]
        ground = GroundSet(
            features_ND=problem.features_ND[rows_M], quality_N=problem.quality_N[rows_M], num_selected=num_kept
        )
        update = rollout_update(
            logits_N[rows_M],
            objective=objective,
            ground=ground,
            scales=scales,
            estimator="group_relative",
            num_rollouts=PAPER_ROLLOUTS,
            seed_of=lambda rollout, step=step: derive_seed(0, 0, step, rollout),
            ranks=RankGroup(),
            step_name=f"step {step}",
            control_variate=False,
        )
        rate = linear_rate(step, PAPER_STEPS, max_lr=PAPER_MAX_LR, min_lr=PAPER_MIN_LR)
        logits_N[rows_M] += rate * update.direction_M.float()
        seconds = time.perf_counter() - start_s
        if seconds >= next_s or step == PAPER_STEPS - 1:
            points.append(Point(f"{step + 1} steps", seconds, top_k_mask(logits_N, problem.num_selected)))
            next_s *= 2
        if seconds >= limit_s:
            break
    return points
