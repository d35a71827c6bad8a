"""The files that a mask is applied to, and the ids in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from datamask_pl.data.plan import common_folder
from datamask_pl.errors import ConfigError, SchemaError
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import Shard, find_column, iterate_batches, open_parquet, read_shards
from datamask_pl.io.paths import AnyPath, any_path, full_name, is_below

_ID_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class SourceFile(Shard):
    """A file that a mask is applied to.

    Attributes:
        relative_name: its name below the folder that all files share.
        id_type: type of its id column; None if it has none. Of a file without rows, the type in those that have rows.
    """

    relative_name: str
    id_type: pa.DataType | None


def read_sources(path: str | list[str], id_column: str) -> list[SourceFile]:
    """Finds the source files and reads their footers.

    Raises:
        ConfigError: If two of them would get the same name below the output, or one a name outside of it.
        DataFileError: If nothing matches, or a file cannot be read.
        SchemaError: If a file has several columns with the name of the id column, or the ids are nested.
    """
    paths = expand(path, option="source")
    names = relative_names(paths)
    shards = read_shards(paths)
    id_types = {shard.name: _find_id_type(shard, id_column) for shard in shards if shard.num_rows}
    shared = next(iter(id_types.values()), None)
    return [
        SourceFile(**vars(shard), relative_name=name, id_type=id_types.get(shard.name, shared))
        for shard, name in zip(shards, names, strict=True)
    ]


def _find_id_type(shard: Shard, id_column: str) -> pa.DataType | None:
    if id_column not in shard.schema.names:
        return None
    id_type = find_column(shard.schema, shard.name, id_column, "id_column")
    if pa.types.is_nested(id_type):
        raise SchemaError(f"{shard.name}: id column {id_column!r} must hold one plain value per row, it is {id_type}.")
    return id_type


def relative_names(paths: Sequence[AnyPath]) -> list[str]:
    """Names of files below the folder that all of them share.

    Raises:
        ConfigError: If two are the same.
    """
    names = [os.path.abspath(path) if isinstance(path, Path) else str(path) for path in paths]
    shared = common_folder(names)
    relative = [name[len(shared) :].replace("://", "/").lstrip("/") for name in names]
    for name in relative:
        # of a remote listing any name may come back, and it becomes a path below the output
        if ".." in name.split("/"):
            raise ConfigError(f"source: {name} leads out of the folder of its files; leave it out or rename it.")
    if len(set(relative)) < len(relative):
        name = next(name for name in relative if relative.count(name) > 1)
        raise ConfigError(f"source: two files would both be written to {name}; take each by itself.")
    return relative


def check_outside(folders: Mapping[str, AnyPath], source: str | list[str], paths: Sequence[AnyPath]) -> None:
    """Refuses a folder that the source's files are in, or that a later look for the source would find.

    Args:
        folders: what is to be written to, by the name of the option.
        source: what the user gave.
        paths: the files that it stands for.

    Raises:
        ConfigError: If a folder is the source's, or in it.
    """
    parents = {full_name(path).rpartition("/")[0] for path in paths}
    # A pattern with ** spans all folders below the part before it.
    patterns = [source] if isinstance(source, str) else source
    roots = [item.partition("**")[0].rpartition("/")[0] or "." if "**" in item else item for item in patterns]
    whole = [full_name(any_path("source", os.path.expanduser(root), is_read=True)) for root in roots]
    for option, folder in folders.items():
        name = full_name(folder)
        if name in parents or any(is_below(name, root) for root in whole):
            raise ConfigError(f"{option} {folder} is the source's folder, or in it; give one outside of it.")


def iterate_ids(source: Shard, id_column: str) -> Iterator[pa.Array]:
    """The ids of a file as `plain`, some thousands at a time."""
    with open_parquet(source.path) as parquet:
        for batch in iterate_batches(parquet, source.name, batch_rows=_ID_BATCH_ROWS, columns=[id_column]):
            yield plain(batch.column(0))


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type that ids are compared in: how a writer stores them does not matter, what they are does.

    Example:
        >>> plain_type(pa.dictionary(pa.int32(), pa.string()))
        DataType(large_string)
        >>> plain_type(pa.int32())
        DataType(int32)
    """
    if isinstance(data_type, pa.BaseExtensionType):
        return plain_type(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return plain_type(data_type.value_type)
    if pa.types.is_string(data_type) or pa.types.is_string_view(data_type):
        return pa.large_string()
    if pa.types.is_binary(data_type) or pa.types.is_binary_view(data_type):
        return pa.large_binary()
    if pa.types.is_float16(data_type):
        return pa.float32()
    if pa.types.is_decimal(data_type) and data_type.bit_width < 128:
        return pa.decimal128(data_type.precision, data_type.scale)
    return data_type


def plain(array: pa.Array) -> pa.Array:
    """Ids in their plain type. No value changes: every conversion is exact."""
    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    if pa.types.is_dictionary(array.type):
        return plain(array.dictionary_decode())
    return array.cast(plain_type(array.type))
