"""Embeds text files one by one into files of the same names: any number of processes, finished files are kept.

Shape suffixes: N rows of a chunk, D features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.embedding.texts import ROW_GROUP_SIZE, check_schemas, feature_array, text_list
from datamask_pl.errors import BadRowError, ConfigError, DataFileError
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.parquet import Shard, iterate_batches, open_parquet, read_shards
from datamask_pl.io.paths import AnyPath, read_footer
from datamask_pl.io.records import DAMAGES, decode, differences, encode

METADATA_KEY = b"datamask_pl_embed"
FORMAT = 1
_MAX_FLOAT16 = 65504.0


class Encoder(Protocol):
    """What turns texts into vectors.

    Attributes:
        num_dimensions: D.
    """

    num_dimensions: int

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The vectors (N, D) of N texts, in their order."""


@dataclass(frozen=True)
class TextFile:
    """A file to embed.

    Attributes:
        shard: where its texts are.
        target: file to write.
    """

    shard: Shard
    target: AnyPath

    def source(self) -> dict[str, Any]:
        """What the output records of its source; where it lies does not matter."""
        return {"source": self.target.name, "num_rows": self.shard.num_rows, "num_bytes": self.shard.num_bytes}


def plan_files(
    paths: Sequence[AnyPath], targets: Sequence[AnyPath], *, text_column: str, feature_column: str
) -> list[TextFile]:
    """Reads all footers and checks the columns, before any row is read.

    Raises:
        SchemaError: If the text column is missing or holds no strings, the feature column is there already, or two
            files disagree.
        DataFileError: If a file cannot be read.
    """
    shards = read_shards(paths)
    check_schemas([shard for shard in shards if shard.num_rows], text_column, feature_column)
    return [TextFile(shard, target) for shard, target in zip(shards, targets, strict=True)]


def is_finished(file: TextFile, settings: Mapping[str, Any]) -> bool:
    """Whether the output of a file is there already, made from this source with these settings.

    Raises:
        ConfigError: If it is there, and was made from another source or with other settings, or is none of ours.
        DataFileError: If it is there and cannot be read.
    """
    if not file.target.exists():
        return False
    try:
        footer = read_footer(file.target)
        record = decode((footer.metadata or {})[METADATA_KEY], {"settings": dict, "source": dict}, version=FORMAT)
        found = {**record["settings"], **record["source"]}
    except DAMAGES as error:
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
            raise DataFileError(f"{file.target} is there and cannot be read: {reason}; pass another output.") from error
        raise ConfigError(f"{file.target} is there and was not made by embed; pass another output.") from None
    if differing := differences(found, {**settings, **file.source()}):
        raise ConfigError(
            f"{file.target} is there and was made from other texts or with other options: {'; '.join(differing)}. "
            "Pass another output."
        )
    return bool(footer.num_rows == file.shard.num_rows)


def embed_file(
    file: TextFile,
    encoder: Encoder,
    *,
    text_column: str,
    feature_column: str,
    settings: Mapping[str, Any],
    advance: Callable[[int], None],
) -> None:
    """Embeds one file, some thousand rows at a time.

    Args:
        file: what to embed.
        encoder: with what.
        text_column: column that holds the text.
        feature_column: column to write.
        settings: what decides the vectors; recorded in the footer.
        advance: called with the number of rows that have been dealt with.

    Raises:
        BadRowError: If a text is null or empty, or its vector zero or not finite.
        DataFileError: If a file cannot be read or written.
    """
    with open_parquet(file.shard.path) as parquet:
        schema = parquet.schema_arrow
    # a file without rows may have any columns
    schema = pa.schema([field for field in schema if field.name not in (text_column, feature_column)], schema.metadata)
    others = schema.names
    schema = schema.append(pa.field(feature_column, pa.list_(pa.float16(), encoder.num_dimensions)))
    record = encode({"settings": dict(settings), "source": file.source()}, version=FORMAT).encode()
    schema = schema.with_metadata({**(schema.metadata or {}), METADATA_KEY: record})
    # Half floats gain nothing from a dictionary and are slower to read through one.
    options = {"use_dictionary": others, "write_page_checksum": True}
    with atomic_path(file.target) as temporary, pq.ParquetWriter(temporary, schema, **options) as writer:
        first_row = 0
        for table in _chunks(file.shard):
            texts = text_list(table[text_column], path=file.shard.name, text_column=text_column, first_row=first_row)
            _check_texts(texts, file.shard.name, text_column, first_row)
            vectors_ND = encoder.encode(texts)
            _check_vectors(vectors_ND, file.shard.name, first_row)
            columns = [*table.select(others).columns, feature_array(vectors_ND)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            first_row += len(texts)
            advance(len(texts))


def _chunks(shard: Shard) -> Iterator[pa.Table]:
    """The rows of a file. A generator, so that an error of the writer is not taken for one of the reader."""
    with open_parquet(shard.path) as parquet:
        for batch in iterate_batches(parquet, shard.name, batch_rows=ROW_GROUP_SIZE):
            yield pa.Table.from_batches([batch])


def _check_texts(texts: Sequence[str], path: str, text_column: str, first_row: int) -> None:
    empty = [row for row, text in enumerate(texts) if not text.strip()]
    if empty:
        raise BadRowError(
            f"{path}, row {first_row + empty[0]}: {text_column} is empty, and so are {len(empty) - 1} more of the next "
            f"{len(texts) - empty[0] - 1} texts; its vector would say nothing; remove those rows."
        )


def _check_vectors(vectors_ND: npt.NDArray[np.float32], path: str, first_row: int) -> None:
    size_N = np.abs(vectors_ND).max(axis=1)  # NaN where any element is
    is_bad_N = ~((size_N > 0) & (size_N <= _MAX_FLOAT16))
    if is_bad_N.any():
        row = int(np.flatnonzero(is_bad_N)[0])
        raise BadRowError(
            f"{path}, row {first_row + row}: the model's vector cannot be kept in float16, its largest element is "
            f"{size_N[row]:g}; set precision: float32 (half precision overflows with some models), or remove the row."
        )
