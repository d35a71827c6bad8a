"""TensorBoard events of a run, in a folder that appears with the first of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from datamask_pl.compat import next_version
from datamask_pl.distributed.world import world
from datamask_pl.errors import warn

# Seconds that closing the file may take: a write that was interrupted leaves its thread waiting for minutes.
CLOSE_S = 10.0


class RunLogger(TensorBoardLogger):
    """TensorBoardLogger that writes nothing before there is something to log.

    Lightning opens every logger before the data are checked; a run that ends with an error there would leave a folder
    with an empty event file. The configuration is in the run's config.yaml, so no hparams.yaml is written.

    Args:
        save_dir: folder of all runs.
        name: folder of the runs of one kind, in `save_dir`.
        version: folder of this run, in `name`; by default the first free one of `version_0`, `version_1`, ...
        run_name: the same, but never taken for a number: of `version: 7` the folder is `version_7`, of `run_name: 7` it
            is `7`. `fit --run_name` sets it.
    """

    def __init__(
        self,
        *,
        save_dir: str = "runs",
        name: str = "datamask",
        version: int | str | None = None,
        run_name: str | None = None,
    ) -> None:
        version = version if run_name is None else run_name
        super().__init__(save_dir=save_dir, name=name, version=version, default_hp_metric=False)
        self._has_begun = False
        self._has_failed = False

    @property
    def version(self) -> int | str:
        """Name or number of the run's folder; where groups of ranks log side by side, rank 0 of all chooses it."""
        if self._version is None:
            found = world().broadcast_from_first("run-version", lambda: str(next_version(self)))
            self._version = int(found)
        return self._version

    @property
    def experiment(self) -> Any:  # noqa: ANN401
        """The SummaryWriter, once something has been logged; every group of ranks but the first has its own folder."""
        if not self._has_begun or self._has_failed:
            return _NoWriter()
        if self._experiment is None and world().group > 0:
            self._experiment = SummaryWriter(log_dir=os.path.join(self.log_dir, f"group-{world().group:02d}"))
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes scalars, all of a step as one event: each one wakes the thread that writes, and waits for it."""
        if self._has_failed:
            return
        self._has_begun = True
        with self._warning_once():
            writer = self.experiment.file_writer
            if writer is None:  # closed by `finalize`: a scalar opens it again
                super().log_metrics(dict(metrics), step)
                return
            values = [Summary.Value(tag=name, simple_value=number) for name, number in metrics.items()]
            writer.add_summary(Summary(value=values), step)

    @rank_zero_only
    def save(self) -> None:
        """Forces events to disk."""
        with self._warning_once():
            self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the file, for which the thread that writes is waited for, but not for long."""
        close = super().finalize
        failures: list[Exception] = []

        def run() -> None:
            try:
                close(status)
            except Exception as error:
                failures.append(error)

        closing = Thread(target=run, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._has_failed = True
            warn(f"the last events were not written to {self.log_dir} within {CLOSE_S:g} s; the mask is not affected.")
        with self._warning_once():
            for error in failures:
                raise error

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        """Warns once where events cannot be written, and writes no more: a run does not end for that."""
        try:
            yield
        except (OSError, ValueError) as error:
            # Lightning says of whatever goes wrong that the number cannot be logged
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            self._has_failed = True
            reason = cause.strerror or str(cause)
            warn(f"events cannot be written to {self.log_dir} ({reason}); the run continues without them.")


class _NoWriter:
    """Stands for a SummaryWriter that has not been opened, or that cannot write: every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
