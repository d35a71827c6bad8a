"""Writes some rows of a parquet file to another that is like it in all else.

Shape suffixes: N rows of the file, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.parquet import Shard, iterate_batches, open_parquet
from datamask_pl.io.paths import AnyPath

_BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 1 << 16
_CODECS = {"SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4"}
_ENCODINGS = {"BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}


def write_kept(
    source: Shard, keep_N: NDArray[np.bool_], target: AnyPath, advance: Callable[[int], None]
) -> dict[str, int]:
    """Writes the rows of one file that are kept.

    Args:
        source: the file.
        keep_N: bool (N,), one a row.
        target: file to write.
        advance: called with the number of rows that have been dealt with.

    Returns:
        Its rows and bytes.
    """
    with open_parquet(source.path) as parquet:
        schema, options = parquet.schema_arrow, _writer_options(parquet.metadata)
        footer = _other_metadata(parquet)
    num_rows = int(keep_N.sum())
    with atomic_path(target) as temporary:
        with pq.ParquetWriter(temporary, schema, **options) as writer:
            for batches in _kept_batches(source, keep_N, advance):
                table = pa.Table.from_batches(batches, schema)
                writer.write_table(table, row_group_size=table.num_rows)
            if footer:
                writer.add_key_value_metadata(footer)
        num_bytes = temporary.stat().st_size
    return {"num_rows": num_rows, "num_bytes": num_bytes}


def _other_metadata(parquet: pq.ParquetFile) -> dict[bytes, bytes]:
    """Keys of the footer that the writer does not write with the schema, such as those of polars."""
    written = {b"ARROW:schema", *(parquet.schema_arrow.metadata or {})}
    return {key: value for key, value in (parquet.metadata.metadata or {}).items() if key not in written}


def _kept_batches(
    source: Shard, keep_N: NDArray[np.bool_], advance: Callable[[int], None]
) -> Iterator[list[pa.RecordBatch]]:
    """What is kept of each row group of which anything is."""
    with open_parquet(source.path) as parquet:
        start = 0
        for group, num_rows in enumerate(source.row_group_rows):
            stop = start + num_rows
            if not keep_N[start:stop].any():
                advance(num_rows)
                start = stop
                continue
            num_bytes = parquet.metadata.row_group(group).total_byte_size
            batch_rows = max(1, min(_MAX_BATCH_ROWS, num_rows * _BATCH_BYTES // max(1, num_bytes)))
            batches = []
            for batch in iterate_batches(parquet, source.name, batch_rows=batch_rows, row_group=group):
                batches += _keep_rows(batch, keep_N[start : start + len(batch)])
                start += len(batch)
                advance(len(batch))
            assert start == stop
            yield batches


def _keep_rows(batch: pa.RecordBatch, keep_B: NDArray[np.bool_]) -> list[pa.RecordBatch]:
    if not keep_B.any():
        return []
    try:
        return [batch.filter(pa.array(keep_B))]
    except pa.ArrowNotImplementedError:
        # Types that pyarrow cannot filter, such as string_view, it can still slice.
        edges = np.flatnonzero(np.diff(keep_B, prepend=False, append=False)).reshape(-1, 2)
        return [batch.slice(first, last - first) for first, last in edges.tolist()]


def _writer_options(metadata: pq.FileMetaData) -> dict[str, Any]:
    """How a file's columns are compressed and encoded, as far as pyarrow can write it."""
    if metadata.num_row_groups == 0:
        return {"write_page_checksum": True}
    group = metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    has_dictionary = [column.path_in_schema for column in columns if column.has_dictionary_page]
    encodings = {
        column.path_in_schema: next(iter(named))
        for column in columns
        if not column.has_dictionary_page and (named := _ENCODINGS.intersection(column.encodings))
    }
    return {
        "compression": {column.path_in_schema: _codec(column.compression) for column in columns},
        "use_dictionary": has_dictionary,
        "column_encoding": encodings or None,
        "write_page_checksum": True,
        "write_page_index": any(column.has_offset_index for column in columns),
        "use_compliant_nested_type": not any(".list.item" in column.path_in_schema for column in columns),
    }


def _codec(name: str) -> str:
    """A codec as pyarrow's writer calls it; zstd for one that it cannot write."""
    known = {"UNCOMPRESSED": "none", "LZ4_RAW": "lz4"}
    return known.get(name, name.lower() if name in _CODECS else "zstd")
