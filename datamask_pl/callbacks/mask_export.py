"""MaskExport: writes a block's mask when the block is done."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamask_pl.callbacks.checkpoint import run_folder
from datamask_pl.data.types import BlockResult, BlockSource
from datamask_pl.distributed import failing_together
from datamask_pl.errors import CheckpointError, ConfigError
from datamask_pl.mask_file import MANIFEST_NAME, Manifest, check_part, describe_block, write_part

PACKAGES = ("datamask_pl", "torch", "lightning", "pyarrow", "numpy")


class Learner(Protocol):
    """What the export asks of the learner."""

    result: BlockResult | None

    def settings(self) -> dict[str, Any]:
        """Options that decide the mask, by name."""


class MaskExport(Checkpoint):
    """Writes the mask's parts and its manifest, by default into `mask` in the run's folder.

    A Checkpoint, so that Lightning calls it after the learner has rounded the block and saves checkpoints after it.

    Args:
        output: folder for the mask, instead of the run's.
    """

    def __init__(self, *, output: str | None = None) -> None:
        self.output = output
        self.config: dict[str, Any] | None = None
        self.manifest: Manifest | None = None
        self.folder: Path | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the folder, checks that what is in it belongs to this run, and begins the manifest. Collective.

        Raises:
            ConfigError: If the folder holds the mask of other data.
            DataFileError: If it cannot be written to.
            CheckpointError: If a block that the checkpoint takes for finished is not there.
        """
        self.folder = Path(self.output) if self.output else run_folder(trainer) / "mask"
        source = _source(trainer)
        learner = cast(Learner, pl_module)
        with failing_together():
            finished = _finished_blocks(self.folder, trainer.current_epoch, plan_hash=source.plan_hash)
        self.manifest = Manifest(
            plan_hash=source.plan_hash,
            files=source.files,
            num_blocks=len(source.block_sizes),
            settings=learner.settings(),
            versions=_versions(),
            config=self.config,
            blocks=finished,
        )
        with failing_together():
            if trainer.is_global_zero:
                self.manifest.write(self.folder)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the part of the block, then the manifest; on rank 0, and every rank learns if that failed."""
        assert self.manifest is not None
        assert self.folder is not None
        result = cast(Learner, pl_module).result
        if result is None:  # the run stops within the block
            return
        self.manifest.blocks[result.block.index] = describe_block(result)
        with failing_together():
            if trainer.is_global_zero:
                write_part(self.folder, result, files=self.manifest.files, plan_hash=self.manifest.plan_hash)
                self.manifest.write(self.folder)


def _finished_blocks(folder: Path, num_finished: int, *, plan_hash: str) -> dict[int, dict[str, Any]]:
    """What the manifest says of the first blocks; other parts are of an earlier run, or will be made again."""
    manifest = Manifest.read(folder)
    if manifest is not None and manifest.plan_hash != plan_hash:
        raise ConfigError(
            f"{folder} holds the mask of other data (plan {manifest.plan_hash[:12]}, here {plan_hash[:12]}); "
            "give another folder as mask.output."
        )
    listed = {} if manifest is None else manifest.blocks
    for block in range(num_finished):
        check_part(folder, block, plan_hash=plan_hash)
        if block not in listed:
            raise CheckpointError(
                f"block {block} is finished according to the checkpoint, but {folder / MANIFEST_NAME} does not list "
                "it; keep a run's checkpoints and mask folder together, or start without --ckpt_path."
            )
    return {block: listed[block] for block in range(num_finished)}


def _source(trainer: Trainer) -> BlockSource:
    return cast(BlockSource, trainer.datamodule)  # type: ignore[attr-defined]  # set by Lightning's data connector


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
