"""The record of a run's masks: what the parts in a folder belong to, and the entries of finished blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.data.shards import plain_type
from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.parquet import open_parquet
from datamask_pl.io.paths import AnyPath, readable
from datamask_pl.io.records import DAMAGES, check_kinds, decode, differences, encode
from datamask_pl.mask.parts import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    BlockEntry,
    check_columns,
    list_parts,
    part_name,
    read_part,
    read_part_footer,
)

MAX_MERGES = 20
MAX_BLOCKS = 10**8
_KINDS = {"plan_hash": str, "files": list, "num_blocks": int, "settings": dict, "versions": dict, "blocks": dict}


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
        blocks: entries of the finished blocks, by index.
    """

    plan_hash: str
    files: list[str]
    num_blocks: int
    settings: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any] | None = None
    blocks: dict[int, BlockEntry] = field(default_factory=dict)

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
                if block not in known and (entry := read_part(folder, block)) is not None:
                    known[block] = entry
            self.blocks = {block: known[block] for block in parts if block in known}
            entries = {str(block): entry.to_json() for block, entry in self.blocks.items()}
            with atomic_path(folder / MANIFEST_NAME) as temporary:
                text = encode({**vars(self), "blocks": entries}, version=FORMAT_VERSION)
                temporary.write_text(text, encoding="utf-8")
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
            content = decode(path.read_text(encoding="utf-8"), _KINDS, version=FORMAT_VERSION)
            content["blocks"] = {int(index): BlockEntry.parse(entry) for index, entry in content["blocks"].items()}
            manifest = cls(**content)
            manifest._check()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DAMAGES as error:
            if isinstance(error, DataFileError):
                raise
            raise DataFileError(
                f"{path} cannot be read as a mask manifest ({error}); restore it or use another folder."
            ) from error
        return manifest

    def _check(self) -> None:
        """Raises a ValueError if an entry is of another kind: JSON may hold anything."""
        check_kinds({"config": self.config or {}}, {"config": dict})
        if not all(isinstance(name, str) for name in self.files):
            raise ValueError("files holds other things than names")
        if not 0 <= self.num_blocks <= MAX_BLOCKS or any(not 0 <= index < self.num_blocks for index in self.blocks):
            raise ValueError(f"num_blocks is {self.num_blocks}, blocks are listed up to {max(self.blocks, default=0)}")


def read_finished(folder: AnyPath) -> Manifest:
    """The manifest of a mask, finished or not, with the entries of its parts.

    Raises:
        DataFileError: If the folder holds no mask, or a part of it is damaged or of another run.
        ConfigError: If no part is there.
    """
    manifest = _read_manifest(folder)
    parts = [block for block in list_parts(folder) if block < manifest.num_blocks]
    if not parts:
        raise ConfigError(f"{folder} has no finished block; the same fit command, with --run_name, continues it.")
    manifest.blocks = {block: _read_entry(folder, block, manifest) for block in parts}
    return manifest


def read_complete(folder: AnyPath) -> Manifest:
    """The manifest of a mask whose parts are all saved, with their entries.

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
            "name of its folder, continues it."
        )
    manifest.blocks = {block: _read_entry(folder, block, manifest) for block in range(manifest.num_blocks)}
    return manifest


def _read_manifest(folder: AnyPath) -> Manifest:
    manifest = Manifest.read(folder)
    if manifest is None:
        hint = "pass the folder that fit names at its end, such as runs/fineweb/version_0/mask"
        if (folder / "mask" / MANIFEST_NAME).exists():
            hint = f"the run's mask is {folder / 'mask'}"
        raise DataFileError(f"{folder} is not a mask folder: it has no {MANIFEST_NAME}; {hint}.")
    return manifest


def _read_entry(folder: AnyPath, block: int, manifest: Manifest) -> BlockEntry:
    """The entry of a part, which belongs to the run of the manifest."""
    path = folder / part_name(block)
    try:
        footer = read_part_footer(path)
    except DAMAGES as error:
        raise _damage(path, error) from error
    if footer.plan_hash != manifest.plan_hash:
        raise DataFileError(
            f"{path} is the mask of other data (plan {footer.plan_hash[:12]}, the manifest says "
            f"{manifest.plan_hash[:12]}); put back the parts of one run."
        )
    if differing := differences(footer.settings, manifest.settings):
        raise DataFileError(
            f"{path} was made with other options than its manifest says: {'; '.join(differing)}; put back the "
            "parts of one run."
        )
    return footer.entry


def read_columns(folder: AnyPath, block: int, manifest: Manifest, columns: list[str]) -> pa.Table:
    """Some columns of a part of a mask, of which every value is checked.

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
        check_columns(table, manifest.blocks[block], manifest.files)
    except DAMAGES as error:
        raise _damage(path, error) from error
    return table


def part_schema(folder: AnyPath) -> pa.Schema:
    """Columns of the parts of a mask and their types.

    Raises:
        DataFileError: If the first part is damaged.
    """
    with open_parquet(folder / part_name(0)) as parquet:
        schema = parquet.schema_arrow
    if schema.names.count("id") != 1:
        raise DataFileError(f"{folder / part_name(0)} is damaged: it has no column id; put back the parts of one run.")
    return schema


def read_parts(folder: AnyPath, manifest: Manifest, columns: list[str]) -> Iterator[pa.Table]:
    """The parts of a mask, one at a time; `id` is among the columns."""
    id_type = part_schema(folder).field("id").type
    for block in range(manifest.num_blocks):
        table = read_columns(folder, block, manifest, columns)
        if plain_type(table["id"].type) != plain_type(id_type):
            raise DataFileError(
                f"{folder / part_name(block)} has ids of type {table['id'].type} and {part_name(0)} of {id_type}; put "
                "back the parts of one run."
            )
        yield table


def _damage(path: AnyPath, error: Exception) -> DataFileError:
    reason = str(error).rstrip(".")
    return DataFileError(f"{path} is damaged ({reason}); the command that made the mask writes it again.")
