"""The state of the current block, except its logits.

Shapes: N samples of the block, M samples of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from datamask_pl.data.types import Block
from datamask_pl.errors import CheckpointError
from datamask_pl.io.checkpoints import STATE_KEY
from datamask_pl.io.records import differences
from datamask_pl.learner.step import Update
from datamask_pl.objectives.ground_set import GroundSet

_TYPES: dict[str, type | tuple[type, ...]] = {
    "index": int,
    "scales": Tensor,
    "num_steps": int,
    "seconds": float,
    "best_mask": (Tensor, type(None)),
    "best_reward": float,
    "num_unchanged": int,
    "is_settled": bool,
}


@dataclass
class BlockState:
    """The state of the current block, except its logits.

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
        has_converged: True once that has been so for `patience` steps.
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
    has_converged: bool = False
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
            "is_settled": self.has_converged,
        }

    def restore(self, dumped: dict[str, Any]) -> None:
        """Takes over what `dump` gave, the scales apart."""
        self.num_steps = dumped["num_steps"]
        self.seconds_before = dumped["seconds"]
        self.best_reward = dumped["best_reward"]
        self.num_unchanged = dumped["num_unchanged"]
        self.has_converged = dumped["is_settled"]
        if dumped["best_mask"] is not None:
            self.best_mask_N = dumped["best_mask"].to(self.mask_N.device)

    def record_step(self, update: Update) -> None:
        """Counts a step, and keeps its best rollout if that is a mask of the whole block and the best so far."""
        self.num_steps += 1
        if update.best_mask_M is None or update.best_mask_M.numel() < self.ground.num_samples:
            return
        reward = float(update.metrics["objective/f_best"])
        if reward > self.best_reward:
            self.best_mask_N, self.best_reward = update.best_mask_M, reward

    def record_churn(self, logits_N: Tensor, *, patience: int | None, min_churn: float) -> float:
        """Looks at the mask that the logits give now, and settles if it has not changed for long enough.

        Args:
            logits_N: float (N,).
            patience: looks in a row without a change after which the block is settled; None for never.
            min_churn: share of the mask that counts as a change; with 0 any change does.

        Returns:
            The share of the mask that is new since the last look.
        """
        mask_N = self.ground.budget.fill(logits_N)
        churn = float((mask_N & ~self.mask_N).sum()) / self.ground.num_selected
        self.mask_N = mask_N
        self.num_unchanged = self.num_unchanged + 1 if churn < min_churn or churn == 0 else 0
        self.has_converged = patience is not None and self.num_unchanged >= patience
        return churn


def read_dump(
    checkpoint: dict[str, Any], *, made_with: dict[str, Any], index: int, num_samples: int, num_terms: int
) -> dict[str, Any]:
    """What `BlockState.dump` gave, and the logits beside it, from a checkpoint: checked before any of it is used.

    Args:
        checkpoint: as it was read.
        made_with: version, plan_hash and the learner's settings of this run, which must be those of the checkpoint.
        index: of the block that begins.
        num_samples: of the block.
        num_terms: of the objective.

    Returns:
        The entries of `dump`, and `logits`, float32, at least one a sample.

    Raises:
        CheckpointError: If it is of other data or other settings, naming what differs with both values; or if an entry
            is missing or of another kind.
    """
    saved = checkpoint.get(STATE_KEY)
    if not isinstance(saved, dict) or not isinstance(dumped := saved.get("block"), dict):
        raise CheckpointError("the checkpoint was not written by datamask_pl; give one of a run's checkpoints folder.")
    settings = saved.get("settings")
    there = {"version": saved.get("version"), "plan_hash": saved.get("plan_hash")}
    if differing := differences(there | settings if isinstance(settings, dict) else there, made_with):
        raise CheckpointError(
            f"the checkpoint does not belong to this run: {'; '.join(differing)}. "
            "Pass the data and options that it was made with, or another --run_name."
        )
    state_dict = checkpoint.get("state_dict")
    logits_M = state_dict.get("policy.logits") if isinstance(state_dict, dict) else None
    try:
        for name, kind in _TYPES.items():
            if not isinstance(dumped.get(name), kind):
                raise ValueError(f"{name} is {type(dumped.get(name)).__name__}")
        if dumped["index"] != index:
            raise ValueError(f"it is of block {dumped['index']}, and block {index} begins")
        if not 1 <= dumped["num_steps"] < made_with["model.num_steps"]:
            raise ValueError(f"num_steps is {dumped['num_steps']} of {made_with['model.num_steps']}")
        _check_tensor("scales", dumped["scales"], torch.float64, num_terms)
        if dumped["best_mask"] is not None:
            _check_tensor("best_mask", dumped["best_mask"], torch.bool, num_samples)
        logits_N = logits_M[:num_samples] if isinstance(logits_M, Tensor) and logits_M.dim() else torch.empty(0)
        _check_tensor("policy.logits", logits_N, torch.float32, num_samples)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint cannot be used ({error}); delete it to go on without it.") from error
    return {**dumped, "logits": logits_M}


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, length: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (length,) or not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} is not {length} finite numbers of {dtype}")
