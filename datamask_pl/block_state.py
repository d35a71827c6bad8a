"""What a learner knows of the block at hand, beside its logits.

Shapes: N samples of the block, M samples of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from datamask_pl.data.types import Block
from datamask_pl.estimation import Update
from datamask_pl.ground_set import GroundSet


@dataclass
class BlockState:
    """What is known of the block at hand, beside its logits.

    Attributes:
        block: the block, on the host.
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

    def note_step(self, update: Update) -> None:
        """Counts a step, and keeps its best rollout if that is a mask of the whole block and the best so far."""
        self.num_steps += 1
        if update.best_mask_M is None or update.best_mask_M.numel() < self.ground.num_samples:
            return
        reward = float(update.metrics["objective/f_best"])
        if reward > self.best_reward:
            self.best_mask_N, self.best_reward = update.best_mask_M, reward

    def observe(self, logits_N: Tensor, *, patience: int | None, min_churn: float) -> float:
        """Looks at the mask that the logits give now, and settles if it has not changed for long enough.

        Args:
            logits_N: float (N,).
            patience: looks in a row without a change after which the block is settled; None for never.
            min_churn: share of the mask that counts as a change.

        Returns:
            The share of the mask that is new since the last look.
        """
        mask_N = self.ground.top_k(logits_N)
        churn = float((mask_N & ~self.mask_N).sum()) / self.ground.num_selected
        self.mask_N = mask_N
        self.num_unchanged = self.num_unchanged + 1 if churn < min_churn else 0
        self.is_settled = patience is not None and self.num_unchanged >= patience
        return churn
