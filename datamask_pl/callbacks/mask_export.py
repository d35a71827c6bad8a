"""MaskExport: writes a block's mask when the block is done."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamask_pl.callbacks.checkpoint import run_folder
from datamask_pl.data.types import learner_of, source_of
from datamask_pl.distributed.collectives import gather_objects, raise_on_all_ranks
from datamask_pl.errors import ConfigError
from datamask_pl.io.paths import AnyPath, any_path
from datamask_pl.io.records import differences
from datamask_pl.mask.manifest import Manifest
from datamask_pl.mask.parts import BlockEntry, list_parts, read_part, write_part

# The manifest is written whole, which takes the longer the more blocks there are: seconds, beyond ten thousand.
MANIFEST_SHARE = 0.05
PACKAGES = ("datamask_pl", "torch", "lightning", "pyarrow", "numpy")


class MaskExport(Checkpoint):
    """Writes the mask's parts and its manifest, by default into `mask` in the run's folder.

    A part is written with its block; the manifest too, unless that would take more than a twentieth of the time: then
    it lags behind until the run ends. What it says of a block stands in the block's part.

    A Checkpoint, so that Lightning calls it after the learner has rounded the block and saves checkpoints after it.

    Args:
        output: folder for the mask, instead of the run's; on this machine or in an object store (s3://, gs://, hf://).
    """

    def __init__(self, *, output: str | None = None) -> None:
        self.output = output
        self.config: dict[str, Any] | None = None
        self.manifest: Manifest | None = None
        self.folder: AnyPath | None = None
        self.num_finished_before = 0
        self._is_behind = False
        self._due_s = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder, and takes the blocks whose parts are whole out of the schedule. Collective.

        Writes nothing, unless no block is left and the run before was killed between its last part and the manifest.

        Raises:
            ConfigError: If the folder holds the mask of other data, or one that was made with other options.
        """
        self.folder = any_path("mask.output", self.output) if self.output else run_folder(trainer) / "mask"
        source = source_of(trainer)
        settings = learner_of(pl_module).settings()
        begun: Manifest | None = None
        finished: dict[int, BlockEntry] = {}
        with raise_on_all_ranks():
            begun = Manifest.read(self.folder)
            if begun is not None and begun.plan_hash != source.plan_hash:
                raise ConfigError(
                    f"{self.folder} holds the mask of other data: {self._other_data(begun)}. "
                    "Pass another --run_name or mask.output."
                )
            for block in set(source.schedule).intersection(list_parts(self.folder)):
                entry = read_part(self.folder, block, plan_hash=source.plan_hash, settings=settings)
                if entry is not None:
                    finished[block] = entry
        # as rank 0 sees the folder: on a file system that lags behind the ranks might not see the same
        finished = gather_objects(finished)[0]
        source.skip_blocks(finished)
        self.num_finished_before = len(finished)
        self.manifest = Manifest(
            plan_hash=source.plan_hash,
            files=source.files,
            num_blocks=source.num_blocks,
            settings=settings,
            versions=_versions(),
            config=self.config,
            blocks=finished,
        )
        is_listed = begun is not None and set(finished) <= set(begun.blocks)
        with raise_on_all_ranks():
            if trainer.is_global_zero and finished and not source.schedule and not is_listed:
                self.manifest.write(self.folder)

    def _other_data(self, begun: Manifest) -> str:
        """Differences between the data of a mask that was begun and the data of this run, as text."""
        saved, current = ((config or {}).get("data") or {} for config in (begun.config, self.config))
        options = [f"data.{words}" for words in differences(saved, current)] if saved and current else []
        return "; ".join(options) or "files were added, removed or rewritten, or the data options differ"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the manifest, so that a folder that cannot be written to is noticed now. Collective."""
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                self._write_manifest()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the part of the block, then the manifest if it is due; on rank 0. Every rank learns if that failed."""
        assert self.manifest is not None
        assert self.folder is not None
        result = learner_of(pl_module).result
        if result is None:  # the run stops within the block
            return
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                self.manifest.blocks[result.block.index] = write_part(
                    self.folder,
                    result,
                    files=self.manifest.files,
                    plan_hash=self.manifest.plan_hash,
                    settings=self.manifest.settings,
                )
                self._is_behind = True
                if monotonic() >= self._due_s:
                    self._write_manifest()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the manifest if it lags behind. Collective."""
        with raise_on_all_ranks():
            if self._is_behind:
                self._write_manifest()

    def _write_manifest(self) -> None:
        assert self.manifest is not None
        assert self.folder is not None
        begun_s = monotonic()
        self.manifest.write(self.folder)
        ended_s = monotonic()
        self._is_behind = False
        self._due_s = ended_s + (ended_s - begun_s) / MANIFEST_SHARE


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
