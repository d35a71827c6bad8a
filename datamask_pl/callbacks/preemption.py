"""Preemption: a run that is told to end saves between two steps, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from datamask_pl.distributed import RankGroup
from datamask_pl.errors import ConfigError


class Preemption(Callback):
    """Stops after the step at hand when SIGTERM or the configured signal arrives at any rank of the group.

    The handler sets a flag and nothing else: saving from within it, as Lightning does, meets the other ranks in the
    middle of a collective, and hangs. At the end of each step the ranks agree whether any of them has been told to end.

    Args:
        signal: what the scheduler sends ahead of the end, by name; SLURM's `--signal=USR1@120` sends SIGUSR1.
        requeue: put the SLURM job back in the queue, with `scontrol requeue`, before the run ends.

    Raises:
        ConfigError: If there is no such signal.
    """

    def __init__(self, *, signal: str = "SIGUSR1", requeue: bool = False) -> None:
        self.signals = {_signal_of("SIGTERM"), _signal_of(signal)}
        self.requeue = requeue
        self.is_preempted = False
        self._received: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over, from Lightning too."""
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                signal.signal(number, self._note)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:  # noqa: ANN401
        """Asks all ranks of the group. Collective."""
        if RankGroup.world().any(self._received is not None):
            self.is_preempted = True
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Requeues the job, once everything has been saved."""
        if self.is_preempted and self.requeue and os.environ.get("SLURM_PROCID", "0") == "0":
            requeue_slurm_job()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """From here on the signals do nothing: the run ends anyway, and its exit code shall say how."""
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received = number


def requeue_slurm_job() -> None:
    """Puts this SLURM job, or this task of its array, back in the queue; warns if that is not possible."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None:
        rank_zero_warn("preemption.requeue: SLURM_JOB_ID is not set, this is no SLURM job; start the command again.")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        rank_zero_warn(f"scontrol requeue {job} failed ({reason.strip()}); start the command again.")


def _signal_of(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ConfigError(f"preemption.signal must be a signal's name such as SIGUSR1, got {name!r}.") from None
