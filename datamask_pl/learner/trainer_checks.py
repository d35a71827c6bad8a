"""Refuses options of Lightning's trainer that would shorten a block's training silently, or that do nothing here."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
)

from datamask_pl.errors import ConfigError

_LESS_WORK = "a block would count as finished after fewer steps; set model.num_steps or pass fewer files instead"
_NO_GRADIENT = "the direction of a step is computed in closed form and bounded by model.max_lr; omit it"
_UNUSABLE = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging)


def check_trainer(trainer: Trainer) -> None:
    """Checks a trainer before any work.

    Raises:
        ConfigError: If it would compute in half or double precision, do less than whole blocks, do nothing at all, or
            was given an option that cannot have an effect.
    """
    if trainer.precision != "32-true":
        raise ConfigError(
            f"trainer.precision must be 32-true, got {trainer.precision}: rewards that differ by a part in a thousand "
            "are lost in half precision. Features are stored and read in float16 where the files are."
        )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning's debugging connector
        raise ConfigError(
            "trainer.fast_dev_run is not supported: it has no run folder, so the mask of one step would land in the "
            "current folder. For a trial use --model.num_steps 2 and one file as --data.path."
        )
    share, num_summed = trainer.limit_train_batches, trainer.accumulate_grad_batches
    refused = [
        ("overfit_batches", trainer.overfit_batches, trainer.overfit_batches != 0, _LESS_WORK),  # type: ignore[attr-defined]
        ("limit_train_batches", share, not (isinstance(share, float) and share == 1.0), _LESS_WORK),
        ("gradient_clip_val", trainer.gradient_clip_val, bool(trainer.gradient_clip_val), _NO_GRADIENT),
        ("accumulate_grad_batches", num_summed, num_summed != 1, _NO_GRADIENT),
    ]
    for name, value, is_refused, reason in refused:
        if is_refused:
            raise ConfigError(f"trainer.{name} {value} is not supported: {reason}.")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _UNUSABLE):
            raise ConfigError(f"trainer.callbacks: {type(callback).__name__} is not supported: {_NO_GRADIENT}.")
    nothing = {"max_epochs": trainer.max_epochs == 0, "max_steps": trainer.max_steps == 0, "max_time": is_over(trainer)}
    for name, is_nothing in nothing.items():
        if is_nothing:
            raise ConfigError(f"trainer.{name} allows no work, so there would be no mask; raise or omit it.")


def is_over(trainer: Trainer) -> bool:
    """Whether trainer.max_time has passed."""
    left = [callback.time_remaining() for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return any(seconds is not None and seconds <= 0 for seconds in left)
