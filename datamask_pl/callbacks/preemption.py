"""Preemption: a run that is told to end, by a signal or Ctrl-C, saves between two steps, or two blocks, and ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamask_pl.data.types import source_of
from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.distributed.world import world
from datamask_pl.errors import ConfigError, launched_rank, warn

# Seconds between looks whether another group of ranks was told to end: one question to the store they share.
LOOK_EVERY_S = 1.0
_PREEMPTED, _REQUEUE = "datamask-preempted", "datamask-requeue"


class Preemption(Checkpoint):
    """Stops after the current step or rounding when SIGTERM, Ctrl-C or the configured signal arrives at any rank.

    The handler sets a flag and nothing else: saving from within it, as Lightning does, meets the other ranks in the
    middle of a collective, and hangs. At the end of each step, and of each block but the last, the ranks agree whether
    any of them has been told to end. The other groups of ranks follow within about a second. A signal that comes while
    rows are checked, or a block is read and its neighbours are found, is heeded after the next step. A second Ctrl-C
    ends the process at once.

    A Checkpoint, so that Lightning calls it at a block's end after the block was rounded, not before.

    Args:
        signal: what the scheduler sends ahead of the end, by name; SLURM's `--signal=USR1@120` sends SIGUSR1.
        requeue: put the SLURM job back in the queue, with `scontrol requeue`, if it was this signal. SIGTERM, if that
            is not the one, ends the run alone: it may be a cancelled job's.

    Raises:
        ConfigError: If there is no such signal.
    """

    def __init__(self, *, signal: str = "SIGUSR1", requeue: bool = False) -> None:
        self.requeue_signal = _signal_of(signal)
        self.signals = {_signal_of("SIGTERM"), _signal_of("SIGINT"), self.requeue_signal}
        self.requeue = requeue
        self.is_preempted = False
        self._received: set[int] = set()
        self._handlers_before: dict[int, Any] = {}
        self._looked_s = -math.inf

    @property
    def is_interrupted(self) -> bool:
        """Whether it was Ctrl-C that ended the run."""
        return self.is_preempted and signal.SIGINT in self._received

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the signals over before Lightning does, which at the end puts back the handlers that it found."""
        self._handlers_before = {number: signal.getsignal(number) for number in self.signals}
        self._handle(self._note)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes them over from Lightning too."""
        self._handle(self._note)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:  # noqa: ANN401
        """Asks all ranks of the group, and now and then whether another group was told to end. Collective."""
        self._ask(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same after a block, for what comes before the first step of the next may take minutes. Collective."""
        source = source_of(trainer)
        if not trainer.should_stop and source.next_block is not None:
            self._ask(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Requeues the job, once everything has been saved; on rank 0, whichever group of ranks was told to end.

        Lightning calls RunSummary before this, which on rank 0 waits until the other groups have saved, too.
        """
        if world().rank == 0 and world().is_published(_PREEMPTED):
            self.is_preempted = True
        is_requeueing = self.requeue_signal in self._received or world().is_published(_REQUEUE)
        if self.is_preempted and self.requeue and is_requeueing and os.environ.get("SLURM_PROCID", "0") == "0":
            requeue_slurm_job()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts back the handlers that were there; after a preemption, signals do nothing while the process ends.

        Ctrl-C has its old meaning again.
        """
        self._handle(signal.SIG_IGN if self.is_preempted else None)
        if signal.SIGINT in self._handlers_before and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handlers_before[signal.SIGINT])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts back the handlers that were there before."""
        self._handle(None)

    def _ask(self, trainer: Trainer) -> None:
        if self.requeue_signal in self._received:
            world().publish(_REQUEUE)
        if RankGroup.current().any(bool(self._received) or self._are_others_told(trainer)):
            self.is_preempted = True
            trainer.should_stop = True
            world().publish(_PREEMPTED)

    def _are_others_told(self, trainer: Trainer) -> bool:
        """True if another group was told to end. The look itself fails once the process that holds the store is gone.

        Of groups of one rank nothing else would notice that: they have no collectives that would break.
        """
        now = time.monotonic()
        if world().num_groups == 1 or not trainer.is_global_zero or now - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = now
        return world().is_published(_PREEMPTED)

    def _handle(self, handler: Any) -> None:  # noqa: ANN401
        """Sets the handler of all signals, or, with None, those that there were before `setup`."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._handlers_before.items():
                signal.signal(number, before if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            # the next one ends the process: an exception would wait for threads and other ranks
            signal.signal(number, signal.SIG_DFL)
            if number in self._received:
                signal.raise_signal(number)
            if launched_rank() == 0:
                # not print: the signal may come in the midst of another one
                os.write(2, b"\nCtrl-C: the current step is finished and saved; press it again to end at once\n")
        self._received.add(number)


def requeue_slurm_job() -> None:
    """Puts this SLURM job, or this task of its array, back in the queue; warns if that is not possible."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None:
        warn("preemption.requeue: SLURM_JOB_ID is not set, this is not a SLURM job; start the command again.")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        warn(f"scontrol requeue {job} failed ({reason.strip()}); start the command again.")


def _signal_of(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise ConfigError(f"preemption.signal must be a signal's name such as SIGUSR1, got {name!r}.") from None
