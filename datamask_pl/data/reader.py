"""Reads one block of rows into memory, a few thousand at a time.

Shape suffixes: N samples of a block, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from datamask_pl.data.forced_ids import ForcedIds
from datamask_pl.data.limits import LimitsBuilder, Survey
from datamask_pl.data.plan import BlockPlan, Segment
from datamask_pl.data.rows import BadRows, Chunk, check_rows, list_lengths
from datamask_pl.data.scaling import QualityScaling, scale_quality
from datamask_pl.data.schema import Dataset
from datamask_pl.data.shards import plain
from datamask_pl.data.types import Block
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, SchemaError
from datamask_pl.functional.threads import give_back_memory
from datamask_pl.io.parquet import Shard, iterate_batches, open_parquet, row_group_rows

OnBadRow = Literal["error", "drop"]

_CHUNK_BYTES = 4 << 20
_MAX_CHUNK_ROWS = 16_384


class BlockReader:
    """Reads the blocks of a data set; any number of blocks, one at a time.

    Memory is the block, plus a few chunks of 4 MiB, whatever the size of files and row groups.

    Args:
        dataset: files and columns.
        quality_scaling: how quality is scaled within a block.
        on_bad_row: `error` raises at the first bad row, `drop` drops bad rows.
        forced: ids to always keep or drop, if any.

    Raises:
        SchemaError: If the feature column has no row from which the number of features could be learned.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        quality_scaling: QualityScaling,
        on_bad_row: OnBadRow,
        forced: ForcedIds | None = None,
    ) -> None:
        self.dataset = dataset
        self.forced = forced
        self.quality_scaling: QualityScaling = quality_scaling
        self.on_bad_row = on_bad_row
        self.num_features = dataset.feature_type.list_size or _find_num_features(dataset)
        is_half = pa.types.is_float16(dataset.feature_type.value_type)
        self._dtype = torch.float16 if is_half else torch.float32
        # row groups, by file, that this process has read to their end
        self._whole: set[tuple[int, int]] = set()

    def read(self, plan: BlockPlan, index: int) -> tuple[Block, BadRows]:
        """Reads a block.

        Args:
            plan: its rows.
            index: its position in the plan.

        Returns:
            The block, in host memory, and the rows that were dropped.

        Raises:
            BadRowError: If a row is bad and on_bad_row is `error`, an id is null, or no row of the block is left.
            DataFileError: If a file cannot be read, or is no longer what its footer said.
            ConfigError: If the block does not fit into memory, or its ids not into one array of arrow.
        """
        num_rows = plan.num_rows
        features_ND = self._make_room(num_rows)
        inv_norm_N, quality_N = np.empty((2, num_rows), dtype=np.float32)
        source_file_N = np.empty(num_rows, dtype=np.int32)
        source_row_N = np.empty(num_rows, dtype=np.int64)
        features_numpy_ND = features_ND.numpy()
        id_chunks: list[pa.Array] = []
        limits = LimitsBuilder(self.forced)
        bad_rows = BadRows()
        stop = 0
        for file_index, chunk, bad in self._stream(plan):
            start, stop = stop, stop + len(chunk.ids)
            features_numpy_ND[start:stop] = chunk.features_KD
            inv_norm_N[start:stop] = chunk.inv_norm_K
            quality_N[start:stop] = chunk.quality_K
            source_file_N[start:stop] = file_index
            source_row_N[start:stop] = chunk.source_row_K
            id_chunks.append(chunk.ids)
            limits.add(chunk.cost_K, chunk.group_K)
            bad_rows.add(bad)
        self._check_any_left(stop, bad_rows, index)
        block = Block(
            index=index,
            features_ND=features_ND[:stop],
            inv_norm_N=torch.from_numpy(inv_norm_N[:stop]),
            quality_N=torch.from_numpy(quality_N[:stop]),
            scaled_quality_N=torch.from_numpy(scale_quality(quality_N[:stop], self.quality_scaling)),
            ids=_concat_ids(id_chunks),
            source_file_N=torch.from_numpy(source_file_N[:stop]),
            source_row_N=torch.from_numpy(source_row_N[:stop]),
            num_dropped=bad_rows.num_rows,
            limits=limits.build(id_chunks),
        )
        pa.default_memory_pool().release_unused()
        give_back_memory()
        return block, bad_rows

    def check(self, plan: BlockPlan, index: int) -> tuple[BadRows, Survey]:
        """Reads a block without keeping it, and raises what `read` would.

        Returns:
            The rows that `read` would drop, and totals of the others.
        """
        num_kept = 0
        bad_rows = BadRows()
        limits = LimitsBuilder(self.forced)
        id_chunks: list[pa.Array] = []
        for _, chunk, bad in self._stream(plan):
            num_kept += len(chunk.ids)
            bad_rows.add(bad)
            limits.add(chunk.cost_K, chunk.group_K)
            if self.forced is not None or chunk.cost_K is not None or chunk.group_K is not None:
                id_chunks.append(chunk.ids)
        self._check_any_left(num_kept, bad_rows, index)
        return bad_rows, Survey.of(limits.build(id_chunks))

    def _stream(self, plan: BlockPlan) -> Iterator[tuple[int, Chunk, BadRows]]:
        """Yields file index, rows and dropped rows, chunk by chunk in the order of the plan."""
        segments = list(plan.segments)
        while segments:
            file_index = segments[0].file_index
            num_segments = next((i for i, s in enumerate(segments) if s.file_index != file_index), len(segments))
            for first_row, batch in self._stream_file(file_index, segments[:num_segments]):
                chunk, bad = check_rows(
                    batch,
                    self.dataset.columns,
                    num_features=self.num_features,
                    file_name=self.dataset.files[file_index].name,
                    first_row=first_row,
                    drops=self.on_bad_row == "drop",
                )
                if self.dataset.has_mixed_ids:
                    chunk = replace(chunk, ids=plain(chunk.ids))
                yield file_index, chunk, bad
            del segments[:num_segments]

    def _stream_file(self, file_index: int, segments: list[Segment]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields the rows of segments of one file, each batch with the number of its first row in the file."""
        file = self.dataset.files[file_index]
        bytes_per_row = self.num_features * self.dataset.feature_type.value_type.bit_width // 8
        chunk_rows = min(_MAX_CHUNK_ROWS, max(1, _CHUNK_BYTES // bytes_per_row))
        first_rows = np.cumsum([0, *file.row_group_rows])
        with open_parquet(file.path) as parquet:
            _check_unchanged(file, parquet.metadata)  # the plan is made of the footers as they were at the start
            for segment in segments:
                row = 0  # of the row group, at which the next batch begins
                batches = iterate_batches(
                    parquet,
                    file.name,
                    batch_rows=chunk_rows,
                    columns=self.dataset.columns.names,
                    row_group=segment.row_group,
                )
                for batch in batches:
                    # the part of the batch that belongs to the segment; none before its start
                    start, stop = max(segment.start - row, 0), min(segment.stop - row, len(batch))
                    if start < stop:
                        first_row = int(first_rows[segment.row_group]) + row + start
                        yield first_row, batch.slice(start, stop - start)
                    row += len(batch)
                    # If pyarrow skips a damaged page, later rows get other rows' values, and only the row group's end
                    # shows it. So a block is not done at its own last row, unless this process has seen that end.
                    is_known = (file_index, segment.row_group) in self._whole
                    if is_known and segment.stop <= row < file.row_group_rows[segment.row_group]:
                        break
                self._whole.add((file_index, segment.row_group))

    def _make_room(self, num_rows: int) -> torch.Tensor:
        """Memory for the features of a block."""
        try:
            return torch.empty((num_rows, self.num_features), dtype=self._dtype)
        except (RuntimeError, MemoryError) as error:
            num_bytes = num_rows * self.num_features * self._dtype.itemsize
            raise ConfigError(
                f"a block of {num_rows} rows of {self.num_features} features takes {num_bytes / 1e9:.3g} GB, which is "
                "more than there is; lower data.block_size."
            ) from error

    def _check_any_left(self, num_kept: int, bad_rows: BadRows, index: int) -> None:
        if num_kept == 0:
            first = bad_rows.listed[0]
            raise BadRowError(
                f"all {bad_rows.num_rows} rows of block {index} are bad, the first is row {first.row} of {first.file}: "
                f"{first.reason}; repair the files, or set larger blocks (data.block_size)."
            )


def _check_unchanged(file: Shard, footer: pq.FileMetaData) -> None:
    if row_group_rows(footer) != file.row_group_rows:
        raise DataFileError(
            f"{file.name} has changed since its footer was read at the start: it had {file.num_rows} rows in "
            f"{len(file.row_group_rows)} row groups and has {footer.num_rows} in {footer.num_row_groups}, or groups of "
            "other sizes; start again."
        )


def _concat_ids(chunks: list[pa.Array]) -> pa.Array:
    """One array in the exact type of the column; plain where the indices of a dictionary are too small for it."""
    if pa.types.is_dictionary(chunks[0].type):
        with suppress(pa.ArrowInvalid):
            return pa.concat_arrays(chunks)
        chunks = [plain(chunk) for chunk in chunks]
    try:
        return pa.concat_arrays(chunks)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"the ids of a block of {sum(map(len, chunks))} rows do not fit into one {chunks[0].type} array "
            f"({str(error).rstrip('.')}); lower data.block_size."
        ) from error


def _find_num_features(dataset: Dataset) -> int:
    """The most frequent length of the first chunk of vectors in which one is not null."""
    column = dataset.columns.feature_column
    for file in dataset.files:
        with open_parquet(file.path) as parquet:
            for batch in parquet.iter_batches(256, columns=[column], use_threads=False):
                lengths_N = list_lengths(batch.column(column))
                if (lengths_N > 0).any():
                    return int(np.bincount(lengths_N[lengths_N > 0]).argmax())
    raise SchemaError(f"feature column {column!r} has no row with a vector in it, in any of the files.")
