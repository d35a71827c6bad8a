"""The mask on disk: one parquet part a block, and a manifest that says what they belong to.

A part has one row a sample of the block: the id in its exact type, where the sample came from, whether it is kept, its
logit, inclusion probability and quality, and its cost and group where it has them. Parts and manifest are written
whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.utilities import rank_zero_warn

from datamask_pl.atomic import atomic_path
from datamask_pl.data.types import BlockResult
from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.settings import differences

FORMAT_VERSION = 1
MANIFEST_NAME = "_manifest.json"
MAX_MERGES = 20
_METADATA_KEY = b"datamask_pl"
_DAMAGES = (OSError, pa.ArrowException, ValueError, KeyError, TypeError)
_PART = re.compile(r"part-(\d{5,})\.parquet")


@dataclass
class Manifest:
    """What the parts of a mask folder belong to.

    Attributes:
        plan_hash: SHA-256 of files, columns and options that decide the blocks.
        files: source files; a part's `source_file` is one of them.
        num_blocks: parts of the complete mask.
        settings: the learner's options that decide the mask.
        versions: of the packages that made it.
        config: the resolved configuration of the run, if it came from the command line.
        blocks: what is known of each finished block, by its index.
        format: version of this format.
    """

    plan_hash: str
    files: list[str]
    num_blocks: int
    settings: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Brings the manifest of a mask folder up to date with the parts that are there.

        Several runs, or groups of ranks, may write to one folder. Each takes over what the others wrote, and looks
        again after it has written: a part is there before its writer's manifest, so the last to look sees all.

        Raises:
            DataFileError: If it cannot be read or written.
        """
        for _ in range(MAX_MERGES):
            before = Manifest.read(folder)
            known = {**({} if before is None else before.blocks), **self.blocks}
            parts = list_parts(folder)
            for block in parts:
                if block not in known and (about := read_part(folder, block)) is not None:
                    known[block] = about
            self.blocks = {block: known[block] for block in parts if block in known}
            with atomic_path(folder / MANIFEST_NAME) as temporary:
                content = {**asdict(self), "blocks": {str(block): about for block, about in self.blocks.items()}}
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            after = Manifest.read(folder)
            if after is not None and set(list_parts(folder)) <= set(after.blocks):
                return

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a mask folder, or None if it has none.

        Raises:
            DataFileError: If it is damaged or of another format.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["blocks"] = {int(index): block for index, block in content["blocks"].items()}
            manifest = cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataFileError(
                f"{path} cannot be read as a mask manifest ({error}); restore it or use another folder."
            ) from error
        if manifest.format != FORMAT_VERSION:
            raise DataFileError(
                f"{path} has format {manifest.format}, this version reads {FORMAT_VERSION}; use the one that wrote it."
            )
        return manifest


def part_name(block: int) -> str:
    """File name of a block's part.

    Example:
        >>> part_name(12)
        'part-00012.parquet'
    """
    return f"part-{block:05d}.parquet"


def list_parts(folder: Path) -> list[int]:
    """Blocks whose parts are in a mask folder, in order; empty if there is no such folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _PART.fullmatch(name)))


def write_part(
    folder: Path, result: BlockResult, *, files: list[str], plan_hash: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Writes the part of a block. Its metadata say what the manifest says, so that a part stands for itself.

    Args:
        folder: the mask folder.
        result: what was learned.
        files: names of the source files, by `Block.source_file_N`.
        plan_hash: of the data module.
        settings: of the learner.

    Returns:
        What the manifest says of the block.

    Raises:
        DataFileError: If it cannot be written.
    """
    block = result.block
    columns = {
        "id": block.ids,
        "source_file": pa.DictionaryArray.from_arrays(
            pa.array(block.source_file_N.numpy(), pa.int32()), pa.array(files, pa.string())
        ),
        "source_row": pa.array(block.source_row_N.numpy(), pa.int64()),
        "selected": pa.array(result.mask_N.numpy()),
        "logit": pa.array(result.logits_N.numpy().astype(np.float32, copy=False)),
        "probability": pa.array(result.probability_N.numpy().astype(np.float32, copy=False)),
        "quality": pa.array(block.quality_N.cpu().numpy()),
    }
    if block.limits is not None and block.limits.cost_N is not None:
        columns["cost"] = pa.array(block.limits.cost_N.numpy())
    if block.limits is not None and block.limits.group_N is not None:
        columns["group"] = pa.DictionaryArray.from_arrays(
            pa.array(block.limits.group_N.numpy(), pa.int32()), pa.array(block.limits.names, pa.string())
        )
    about = describe_block(result)
    write_table(folder, block.index, pa.table(columns), plan_hash=plan_hash, settings=settings, about=about)
    return about


