"""The number of a block's steps and their learning rates."""

from __future__ import annotations

from typing import Literal, NamedTuple

# Steps after which swaps cost less than more steps, where the gain of each is known.
NUM_STEPS_BEFORE_EXCHANGES = 8


class Schedule(NamedTuple):
    """Steps of a block, and the rates of the first and the last."""

    num_steps: int
    max_lr: float
    min_lr: float


def default_schedule(
    estimator: Literal["multilinear", "leave_one_out", "group_relative"],
    *,
    is_polish_quick: bool,
    has_control_variate: bool = False,
) -> Schedule:
    """The steps and rates that are the default.

    Directions of `multilinear`, and with a control variate, have a root mean square of 1, whatever the term, the budget
    or the number of samples: so the same rates serve all. The second is nearly the first where masks are of the whole
    block, and takes the same steps.

    Args:
        estimator: by which the directions are found.
        is_polish_quick: whether swaps follow whose gain is known in advance; they replace steps.
        has_control_variate: whether a control variate takes the linear part out of the rewards.

    Example:
        >>> default_schedule("multilinear", is_polish_quick=False, has_control_variate=True)
        Schedule(num_steps=20, max_lr=4.0, min_lr=1.5)
    """
    if estimator == "multilinear" or has_control_variate:
        return Schedule(NUM_STEPS_BEFORE_EXCHANGES if is_polish_quick else 20, 4.0, 1.5)
    return Schedule(1000, 10.0, 1.0)


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
