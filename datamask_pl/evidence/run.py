"""A finished run read back: its mask, data and objective, for `compare` and `report`.

Shapes: N samples of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from datamask_pl.data.module import FeatureDataModule
from datamask_pl.data.shards import plain
from datamask_pl.data.types import Block
from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.atomic import local_path
from datamask_pl.io.paths import AnyPath, any_path
from datamask_pl.learner.loop import learn
from datamask_pl.learner.module import MaskLearner
from datamask_pl.mask.manifest import Manifest, read_columns, read_finished
from datamask_pl.mask.parts import MANIFEST_NAME, part_name
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

_LIMITS = ("cost_column", "group_column", "keep_ids", "drop_ids")


@dataclass(frozen=True)
class FinishedRun:
    """A mask with its data and objective.

    Attributes:
        folder: where results are written.
        mask: folder of the parts.
        manifest: of the mask, with the finished blocks.
        data: the files from which the mask was learned.
        learner: an untrained learner with the options of the run.
        quality_weight: option of the run.
    """

    folder: Path
    mask: AnyPath
    manifest: Manifest
    data: FeatureDataModule
    learner: MaskLearner
    quality_weight: float

    @property
    def objective(self) -> JointObjective:
        """The objective of the run."""
        return self.learner.objective

    @property
    def root(self) -> AnyPath:
        """Folder of the run, or of the mask if that is elsewhere."""
        return self.folder if self.mask == self.folder / "mask" else self.mask

    @property
    def is_exported(self) -> bool:
        """True if `export` made the mask from the logits of a run with another budget."""
        return any(entry.made_from for entry in self.manifest.blocks.values())

    @property
    def limits(self) -> list[str]:
        """Options that limit the mask, other than the number of samples."""
        return limits_of(self.manifest)

    def scales(self, index: int) -> dict[str, float]:
        """The scale of each term in a block.

        Raises:
            DataFileError: If the part has no scales.
        """
        found = self.manifest.blocks[index].scales
        names = [term.name for term in self.objective.terms]
        if not isinstance(found, dict) or not all(isinstance(found.get(name), float) for name in names):
            raise DataFileError(f"{self.mask / part_name(index)} has no scales of the terms of f; make the mask again.")
        return {name: found[name] for name in names}

    @property
    def can_relearn(self) -> bool:
        """True if `relearn` repeats the run's method: whole blocks, limited by a number of samples alone."""
        return self.learner.method.is_whole_block and not self.limits

    def relearn(self, ground: GroundSet, scales: Tensor) -> Tensor:
        """The mask that the run's method learns for a ground set; see `learner.loop.learn`.

        Args:
            ground: the samples and the budget.
            scales: float64 (number of terms,), divisors of the terms.

        Returns:
            bool (N,), True = kept.
        """
        return learn(ground, objective=self.objective, scales=scales, method=self.learner.method)


def limits_of(manifest: Manifest) -> list[str]:
    """Options that limit a mask, other than the number of samples; of `export`, if that made it."""
    settings, data = manifest.settings, (manifest.config or {}).get("data", {})
    if "export.select_ratio" in settings:
        return [f"export.{name}" for name in _LIMITS if settings.get(f"export.{name}")]
    return [f"data.{name}" for name in _LIMITS if data.get(name)]


def find_mask(run: str | None, mask: str | None, output: str | None) -> tuple[AnyPath, Path]:
    """Folder of the mask, and folder for the results about it.

    The latter is `output`, or else the run's folder. For a mask outside a run, as `export` writes it, it is
    NAME-evidence next to the mask, or in the current folder if the mask is in an object store.

    Raises:
        ConfigError: If neither or both of run and mask are set.
        DataFileError: If there is no mask.
    """
    if (run is None) == (mask is None):
        raise ConfigError("pass either --run, the folder of a run, or --mask, the folder of a mask.")
    if run is not None:
        folder = local_path("run", run)
        found: AnyPath = folder / "mask"
        if not (found / MANIFEST_NAME).exists():
            if (folder / MANIFEST_NAME).exists():
                hint = f"it is a mask folder itself: --mask {folder}"
            elif folder.is_dir():
                hint = "if mask.output was set, pass that folder as --mask"
            else:
                hint = "pass the folder that fit prints at the end, such as runs/fineweb/version_0"
            raise DataFileError(f"{folder} has no mask ({found / MANIFEST_NAME} does not exist); {hint}.")
    else:
        found = any_path("mask", str(mask))
        folder = _beside(found)
        if not (found / MANIFEST_NAME).exists():
            raise DataFileError(
                f"{found} is not a mask folder: it has no {MANIFEST_NAME}; pass the folder that fit prints at the "
                "end, such as runs/fineweb/version_0/mask."
            )
    return found, folder if output is None else local_path("output", output)