def write_table(
    folder: Path, block: int, table: pa.Table, *, plan_hash: str, settings: dict[str, Any], about: dict[str, Any]
) -> None:
    """Writes a part from its columns and what its footer says.

    Raises:
        DataFileError: If it cannot be written.
    """
    metadata = {"format": FORMAT_VERSION, "plan_hash": plan_hash, "settings": settings, "about": about}
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(metadata).encode()})
    with atomic_path(folder / part_name(block)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_part(
    folder: Path, block: int, *, plan_hash: str | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """What a part says of its block, from its footer.

    Args:
        folder: the mask folder.
        block: index of the block.
        plan_hash: of the data that it must belong to, if given.
        settings: that it must have been made with, if given.

    Returns:
        As `describe_block`; None if there is no such part, or it is damaged, which is said in a warning.

    Raises:
        ConfigError: If it is the mask of other data, or was made with other settings; names what differs.
    """
    path = folder / part_name(block)
    if not path.exists():
        return None
    try:
        metadata = _read_metadata(path)
    except _DAMAGES as error:
        rank_zero_warn(f"{path} is damaged ({error}); its block is learned again.")
        return None
    if plan_hash is not None and metadata["plan_hash"] != plan_hash:
        raise ConfigError(
            f"{path} is the mask of other data (plan {metadata['plan_hash'][:12]}, here {plan_hash[:12]}); "
            "give another --run_name or mask.output."
        )
    if settings is not None and (differing := differences(metadata["settings"], settings)):
        raise ConfigError(
            f"{path} was made with other options: {'; '.join(differing)}. Give the same ones to continue, or another "
            "--run_name or mask.output."
        )
    about: dict[str, Any] = metadata["about"]
    return about


def read_complete(folder: Path) -> Manifest:
    """The manifest of a mask whose parts are all there, with what they say of their blocks.

    Raises:
        DataFileError: If the folder holds no mask, or a part of it is damaged or of another run.
        ConfigError: If parts are missing.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        raise DataFileError(
            f"{folder} is no mask folder: it has no {MANIFEST_NAME}; give the folder that fit names at its end, "
            "such as runs/fineweb/version_0/mask."
        )
    parts = list_parts(folder)
    missing = sorted(set(range(manifest.num_blocks)).difference(parts))
    if missing:
        raise ConfigError(
            f"{folder} has {manifest.num_blocks - len(missing)} of {manifest.num_blocks} parts, the first that is "
            f"missing is {part_name(missing[0])}; finish the run: the same fit command, with --run_name and the "
            "name of its folder, goes on."
        )
    for block in range(manifest.num_blocks):
        path = folder / part_name(block)
        try:
            metadata = _read_metadata(path)
        except _DAMAGES as error:
            reason = str(error).rstrip(".")
            raise DataFileError(f"{path} is damaged ({reason}); the same fit command writes it again.") from error
        if metadata["plan_hash"] != manifest.plan_hash:
            raise DataFileError(
                f"{path} is the mask of other data (plan {metadata['plan_hash'][:12]}, the manifest says "
                f"{manifest.plan_hash[:12]}); put back the parts of one run."
            )
        manifest.blocks[block] = metadata["about"]
    return manifest


def _read_metadata(path: Path) -> dict[str, Any]:
    """What is written into a part's footer. Raises one of `_DAMAGES` if the part is not whole."""
    footer = pq.read_metadata(path)
    metadata: dict[str, Any] = json.loads((footer.metadata or {})[_METADATA_KEY])
    if footer.num_rows != metadata["about"]["num_samples"]:
        raise ValueError(f"{footer.num_rows} rows instead of {metadata['about']['num_samples']}")
    return metadata


def describe_block(result: BlockResult) -> dict[str, Any]:
    """What the manifest says of a block: plain types."""
    limits = {} if not result.budgets else {"budgets": [asdict(group) for group in result.budgets]}
    return {
        "part": part_name(result.block.index),
        "num_samples": result.block.num_samples,
        "num_selected": result.num_selected,
        "num_dropped": result.block.num_dropped,
        "mask": asdict(result.mask),
        "random": asdict(result.random),
        "top_quality": asdict(result.top_quality),
        "scales": result.scales,
        "num_steps": result.num_steps,
        "seconds": round(result.seconds, 3),
        **limits,
    }


def describe_budgets(blocks: Iterable[dict[str, Any]], *, max_groups: int = 20) -> list[str]:
    """Lines that say what is kept of each group over all blocks, where there are limits; of the largest groups."""
    groups: dict[str, list[float]] = {}
    keys = ("num_selected", "num_samples", "kept_cost", "budget", "cost")
    for group in (group for block in blocks for group in block.get("budgets", [])):
        before = groups.get(group["name"], [0.0] * len(keys))
        # groups that are not limited by themselves have no budget
        groups[group["name"]] = [old + (group[key] or 0.0) for old, key in zip(before, keys, strict=True)]
    if not groups:
        return []
    largest = sorted(groups, key=lambda name: -groups[name][-1])[:max_groups]
    width = max(12, *(len(name) + 2 for name in largest))
    lines = ["", f"{'group':<{width}}{'kept':>14}{'of':>14}{'cost kept':>16}{'budget':>16}{'of':>16}"]
    for name in largest:
        kept, whole, *costs = groups[name]
        lines.append(
            f"{name or 'all':<{width}}{kept:>14,.0f}{whole:>14,.0f}" + "".join(f"{cost:>16,.6g}" for cost in costs)
        )
    if len(groups) > max_groups:
        lines.append(f"and {len(groups) - max_groups} more groups, in {MANIFEST_NAME}")
    return lines
