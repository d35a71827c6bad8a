"""Every error a user can cause. Each names the argument or file, the rule, what was seen and the remedy.

The command line prints these as one line and exits with code 2; they never show a traceback there.
"""

from __future__ import annotations

from collections.abc import Collection


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
