"""The files that a mask is applied to, and the ids in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from datamask_pl.data.plan import common_folder
from datamask_pl.errors import ConfigError, SchemaError
from datamask_pl.io.parquet import Location, expand, iterate_batches, open_parquet, row_group_rows
from datamask_pl.io.paths import AnyPath, any_path, full_name, is_below

_NUM_FOOTER_THREADS = 16
_ID_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class SourceFile:
    """A file that a mask is applied to.

    Attributes:
        location: where it is.
        relative_name: its name below the folder that all files share.
        num_bytes: its size.
        row_group_rows: rows of each of its row groups.
        id_type: type of its id column, None if it has none.
    """

    location: Location
    relative_name: str
    num_bytes: int
    row_group_rows: tuple[int, ...]
    id_type: pa.DataType | None

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_group_rows)


def read_sources(path: str | list[str], id_column: str) -> list[SourceFile]:
    """Finds the source files and reads their footers.

    Raises:
        ConfigError: If two of them would get the same name below the output, or one a name outside of it.
        DataFileError: If nothing matches, or a file cannot be read.
        SchemaError: If a file has several columns with the name of the id column, or the ids are nested.
    """
    locations = expand(path, option="source")
    with ThreadPoolExecutor(_NUM_FOOTER_THREADS) as pool:
        return list(pool.map(partial(_read_footer, id_column=id_column), locations, relative_names(locations)))


def relative_names(locations: Sequence[Location]) -> list[str]:
    """Names of files below the folder that all of them share.

    Raises:
        ConfigError: If two are the same.
    """
    names = [os.path.abspath(item.path) if item.filesystem is None else item.name for item in locations]
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


def check_outside(folders: Mapping[str, AnyPath], source: str | list[str], locations: Sequence[Location]) -> None:
    """Refuses a folder that the source's files are in, or that a later look for the source would find.

    Args:
        folders: what is to be written to, by the name of the option.
        source: what the user gave.
        locations: the files that it stands for.

    Raises:
        ConfigError: If a folder is the source's, or in it.
    """
    parents = {full_name(location.as_path).rpartition("/")[0] for location in locations}
    # A pattern with ** spans all folders below the part before it.
    patterns = [source] if isinstance(source, str) else source
    roots = [item.partition("**")[0].rpartition("/")[0] or "." if "**" in item else item for item in patterns]
    whole = [full_name(any_path("source", os.path.expanduser(root), is_read=True)) for root in roots]
    for option, folder in folders.items():
        name = full_name(folder)
        if name in parents or any(is_below(name, root) for root in whole):
            raise ConfigError(f"{option} {folder} is the source's folder, or in it; give one outside of it.")


def _read_footer(location: Location, relative_name: str, id_column: str) -> SourceFile:
    with open_parquet(location) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = row_group_rows(metadata)
    if schema.names.count(id_column) > 1:
        raise SchemaError(f"{location.name} has several columns named {id_column!r}; rename all but one.")
    id_type = schema.field(id_column).type if id_column in schema.names else None
    if id_type is not None and pa.types.is_nested(id_type):
        raise SchemaError(f"{location.name}: id column {id_column!r} must hold one plain value a row, it is {id_type}.")
    return SourceFile(location, relative_name, location.size(), rows, id_type)


def iterate_ids(source: SourceFile, id_column: str) -> Iterator[pa.Array]:
    """The ids of a file as `plain`, some thousands at a time; of one without rows, whatever its columns are, none."""
    if not source.num_rows:
        return
    with open_parquet(source.location) as parquet:
        name = source.location.name
        for batch in iterate_batches(parquet, name, batch_rows=_ID_BATCH_ROWS, columns=[id_column]):
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
