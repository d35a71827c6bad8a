"""Checks of the learner's options, and of what they lead to. Each raises an error that names option, value and remedy.

Shapes: M samples.
"""

from __future__ import annotations

import math

from lightning.pytorch import Trainer
from torch import Tensor

from datamask_pl.errors import BudgetError, ConfigError, warn
from datamask_pl.functional.budget import num_to_keep, share_of


def check(is_allowed: bool, rule: str, value: object) -> None:
    """Raises a ConfigError that states the rule, which begins with the option's name, if it is broken."""
    if not is_allowed:
        raise ConfigError(f"model.{rule}, got {value}.")


def check_schedule(*, num_steps: int, max_lr: float, min_lr: float) -> None:
    """Raises a ConfigError if there is no step, or the learning rate is not finite or rises."""
    check(num_steps >= 1, "num_steps must be at least 1", num_steps)
    check(min_lr >= 0, "min_lr must not be negative", min_lr)
    check(math.isfinite(max_lr), "max_lr must be finite", max_lr)
    check(max_lr >= min_lr, f"max_lr must be at least min_lr ({min_lr})", max_lr)


def check_trainer(trainer: Trainer) -> None:
    """Raises a ConfigError if the trainer would compute in half or double precision, or stop after a step."""
    if trainer.precision != "32-true":
        raise ConfigError(
            f"trainer.precision must be 32-true, got {trainer.precision}: rewards that differ by a part in a thousand "
            "are lost in half precision. Features are stored and read in float16 where the files are."
        )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning's debugging connector
        raise ConfigError(
            "trainer.fast_dev_run has no folder for its files and would leave the mask of one step in this one; for a "
            "trial give --model.num_steps 2, and one file as --data.path."
        )


def check_step_budget(select_ratio: float, partial: float, num_samples: int) -> None:
    """Raises a BudgetError if the part of a block in which a step draws masks is too small to keep anything."""
    try:
        num_to_keep(select_ratio, share_of(partial, num_samples))
    except BudgetError as error:
        raise BudgetError(
            f"data.partial: a step draws masks in {partial:g} of a block of {num_samples} samples; there {error}"
        ) from error


def warn_of_few_steps(num_steps: int, partial: float) -> None:
    """Says that the steps that are the default for whole blocks are few for parts of them."""
    if partial < 1.0:
        warn(
            f"data.partial {partial:g}: the default of {num_steps} steps is for steps that see the whole block; here a "
            f"sample has {num_steps * partial:.3g} of them. Leave data.partial out, which is best, or give "
            f"model.num_steps: {math.ceil(num_steps / partial)}."
        )


def warn_of_equal_rewards() -> None:
    """Says that a step has moved nothing, where masks are drawn and no linear part is known."""
    warn(
        "all rollouts of a step had the same reward, and gave no gradient: the policy has settled on one mask, or the "
        "objective is constant on this data. policy/groups_without_spread in the log counts such steps."
    )


def check_logits(logits_M: Tensor, when: str) -> None:
    """Raises a ConfigError, on all ranks, if the logits have left the range of float32."""
    if not bool(logits_M.isfinite().all()):
        error = ConfigError(f"the logits of {when} are beyond the range of float32; lower model.max_lr.")
        error.is_on_all_ranks = True
        raise error
