"""Parquet files: what their footers say, and how one of them is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.errors import DataFileError, SchemaError
from datamask_pl.io.paths import (
    AnyPath,
    RemotePath,
    faults,
    file_size,
    read_footer,
    readable,
)

MAGIC = b"PAR1"
# Without a buffer pyarrow holds the whole column chunk of a row group: 3 GB for 1 M rows of 768 float32.
_BUFFER_BYTES = 4 << 20
_TABLE_ROWS = 1 << 16
_NUM_FOOTER_THREADS = 16

AnyShard = TypeVar("AnyShard", bound="Shard")


@dataclass(frozen=True)
class Shard:
    """A parquet file and what its footer says.

    Attributes:
        path: where it is.
        num_bytes: its size.
        row_group_rows: rows of each of its row groups.
        schema: names and types of its columns, without metadata. They do not matter in a file without rows: what
            writers call the type of nothing is null.
    """

    path: AnyPath
    num_bytes: int
    row_group_rows: tuple[int, ...]
    schema: pa.Schema

    @property
    def name(self) -> str:
        """The path or URL as it is recorded and shown."""
        return str(self.path)

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_group_rows)


def read_shards(paths: Sequence[AnyPath]) -> list[Shard]:
    """Reads the footers of files, in their order.

    Raises:
        DataFileError: As `open_parquet`.
    """
    with ThreadPoolExecutor(_NUM_FOOTER_THREADS) as pool:
        return list(pool.map(_read_shard, paths))


def _read_shard(path: AnyPath) -> Shard:
    with open_parquet(path) as parquet:
        rows, schema = row_group_rows(parquet.metadata), parquet.schema_arrow.remove_metadata()
        return Shard(path, file_size(path, is_fresh=False), rows, schema)


def with_rows(shards: Sequence[AnyShard], option: str) -> list[AnyShard]:
    """The files that have rows.

    Args:
        shards: at least one.
        option: what the user calls them, for errors.

    Raises:
        DataFileError: If none has any.
    """
    found = [shard for shard in shards if shard.num_rows]
    if not found:
        raise DataFileError(
            f"{option} matches {len(shards)} files without a single row, the first is {shards[0].name}."
        )
    return found


def find_column(schema: pa.Schema, name: str, column: str, option: str) -> pa.DataType:
    """The type of a column that has to be in a file once.

    Args:
        schema: of the file.
        name: of the file, for errors.
        column: which.
        option: what the user calls it, for errors.

    Raises:
        SchemaError: If it is missing, or there are several.
    """
    if column not in schema.names:
        raise SchemaError(
            f"{name} has no column {column!r}; its columns are: {', '.join(schema.names)}. {option} names it."
        )
    if schema.names.count(column) > 1:
        raise SchemaError(f"{name} has {schema.names.count(column)} columns named {column!r}; rename all but one.")
    return schema.field(column).type


@contextmanager
def open_bytes(path: AnyPath) -> Iterator[Any]:
    """Opens a file of any kind for reading; what goes wrong is raised as DataFileError.

    Raises:
        DataFileError: If the file is missing, or a part of it cannot be read.
    """
    with faults(str(path), "read", is_remote=isinstance(path, RemotePath)), readable(path) as source:
        yield source


@contextmanager
def open_parquet(path: AnyPath) -> Iterator[pq.ParquetFile]:
    """Opens a file for streaming; pyarrow's and the file system's faults are raised as DataFileError.

    Raises:
        DataFileError: If the file is missing, empty, cut off or no parquet file, or a part of it cannot be read.
    """
    with open_bytes(path) as source:
        try:
            parquet = pq.ParquetFile(
                source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
            )
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataFileError(_diagnose(path, str(error))) from error
        with parquet:
            _check_footer(parquet.metadata, str(path))
            yield parquet


def is_marked(path: AnyPath, mark: Mapping[bytes, bytes]) -> bool:
    """Whether the footer of a parquet file has an entry. Raises as `read_footer`."""
    return mark.items() <= (read_footer(path).metadata or {}).items()


def row_group_rows(footer: pq.FileMetaData) -> tuple[int, ...]:
    """Rows of each row group of a file."""
    return tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))


def iterate_batches(
    parquet: pq.ParquetFile,
    name: str,
    *,
    batch_rows: int,
    columns: list[str] | None = None,
    row_group: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some at a time. A damaged page header makes pyarrow skip a page silently.

    Args:
        parquet: from `open_parquet`.
        name: of the file, for errors.
        batch_rows: rows of a batch, at most.
        columns: which; all by default.
        row_group: the rows of one; of all by default.

    Raises:
        DataFileError: If there are more or fewer rows than the footer says.
    """
    groups = range(parquet.metadata.num_row_groups) if row_group is None else [row_group]
    expected, seen = sum(parquet.metadata.row_group(group).num_rows for group in groups), 0
    for batch in parquet.iter_batches(batch_rows, row_groups=list(groups), columns=columns, use_threads=False):
        seen += len(batch)
        if seen > expected:
            break
        if len(batch):  # a file without rows may lack the columns
            yield batch
    if seen != expected:
        raise DataFileError(
            f"{name} is damaged: its footer says that there are {expected} rows, and {seen} were read; write or copy "
            "it again."
        )


def read_table(parquet: pq.ParquetFile, name: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a file. Arguments and errors as `iterate_batches`."""
    batches = list(iterate_batches(parquet, name, batch_rows=_TABLE_ROWS, columns=columns))
    if batches:
        return pa.Table.from_batches(batches)
    empty = parquet.schema_arrow.empty_table()
    return empty if columns is None else empty.select(columns)


def _check_footer(footer: pq.FileMetaData, name: str) -> None:
    """Raises a DataFileError if a footer contradicts itself; it has no checksum."""
    in_groups = row_group_rows(footer)
    if sum(in_groups) != footer.num_rows or any(num_rows < 0 for num_rows in in_groups):
        raise DataFileError(
            f"{name} is damaged: its footer says that there are {footer.num_rows} rows, and {sum(in_groups)} in its "
            "row groups; write or copy it again."
        )


def _diagnose(path: AnyPath, cause: str) -> str:
    """Says why a file has no footer that could be read."""
    size = file_size(path)
    if size == 0:
        return f"{path} is empty (0 bytes); write it again or remove it."
    with readable(path) as source:
        head = source.read(len(MAGIC))
        if head != MAGIC:
            return f"{path} is not a parquet file: it starts with {head!r} instead of {MAGIC!r}."
        source.seek(max(0, size - len(MAGIC)))
        if source.read() != MAGIC or size < 3 * len(MAGIC):
            return f"{path} is cut off: its footer is missing; write or copy it again."
    return f"{path} is damaged, its footer cannot be read ({cause.rstrip('.')}); write or copy it again."
