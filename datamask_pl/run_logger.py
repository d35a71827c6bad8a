"""TensorBoard events of a run, in a folder that appears with the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


class RunLogger(TensorBoardLogger):
    """TensorBoardLogger that writes nothing before there is something to log.

    Lightning opens every logger before the data are checked; a run that ends with an error there would leave a folder
    with an empty event file. The configuration is in the run's config.yaml, so no hparams.yaml is written.

    Args:
        save_dir: folder of all runs.
        name: folder of the runs of one kind, in `save_dir`.
        version: folder of this run, in `name`; `version_0`, `version_1`, ... if left out, the first that is free.
    """

    def __init__(self, *, save_dir: str = "runs", name: str = "datamask", version: int | str | None = None) -> None:
        super().__init__(save_dir=save_dir, name=name, version=version, default_hp_metric=False)
        self._has_begun = False

    @property
    def experiment(self) -> Any:  # noqa: ANN401
        """The SummaryWriter, once something has been logged."""
        return super().experiment if self._has_begun else _NotBegun()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes scalars."""
        self._has_begun = True
        super().log_metrics(dict(metrics), step)

    @rank_zero_only
    def save(self) -> None:
        """Forces events to disk."""
        self.experiment.flush()


class _NotBegun:
    """Stands for a SummaryWriter that has not been opened."""

    def flush(self) -> None:
        """Nothing has been written."""

    def close(self) -> None:
        """Nothing is open."""
