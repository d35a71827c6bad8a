"""Every error a user can cause. Each names the argument or file, the rule, what was seen and the remedy.

The command line prints an error as one line and ends with a code of its own, without a traceback; a warning is one
line there, too.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from pathlib import Path


class DatamaskError(Exception):
    """Base of all errors that a user's input can cause.

    Attributes:
        is_on_all_ranks: True if every rank raises this same error, so that only rank 0 needs to print it.
    """

    is_on_all_ranks: bool = False


class ConfigError(DatamaskError, ValueError):
    """An option, or a combination of options, that cannot work."""


class BudgetError(DatamaskError, ValueError):
    """A select_ratio that cannot be honoured on a block."""


class SchemaError(DatamaskError, ValueError):
    """A file's columns or their types are not what the config names."""


class BadRowError(DatamaskError, ValueError):
    """A row's id, quality or features cannot be used."""


class DataFileError(DatamaskError, OSError):
    """A file is missing, empty, cut off, or cannot be read or written."""


class ObjectiveError(DatamaskError, ValueError):
    """An objective returned something other than one finite number a mask."""


class CheckpointError(DatamaskError, ValueError):
    """A checkpoint is missing, cut off, or was made for other data or another config."""


class LaunchError(DatamaskError, ValueError):
    """The processes that were started are not the processes that the trainer was told of."""


class AgreementError(DatamaskError, RuntimeError):
    """Ranks that must hold the same logits do not."""


class RankFailedError(DatamaskError, RuntimeError):
    """Another rank ended, so that this one cannot go on."""


class PreemptedError(DatamaskError):
    """The run was told to end, has saved, and can be continued. Not a fault of anyone's."""


def check_choice(option: str, value: object, choices: Collection[str]) -> None:
    """Raises a ConfigError that lists the choices if the value is not one of them."""
    if value not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(choices)}, got {value!r}.")


class DatamaskWarning(UserWarning):
    """A fact about the data or the run that needs attention but ends nothing."""


def warn(message: str | DatamaskWarning) -> None:
    """Warns on the first rank of those that solve a block together. Every warning of the package takes this way."""
    group = sys.modules.get("torch.distributed")  # not imported for this: most commands need no torch
    is_joined = group is not None and group.is_available() and group.is_initialized()
    if (group.get_rank() if group is not None and is_joined else launched_rank()) == 0:
        warnings.warn(message, DatamaskWarning, stacklevel=2)


def launched_rank() -> int:
    """This process's rank over all, as torchrun, SLURM or Lightning named it in the environment; 0 if alone."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


def program() -> str:
    """The words that this program was called with, for commands to type next."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("datamask_pl", "__main__.py"):
        return "python -m datamask_pl"
    return "datamask_pl" if path.name == "datamask_pl" else f"python {path if path.name == 'cli.py' else 'cli.py'}"
