"""LogitsCheckpoint: saves the logits so that a killed run continues as an uninterrupted one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamask_pl.data.types import PartialBatch, learner_of, source_of
from datamask_pl.distributed.collectives import gather_objects, raise_on_all_ranks
from datamask_pl.errors import ConfigError, warn
from datamask_pl.io.checkpoints import (
    checkpoint_name,
    list_checkpoints,
    newest_whole_checkpoint,
    parse_name,
    read_checkpoint,
    write_checkpoint,
)

CHECKPOINTS_OF_BLOCK = 10


class LogitsCheckpoint(Checkpoint):
    """Saves during a block, at its end, and where the run stops within one, into `checkpoints` in the run's folder.

    A block that was begun before, in the same folder, resumes from its newest whole checkpoint.

    Args:
        every_n_steps: steps of a block between checkpoints; default: a tenth of the block's steps.
        keep: checkpoints to keep, at least 1; older ones are deleted after a newer one is whole.
    """

    def __init__(self, *, every_n_steps: int | None = None, keep: int = 2) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"checkpoint.every_n_steps must be at least 1, got {every_n_steps}.")
        if keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {keep}.")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume_from: Path | None = None
        self._reached = (0, 0)
        self._written: list[Path] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts our own reader and writer of checkpoint files into Lightning."""
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for a checkpoint of the block that begins. Collective.

        Raises:
            CheckpointError: If there is one, of other data or other settings.
        """
        source = source_of(trainer)
        block = source.next_block
        if block is None:
            return
        folder = run_folder(trainer) / "checkpoints"
        num_steps = int(trainer.num_training_batches)
        found: Path | None = None
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                wanted = None if self.resume_from is None else parse_name(self.resume_from)
                is_wanted = wanted is not None and wanted[0] == block and wanted[1] < num_steps
                found = self.resume_from if is_wanted else newest_whole_checkpoint(folder, block, below=num_steps)
                self._written += list_checkpoints(folder, block)
        # rank 0 alone looks: on a file system that lags behind the ranks might not see the same
        found = gather_objects(found)[0]
        with raise_on_all_ranks():
            if found is not None:
                learner_of(pl_module).restore(read_checkpoint(found))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: PartialBatch,
        batch_idx: int,
    ) -> None:
        """Saves every so many steps, and after the last one that the trainer allows."""
        num_steps = int(trainer.num_training_batches)
        done = batch.step + 1
        self._reached = (batch.block.index, done)
        interval = self.every_n_steps or math.ceil(num_steps / CHECKPOINTS_OF_BLOCK)
        # Here, for at the epoch's end Lightning has counted the block as done, and would resume with the next.
        is_stopping = trainer.should_stop or trainer.global_step == trainer.max_steps
        # The block's last step is saved after its mask has been written, not before.
        if (done % interval == 0 or is_stopping) and done < num_steps:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after the block's mask has been written."""
        if learner_of(pl_module).is_block_done:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        block, step = self._reached
        learner_of(trainer.lightning_module).check_agreement(f"checkpoint of block {block}, step {step}")
        path = run_folder(trainer) / "checkpoints" / checkpoint_name(block, step)
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            self._written = [*(other for other in self._written if other != path), path]
            for old in self._written[: -self.keep]:
                try:
                    old.unlink(missing_ok=True)
                except OSError as error:  # the newer one is whole: no reason to end a run
                    warn(f"{old}, which is not needed any more, cannot be deleted: {error.strerror}.")
            self._written = self._written[-self.keep :]


def run_folder(trainer: Trainer) -> Path:
    """Where a run's files go: the logger's folder, or Lightning's root folder if there is no logger. Collective."""
    return Path(trainer.log_dir or trainer.default_root_dir)


class AtomicCheckpointIO(CheckpointIO):
    """How Lightning writes, reads and deletes checkpoint files."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Writes a checkpoint whole or not at all."""
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:  # noqa: ANN401
        """Reads tensors and plain types; nothing else is ever unpickled."""
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:  # noqa: ANN401
        """Deletes a checkpoint, if it exists."""
        Path(path).unlink(missing_ok=True)