def _beside(mask: AnyPath) -> Path:
    if isinstance(mask, Path):
        whole = mask.absolute()
        is_of_run = whole.name == "mask" and (whole.parent / "config.yaml").exists()
        return mask.parent if is_of_run else mask.with_name(f"{whole.name}-evidence")
    return Path(f"{mask.name}-evidence")


def open_run(mask: AnyPath, folder: Path, *, source: str | list[str] | None) -> FinishedRun:
    """Reads the manifest of a mask, and finds the files from which it was learned.

    Args:
        mask: folder of the mask.
        folder: where results are written.
        source: the files, if they are no longer at the run's data.path.

    Raises:
        ConfigError: If the mask was learned from Python, has no finished block, its configuration does not fit this
            version, or the files are not those that it was learned from.
        DataFileError: If a file is missing or cannot be read, or a part of the mask is damaged.
        SchemaError: If a column is missing.
    """
    manifest = read_finished(mask)
    data, learner = _instantiate(manifest, mask, source)
    try:
        data.setup()
    except DataFileError as error:
        if source is not None:
            raise
        raise DataFileError(
            f"{str(error).rstrip('.')} (this is data.path of the run; if the files have moved, pass --source)."
        ) from error
    if data.plan_hash != manifest.plan_hash:
        given = "source" if source is not None else "data.path of the run"
        raise ConfigError(
            f"{given}: {mask} was learned from other files (plan {manifest.plan_hash[:12]}, current plan "
            f"{data.plan_hash[:12]}); names, sizes, row groups and columns must be the same. "
            f"The mask's files: {_few(manifest.files)}."
        )
    config = manifest.config or {}
    return FinishedRun(
        folder=folder,
        mask=mask,
        manifest=manifest,
        data=data,
        learner=learner,
        quality_weight=float(config["model"]["quality_weight"]),
    )


def read_block(run: FinishedRun, index: int) -> tuple[Block, Tensor]:
    """A block, and its mask.

    Args:
        run: that it is of.
        index: a finished block.

    Returns:
        The block, and bool (N,), True = kept.

    Raises:
        DataFileError: If the samples in the files are not those of the part, or it is damaged.
    """
    path = run.mask / part_name(index)
    table = read_columns(run.mask, index, run.manifest, ["id", "selected"])
    block = run.data.read_block(index)
    saved, current = plain(_whole(table["id"])), plain(block.ids)
    if not current.equals(saved):
        pairs = zip(current.to_pylist(), saved.to_pylist(), strict=False)
        row = next((row for row, (one, other) in enumerate(pairs) if one != other), min(len(current), len(saved)))
        raise DataFileError(
            f"{path}: the files no longer hold the samples of the mask; they differ from sample {row} of the block on "
            f"({len(saved)} samples in the mask, {len(current)} in the files). Restore the files, or fit again."
        )
    return block, torch.from_numpy(table["selected"].to_numpy())


def ground_set(block: Block, num_selected: int, rows: Tensor | None = None) -> GroundSet:
    """The samples of a block, or some of them, as the objective sees them.

    Args:
        block: read from the files.
        num_selected: the budget.
        rows: int64, rows of the block. Default: all.
    """
    chosen = slice(None) if rows is None else rows
    return GroundSet.of(
        features_ND=block.features_ND[chosen],
        quality_N=block.scaled_quality_N[chosen],
        budget=num_selected,
        inv_norm_N=block.inv_norm_N[chosen],
    )


def _instantiate(
    manifest: Manifest, mask: AnyPath, source: str | list[str] | None
) -> tuple[FeatureDataModule, MaskLearner]:
    """Data module and learner with the configuration of the run."""
    if manifest.config is None:
        raise ConfigError(
            f"{mask} was made from Python: its {MANIFEST_NAME} records neither data nor objective. compare and report "
            "need a mask made by the fit command."
        )
    config: dict[str, Any] = {name: dict(manifest.config[name]) for name in ("data", "model")}
    if source is not None:
        config["data"]["path"] = source
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FeatureDataModule, "data")
    parser.add_class_arguments(MaskLearner, "model")
    try:
        made = parser.instantiate_classes(parser.parse_object(config))
    except ArgumentError as error:
        raise ConfigError(
            f"{mask}: the run's configuration cannot be used here ({' '.join(str(error).split())}); use the version of "
            f"datamask_pl that made it, {manifest.versions.get('datamask_pl')}, and have its own objectives importable."
        ) from error
    return made.data, made.model


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
