"""Texts out of parquet files, and features into them.

Shape suffixes: N texts, D features.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datamask_pl.errors import BadRowError, DataFileError, SchemaError
from datamask_pl.io.parquet import Shard, find_column, open_parquet, read_shards, read_table, with_rows
from datamask_pl.io.paths import AnyPath

ROW_GROUP_SIZE = 4096


@dataclass(frozen=True)
class Corpus:
    """The texts of some parquet files, and what else stands in their rows.

    Attributes:
        texts: N texts, in the order of the files and their rows.
        others: table of N rows with every column but the text.
        paths: the files that have rows.
        starts: for each file, the position of its first row in `texts`.
    """

    texts: list[str]
    others: pa.Table
    paths: list[str]
    starts: list[int]

    def place(self, position: int) -> str:
        """Names the file and row, from 0, of a text."""
        file = bisect_right(self.starts, position) - 1
        return f"{self.paths[file]}, row {position - self.starts[file]}"


def feature_array(features_ND: npt.NDArray[np.float32]) -> pa.ChunkedArray:
    """Returns the rows as fixed-size lists of float16, in chunks small enough for any row group.

    Example:
        >>> feature_array(np.eye(2, dtype=np.float32)).type
        FixedSizeListType(fixed_size_list<item: halffloat>[2])
    """
    num_dimensions = features_ND.shape[1]
    chunks = [
        pa.FixedSizeListArray.from_arrays(
            pa.array(features_ND[start : start + ROW_GROUP_SIZE].astype(np.float16).ravel()), num_dimensions
        )
        for start in range(0, len(features_ND), ROW_GROUP_SIZE)
    ]
    return pa.chunked_array(chunks, pa.list_(pa.float16(), num_dimensions))


def read_corpus(files: Sequence[AnyPath], *, text_column: str, feature_column: str) -> Corpus:
    """Reads the texts and the other columns of some files; checks every footer before it reads any row.

    Raises:
        SchemaError: As `embed`.
        DataFileError: If a file cannot be read, or none has a row.
        BadRowError: If a text is null.
    """
    shards = with_rows(read_shards(files), "source")
    check_schemas(shards, text_column, feature_column)
    texts: list[str] = []
    starts: list[int] = []
    others: list[pa.Table] = []
    for shard in shards:
        starts.append(len(texts))
        with open_parquet(shard.path) as parquet:
            table = read_table(parquet, shard.name)
        texts += text_list(table[text_column], path=shard.name, text_column=text_column)
        others.append(table.select([name for name in shards[0].schema.names if name != text_column]))
    # "default" evens out what is no type: nullability and metadata of the fields.
    paths = [shard.name for shard in shards]
    return Corpus(texts, pa.concat_tables(others, promote_options="default"), paths, starts)


def text_list(column: pa.ChunkedArray, *, path: str, text_column: str, first_row: int = 0) -> list[str]:
    """The texts of a column.

    Args:
        column: of any string type.
        path: file, for errors.
        text_column: its name, for errors.
        first_row: number of its first row in the file.

    Raises:
        BadRowError: If a text is null.
        DataFileError: If a text is not UTF-8.
    """
    column = column.cast(pa.large_string())
    if column.null_count:
        row = first_row + column.is_null().to_pylist().index(True)
        raise BadRowError(
            f"{path}, row {row}: {text_column} is null ({column.null_count} of {len(column)} rows are); "
            "remove those rows."
        )
    try:
        texts: list[str] = column.to_pylist()
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path}: {text_column} is not UTF-8 ({error.reason}); write it again.") from error
    return texts


def check_schemas(shards: Sequence[Shard], text_column: str, feature_column: str) -> None:
    """Checks the columns of files that have rows. In a file without rows columns do not matter.

    Raises:
        SchemaError: If the text column is missing or holds no strings, the feature column is there already, or two
            files disagree.
    """
    for shard in shards:
        _check_schema(shard.name, shard.schema, text_column, feature_column)
        _check_same(shard.name, shard.schema, shards[0].name, shards[0].schema)


def _check_schema(path: str, schema: pa.Schema, text_column: str, feature_column: str) -> None:
    """Checks that a file has texts, and no column of the name of the features.

    Raises:
        SchemaError: If it is not so.
    """
    kind = find_column(schema, path, text_column, "text_column")
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise SchemaError(f"{path}: text_column {text_column!r} must hold strings, not {kind}; name another column.")
    if feature_column in schema.names:
        raise SchemaError(f"{path} has a column {feature_column!r} already; give feature_column another name.")


def _check_same(path: str, schema: pa.Schema, first_path: str, first_schema: pa.Schema) -> None:
    """Compares names and types of two files' columns, in any order; nullability and metadata may differ.

    Raises:
        SchemaError: If they differ.
    """
    if set(schema.names) != set(first_schema.names):
        differing = sorted(set(schema.names) ^ set(first_schema.names))
        raise SchemaError(f"Columns {differing} are not in both {first_path} and {path}; make the files alike.")
    for name in first_schema.names:
        expected, seen = first_schema.field(name).type, schema.field(name).type
        if expected != seen:
            raise SchemaError(
                f"Column {name!r} is {expected} in {first_path} and {seen} in {path}; write both with one type."
            )
