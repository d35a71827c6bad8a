"""The options of the method with their defaults, and checks. Each error names option, value and remedy.

Shapes: M samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from datamask_pl.errors import BudgetError, ConfigError, check_choice, warn
from datamask_pl.functional.budget import num_to_keep, share_of
from datamask_pl.functional.schedule import default_schedule
from datamask_pl.learner.policy import Initialization
from datamask_pl.objectives.joint import JointObjective

Estimator = Literal["multilinear", "leave_one_out", "group_relative"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the mask of a block is learned; see `MaskLearner` for the options.

    Attributes:
        estimator: of the gradient.
        num_rollouts: masks drawn per step, over all ranks.
        control_variate: as the user set it.
        is_controlled: True if there is a control variate: also every term has an expectation.
        num_steps: steps of a block.
        max_lr: learning rate of the first step.
        min_lr: learning rate of the last step.
        init: which logits a block starts with.
        calibrate: whether terms are divided by their spread over random masks.
        polish: whether swaps follow the last step.
    """

    estimator: Estimator
    num_rollouts: int
    control_variate: bool
    is_controlled: bool
    num_steps: int
    max_lr: float
    min_lr: float
    init: Initialization
    calibrate: bool
    polish: bool

    @property
    def is_whole_block(self) -> bool:
        """True if a step sees the whole block, False if it draws masks in a random part of it."""
        return self.estimator == "multilinear"


def make_method(
    objective: JointObjective,
    *,
    estimator: Estimator = "multilinear",
    num_rollouts: int | None = None,
    control_variate: bool = True,
    num_steps: int | None = None,
    max_lr: float | None = None,
    min_lr: float | None = None,
    init: Initialization = "same",
    calibrate: bool = True,
    polish: bool = True,
) -> Method:
    """Fills in the defaults, which depend on the objective; None is the default.

    Raises:
        ConfigError: If a value is not allowed, or the estimator cannot train the objective.
    """
    check_choice("model.estimator", estimator, get_args(Estimator))
    check_choice("model.init", init, get_args(Initialization))
    is_controlled = control_variate and objective.has_expectation
    default = default_schedule(
        estimator, is_polish_quick=polish and objective.has_interactions, has_control_variate=is_controlled
    )
    num_rollouts = (16 if is_controlled else 128) if num_rollouts is None else num_rollouts
    num_steps = default.num_steps if num_steps is None else num_steps
    max_lr = default.max_lr if max_lr is None else max_lr
    min_lr = min(default.min_lr, max(max_lr, 0.0)) if min_lr is None else min_lr
    check(num_rollouts >= 2, "num_rollouts must be at least 2, or there is nothing to compare", num_rollouts)
    check_schedule(num_steps=num_steps, max_lr=max_lr, min_lr=min_lr)
    if estimator == "multilinear" and not objective.has_expectation:
        raise ConfigError(
            f"model.estimator multilinear needs the expectation of every term, and "
            f"{', '.join(objective.without_expectation())} gives only `value`; use model.estimator: group_relative or "
            "leave_one_out."
        )
    return Method(
        estimator=estimator,
        num_rollouts=num_rollouts,
        control_variate=control_variate,
        is_controlled=is_controlled,
        num_steps=num_steps,
        max_lr=max_lr,
        min_lr=min_lr,
        init=init,
        calibrate=calibrate,
        polish=polish,
    )


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


def check_step_budget(select_ratio: float, partial: float, num_samples: int) -> None:
    """Raises a BudgetError if the part of a block in which a step draws masks is too small to keep anything."""
    try:
        num_to_keep(select_ratio, share_of(partial, num_samples))
    except BudgetError as error:
        raise BudgetError(
            f"data.partial: a step draws masks in {partial:g} of a block of {num_samples} samples; there {error}"
        ) from error


def warn_of_few_steps(num_steps: int, partial: float) -> None:
    """Warns that the default number of steps, meant for whole blocks, is small for parts of them."""
    if partial < 1.0:
        warn(
            f"data.partial {partial:g}: the default of {num_steps} steps assumes that each step sees the whole block; "
            f"here each sample is seen in only about {num_steps * partial:.3g} of them. Omit data.partial, which is "
            f"best, or set model.num_steps: {math.ceil(num_steps / partial)}."
        )


def warn_of_equal_rewards() -> None:
    """Warns that a step moved nothing: all rollouts had the same reward, and there is no control variate."""
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
