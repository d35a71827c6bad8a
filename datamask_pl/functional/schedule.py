"""The learning rate of a block's steps."""

from __future__ import annotations


def linear_rate(step: int, num_steps: int, *, max_lr: float, min_lr: float) -> float:
    """Learning rate of a step: max_lr at the first, min_lr at the last, linear between.

    Args:
        step: step of the block, from 0.
        num_steps: steps of a block.
        max_lr: rate of the first step.
        min_lr: rate of the last step.

    Example:
        >>> [linear_rate(step, 3, max_lr=2.0, min_lr=1.0) for step in range(3)]
        [2.0, 1.5, 1.0]
    """
    progress = step / (num_steps - 1) if num_steps > 1 else 0.0
    return max_lr + (min_lr - max_lr) * progress
