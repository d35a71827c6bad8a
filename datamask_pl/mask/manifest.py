"""The mask on disk: one parquet part a block, and a manifest that says what they belong to.

A part has one row a sample of the block: the id in its exact type, where the sample came from, whether it is kept, its
logit, inclusion probability and quality, and its cost and group where it has them. Parts and manifest are written
whole or not at all.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.utilities import rank_zero_warn

from datamask_pl.data.types import BlockResult
from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.paths import AnyPath, list_names, readable
from datamask_pl.io.records import differences
from datamask_pl.mask.parts import (
    DAMAGES,
    FORMAT_VERSION,
    check_about,
    check_kinds,
    check_rows,
    encode_footer,
    read_part_footer,
)

MANIFEST_NAME = "_manifest.json"
MAX_MERGES = 20
MAX_BLOCKS = 10**8
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

    def write(self, folder: AnyPath) -> None:
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
                content = {**vars(self), "blocks": {str(block): about for block, about in self.blocks.items()}}
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            after = Manifest.read(folder)
            if after is not None and set(list_parts(folder)) <= set(after.blocks):
                return

    @classmethod
    def read(cls, folder: AnyPath) -> Manifest | None:
        """The manifest of a mask folder, or None if it has none.

        Raises:
            DataFileError: If it is damaged or of another format.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("format", FORMAT_VERSION) != FORMAT_VERSION:
                raise DataFileError(
                    f"{path} has format {content['format']}, this version reads {FORMAT_VERSION}; use the one that "
                    "wrote it."
                )
            content["blocks"] = {int(index): check_about(block) for index, block in content["blocks"].items()}
            manifest = cls(**content)
            manifest._check()
        except DataFileError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataFileError(
                f"{path} cannot be read as a mask manifest ({error}); restore it or use another folder."
            ) from error
        return manifest

    def _check(self) -> None:
        """Raises a ValueError if an entry is of another kind: JSON may hold anything."""
        check_kinds(
            {**vars(self), "config": self.config or {}},
            {"plan_hash": str, "files": list, "num_blocks": int, "settings": dict, "versions": dict, "config": dict},
        )
        if not all(isinstance(name, str) for name in self.files):
            raise ValueError("files holds other things than names")
        if not 0 <= self.num_blocks <= MAX_BLOCKS or any(not 0 <= index < self.num_blocks for index in self.blocks):
            raise ValueError(f"num_blocks is {self.num_blocks}, blocks are listed up to {max(self.blocks, default=0)}")


def part_name(block: int) -> str:
    """File name of a block's part.

    Example:
        >>> part_name(12)
        'part-00012.parquet'
    """
    return f"part-{block:05d}.parquet"


def list_parts(folder: AnyPath) -> list[int]:
    """Blocks whose parts are in a mask folder, in order; empty if there is no such folder."""
    names = list_names(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _PART.fullmatch(name)))


def write_part(
    folder: AnyPath, result: BlockResult, *, files: list[str], plan_hash: str, settings: dict[str, Any]
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
    folder: AnyPath, block: int, table: pa.Table, *, plan_hash: str, settings: dict[str, Any], about: dict[str, Any]
) -> None:
    """Writes a part from its columns and what its footer says.

    Raises:
        DataFileError: If it cannot be written.
    """
    table = table.replace_schema_metadata(encode_footer(plan_hash=plan_hash, settings=settings, about=about))
    with atomic_path(folder / part_name(block)) as temporary:
        # no dictionaries: a page's header has no checksum, and that of a dictionary can turn all values into others
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True, use_dictionary=False)


def read_part(
    folder: AnyPath,
    block: int,
    *,
    plan_hash: str | None = None,
    settings: dict[str, Any] | None = None,
    consequence: str = "its block is learned again",
) -> dict[str, Any] | None:
    """What a part says of its block, from its footer.

    Args:
        folder: the mask folder.
        block: index of the block.
        plan_hash: of the data that it must belong to, if given.
        settings: that it must have been made with, if given.
        consequence: what comes of it if it is damaged, in words.

    Returns:
        As `describe_block`; None if there is no such part, or it is damaged, which is said in a warning.

    Raises:
        ConfigError: If it is the mask of other data, or was made with other settings; names what differs.
    """
    path = folder / part_name(block)
    try:
        metadata = read_part_footer(path)
    except FileNotFoundError:
        return None
    except DAMAGES as error:
        rank_zero_warn(f"{path} is damaged ({error}); {consequence}.")
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
    return dict(metadata["about"])


