"""What is done once a block: the scales of its terms before the first step, its mask after the last.

Shapes: R masks, N samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from datamask_pl.data.types import Block, Values
from datamask_pl.functional import plackett_luce
from datamask_pl.functional.rounding import polish, top_k_mask
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

NUM_CALIBRATION_MASKS = 64
# A spread below this share of a term's size is rounding: the term is constant.
RELATIVE_SPREAD = 1e-7


@dataclass
class BlockState:
    """What is known of the block at hand, beside its logits.

    Attributes:
        block: the block, on the learner's device.
        ground: the whole block as a ground set.
        scales: float64 (number of terms,), what each term is divided by.
        mask_N: bool (N,), the mask of the logits when last looked at.
        num_steps: steps taken.
        seconds_before: time spent on the block by the process that was killed.
        best_mask_N: bool (N,), the best rollout of the whole block, if rollouts are of the whole block.
        best_reward: its reward.
        num_unchanged: steps in a row in which the mask changed less than `min_churn`.
        is_settled: True once that has been so for `patience` steps.
    """

    block: Block
    ground: GroundSet
    scales: Tensor
    mask_N: Tensor
    num_steps: int = 0
    seconds_before: float = 0.0
    best_mask_N: Tensor | None = None
    best_reward: float = -float("inf")
    num_unchanged: int = 0
    is_settled: bool = False
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time spent on the block, over all processes that worked on it."""
        return self.seconds_before + time.perf_counter() - self.started_s

    def dump(self) -> dict[str, Any]:
        """Tensors and plain types for a checkpoint: what the logits do not tell."""
        return {
            "index": self.block.index,
            "scales": self.scales.cpu(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "best_mask": None if self.best_mask_N is None else self.best_mask_N.cpu(),
            "best_reward": self.best_reward,
            "num_unchanged": self.num_unchanged,
            "is_settled": self.is_settled,
        }

    def restore(self, dumped: dict[str, Any]) -> None:
        """Takes over what `dump` gave, the scales apart."""
        self.num_steps = dumped["num_steps"]
        self.seconds_before = dumped["seconds"]
        self.best_reward = dumped["best_reward"]
        self.num_unchanged = dumped["num_unchanged"]
        self.is_settled = dumped["is_settled"]
        if dumped["best_mask"] is not None:
            self.best_mask_N = dumped["best_mask"].to(self.mask_N.device)


def draw_uniform_masks(num_masks: int, ground: GroundSet, *, seed: int) -> Tensor:
    """Random masks of the ground set's budget, the same on any device: bool (R, N)."""
    generator = torch.Generator().manual_seed(seed)
    equal_N = torch.zeros(ground.num_samples)
    draws_RK = torch.stack(
        [plackett_luce.draw(equal_N, ground.num_selected, generator=generator) for _ in range(num_masks)]
    )
    return plackett_luce.masks_of(draws_RK, ground.num_samples).to(ground.device)


def calibrate(objective: JointObjective, ground: GroundSet, *, seed: int) -> Tensor:
    """Standard deviation of every term over 64 random masks of the budget. Collective over `ground.ranks`.

    Args:
        objective: the terms.
        ground: what a step's masks are drawn from.
        seed: of the masks.

    Returns:
        float64 (number of terms,); 0 for a term that is constant, which then counts nothing.

    Raises:
        ObjectiveError: If a term that counts is not finite; on all ranks.
    """
    masks_RN = draw_uniform_masks(NUM_CALIBRATION_MASKS, ground, seed=seed)
    values = objective.term_values(masks_RN, ground)
    objective.check_finite(values, when="in calibration, before the first step")
    spread = values.std(dim=1, correction=1)
    return torch.where(spread > RELATIVE_SPREAD * values.abs().amax(1), spread, 0.0)


def round_logits(
    logits_N: Tensor,
    *,
    objective: JointObjective,
    ground: GroundSet,
    scales: Tensor,
    is_polished: bool,
    best_rollout_N: Tensor | None,
) -> Tensor:
    """The mask of a block: the better of top-k and the best rollout, then exchanges that raise the objective.

    Args:
        logits_N: float (N,).
        objective: what is maximised.
        ground: the whole block. Collective over its ranks.
        scales: float64 (number of terms,).
        is_polished: whether to exchange.
        best_rollout_N: bool (N,), the best mask of the whole block that was drawn, if any.

    Returns:
        bool (N,), with exactly the budget kept.
    """
    starts = [top_k_mask(logits_N, ground.num_selected)]
    if best_rollout_N is not None:
        starts.append(best_rollout_N)

    def values(masks_RN: Tensor) -> Tensor:
        return objective.combine(objective.term_values(masks_RN, ground), scales)

    def gains(mask_N: Tensor) -> Tensor:
        if not objective.has_expectation:
            return logits_N.double()
        return objective.linearize(mask_N.double(), ground, scales)[0].gradient_N

    best_N = starts[0] if len(starts) == 1 else starts[int(values(torch.stack(starts)).argmax())]
    if not is_polished:
        return best_N
    return polish(best_N, values=values, gains=gains, features=ground.centered)[0]


def value_of(masks_RN: Tensor, *, objective: JointObjective, ground: GroundSet, scales: Tensor) -> list[Values]:
    """What each mask is worth. Collective over `ground.ranks`.

    Raises:
        ObjectiveError: If a term that counts is not finite; on all ranks.
    """
    terms = objective.term_values(masks_RN, ground)
    objective.check_finite(terms, when="after the last step")
    f_R = objective.combine(terms, scales)
    names = [term.name for term in objective.terms]
    return [
        Values(float(f), dict(zip(names, column.tolist(), strict=True))) for f, column in zip(f_R, terms.T, strict=True)
    ]
