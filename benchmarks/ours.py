"""The package's estimators as bare functions, with the masks that they have found on the way.

Shape suffixes: N samples, M samples of a step, D features.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from common import Kind
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.budget import num_to_keep, share_of
from datamask_pl.functional.initialization import quality_logits
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.functional.schedule import default_schedule, linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner.loop import learn
from datamask_pl.learner.options import make_method
from datamask_pl.learner.step import rollout_update
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

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
    """A mask, and the seconds after which it was there; `prepared_s` of these went into similarities or lists."""

    label: str
    seconds: float
    mask_N: Tensor
    prepared_s: float = 0.0


def multilinear(problem: Problem, *, other_steps: tuple[int, ...] = (4, 8, 12, 20)) -> list[Point]:
    """The default estimator with other numbers of steps, then as by default; the lists of neighbours serve all.

    Each number gives two points: the mask as the logits give it, and polished.
    """
    points: list[Point] = []
    start_s = time.perf_counter()
    ground = GroundSet.of(features_ND=problem.features_ND, quality_N=problem.quality_N, budget=problem.num_selected)
    objective = JointObjective(quality_weight=problem.quality_weight, diversity=problem.kind)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    objective.prepare(ground, num_masks=ground.num_samples)
    prepared_s = time.perf_counter() - start_s
    schedule = default_schedule("multilinear", is_polish_quick=objective.has_interactions)

    for num_steps in (*(number for number in other_steps if number != schedule.num_steps), schedule.num_steps):
        start_s = time.perf_counter()

        def note(step: int, logits_N: Tensor, num_steps: int = num_steps, start_s: float = start_s) -> None:
            if step == num_steps - 1:
                mask_N = top_k_mask(logits_N, problem.num_selected)
                seconds = prepared_s + time.perf_counter() - start_s
                points.append(Point(f"{num_steps} steps", seconds, mask_N, prepared_s))

        method = make_method(objective, num_steps=num_steps, max_lr=schedule.max_lr, min_lr=schedule.min_lr)
        mask_N = learn(ground, objective=objective, scales=scales, method=method, on_step=note)
        seconds = prepared_s + time.perf_counter() - start_s
        points.append(Point(f"{num_steps} steps, polished", seconds, mask_N, prepared_s))
    return points


def paper(problem: Problem, *, limit_s: float) -> list[Point]:
    """The paper's estimator at the settings of configs/paper.yaml, for a limited time: top-k of the logits.

    Masks are recorded after 1/16, 1/8, ... of the time, and at its end.
    """
    points, next_s = [], limit_s / 16
    num_samples = len(problem.features_ND)
    num_batch = share_of(PAPER_PARTIAL, num_samples)
    num_kept = num_to_keep(problem.num_selected / num_samples, num_batch)
    objective = JointObjective(quality_weight=problem.quality_weight, diversity=problem.kind)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    start_s = time.perf_counter()
    logits_N = quality_logits(problem.quality_N).float()
    for step in range(PAPER_STEPS):
        rows_M = torch.randperm(num_samples, generator=generator)[:num_batch]
        ground = GroundSet.of(
            features_ND=problem.features_ND[rows_M], quality_N=problem.quality_N[rows_M], budget=num_kept
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