def read_finished(folder: AnyPath) -> Manifest:
    """The manifest of a mask, finished or not, with what the parts that are there say of their blocks.

    Raises:
        DataFileError: If the folder holds no mask, or a part of it is damaged or of another run.
        ConfigError: If no part is there.
    """
    manifest = _read_manifest(folder)
    parts = [block for block in list_parts(folder) if block < manifest.num_blocks]
    if not parts:
        raise ConfigError(f"{folder} has no finished block; the same fit command, with --run_name, goes on with it.")
    manifest.blocks = {block: _read_about(folder, block, manifest) for block in parts}
    return manifest


def read_complete(folder: AnyPath) -> Manifest:
    """The manifest of a mask whose parts are all there, with what they say of their blocks.

    Raises:
        DataFileError: If the folder holds no mask, or a part of it is damaged or of another run.
        ConfigError: If parts are missing.
    """
    manifest = _read_manifest(folder)
    missing = sorted(set(range(manifest.num_blocks)).difference(list_parts(folder)))
    if missing:
        raise ConfigError(
            f"{folder} has {manifest.num_blocks - len(missing)} of {manifest.num_blocks} parts, the first that is "
            f"missing is {part_name(missing[0])}; finish the run: the same fit command, with --run_name and the "
            "name of its folder, goes on."
        )
    manifest.blocks = {block: _read_about(folder, block, manifest) for block in range(manifest.num_blocks)}
    return manifest


def _read_manifest(folder: AnyPath) -> Manifest:
    manifest = Manifest.read(folder)
    if manifest is None:
        hint = "give the folder that fit names at its end, such as runs/fineweb/version_0/mask"
        if (folder / "mask" / MANIFEST_NAME).exists():
            hint = f"the run's mask is {folder / 'mask'}"
        raise DataFileError(f"{folder} is no mask folder: it has no {MANIFEST_NAME}; {hint}.")
    return manifest


def _read_about(folder: AnyPath, block: int, manifest: Manifest) -> dict[str, Any]:
    """What a part says of its block, which is of the run that the manifest is of."""
    path = folder / part_name(block)
    try:
        metadata = read_part_footer(path)
    except DAMAGES as error:
        raise _damage(path, error) from error
    if metadata["plan_hash"] != manifest.plan_hash:
        raise DataFileError(
            f"{path} is the mask of other data (plan {metadata['plan_hash'][:12]}, the manifest says "
            f"{manifest.plan_hash[:12]}); put back the parts of one run."
        )
    if differing := differences(metadata["settings"], manifest.settings):
        raise DataFileError(
            f"{path} was made with other options than its manifest says: {'; '.join(differing)}; put back the "
            "parts of one run."
        )
    about: dict[str, Any] = metadata["about"]
    return about


def read_columns(folder: AnyPath, block: int, manifest: Manifest, columns: list[str]) -> pa.Table:
    """Some columns of a part of a mask, in which every value is one that `write_part` could have written.

    Args:
        folder: the mask folder.
        block: index of the block.
        manifest: from `read_complete` or `read_finished`.
        columns: names.

    Raises:
        DataFileError: If the part is damaged.
    """
    path = folder / part_name(block)
    try:
        with readable(path) as source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
            table = parquet.read(columns, use_threads=False)
        if missing := set(columns).difference(table.column_names):
            raise ValueError(f"it has no column {min(missing)}")
        check_rows(table, manifest.blocks[block], manifest.files)
    except DAMAGES as error:
        raise _damage(path, error) from error
    return table


def _damage(path: AnyPath, error: Exception) -> DataFileError:
    reason = str(error).rstrip(".")
    return DataFileError(f"{path} is damaged ({reason}); the command that made the mask writes it again.")


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
