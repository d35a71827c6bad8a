"""Every use of what Lightning, torch or jsonargparse does not document. Each has a test that notices a change.

Attributes that a subclass inherits from Lightning stay in the subclass: `tests/unit/test_compat.py` names them.

Written for lightning 2.6, torch 2.10 to 2.13 and jsonargparse 4.39 to 4.53.
"""

from __future__ import annotations

from collections.abc import Sequence
from subprocess import Popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import TensorBoardLogger


def option_names(parser: ArgumentParser) -> list[str]:
    """The destinations of all options of a parser, such as `model.num_steps`; argparse has no list of them."""
    return [action.dest for action in parser._actions]


def launched_processes(trainer: Trainer) -> Sequence[Popen[Any]]:
    """The processes that Lightning started itself; empty where torchrun or SLURM did, or there is one process."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    launcher = trainer.strategy.launcher
    return launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else []


def next_version(logger: TensorBoardLogger) -> int:
    """The number of the run's folder that is next in the folder of the logger."""
    return int(logger._get_next_version())


def close_bar(bar: TQDMProgressBar) -> None:
    """Ends the line of the training bar if it was drawn; the public property raises if it was not."""
    if bar._train_progress_bar is not None:
        bar._train_progress_bar.close()


def set_rank_zero(rank: int) -> None:
    """Sets which rank the two `rank_zero_only` of Lightning, which keep their rank as an attribute, run on."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.pytorch.utilities import rank_zero_only

    for decorator in (rank_zero_only, fabric_rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]
