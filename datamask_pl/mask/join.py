"""Joins a mask with files: which of their rows it keeps, or some of their columns for its samples.

Shape suffixes: N rows of all files, M samples of the mask, K of them that it selects, U distinct ids, B rows of a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from datamask_pl.data.plan import common_folder
from datamask_pl.data.shards import SourceFile, iterate_ids, plain, plain_type
from datamask_pl.errors import BadRowError, ConfigError, SchemaError
from datamask_pl.io.paths import AnyPath
from datamask_pl.mask.manifest import Manifest, part_schema, read_parts

Join = Literal["auto", "row", "id"]
OnMissing = Literal["error", "drop"]
OnDuplicate = Literal["error", "keep"]


@dataclass(frozen=True)
class Selection:
    """Which rows are kept.

    Attributes:
        keep: for each file, bool, one a row.
        joined_by: how they were found.
        num_absent: samples that the mask selects and that are not in the files.
    """

    keep: list[NDArray[np.bool_]]
    joined_by: Literal["row", "id"]
    num_absent: int = 0


@dataclass(frozen=True)
class _SelectedRows:
    """The samples that a mask selects, sorted by file and row.

    Attributes:
        num_samples: of each source file of the mask, selected or not.
        last_row: of each source file, -1 if it has no sample.
        file_K: int64 (K,), index of the source file.
        row_K: int64 (K,), row in it.
        id_K: their ids, as `plain`.
    """

    num_samples: NDArray[np.int64]
    last_row: NDArray[np.int64]
    file_K: NDArray[np.int64]
    row_K: NDArray[np.int64]
    id_K: pa.Array


def find_selection(
    folder: AnyPath,
    manifest: Manifest,
    sources: Sequence[SourceFile],
    *,
    id_column: str,
    join: Join,
    on_missing: OnMissing,
    on_duplicate: OnDuplicate,
    num_workers: int,
) -> Selection:
    """Finds the rows that a mask keeps. Reads the mask and the files' id column, nothing else.

    Args:
        folder: of the mask.
        manifest: of the mask, which is complete.
        sources: the files.
        id_column: their column that holds the mask's ids.
        join: see `apply`.
        on_missing: see `apply`.
        on_duplicate: see `apply`.
        num_workers: threads.

    Raises:
        ConfigError: If `join` is `row` and the files are not those that the mask was learned from.
        SchemaError: If the id column is missing or of another type than the mask's ids.
        BadRowError: If ids are missing from the mask, or are not unique, and that is not allowed.
    """
    for source in sources:
        if source.num_rows and source.id_type is None:
            check_id_type(source, id_column, pa.null(), None)
    reason = None
    if join != "id":
        try:
            return _join_by_row(folder, manifest, sources, id_column=id_column, num_workers=num_workers)
        except _OtherFilesError as error:
            reason = str(error)
    if join == "row":
        raise ConfigError(f"join: row needs the files that the mask was learned from, but {reason}; use join: id.")
    id_type = plain_type(part_schema(folder).field("id").type)
    for source in sources:
        if source.num_rows:
            check_id_type(source, id_column, id_type, reason)
    return _join_by_id(
        folder,
        manifest,
        sources,
        id_type=id_type,
        id_column=id_column,
        on_missing=on_missing,
        on_duplicate=on_duplicate,
    )


class _OtherFilesError(Exception):
    """The files are not those that the mask was learned from; says where they differ."""


def _join_by_row(
    folder: AnyPath, manifest: Manifest, sources: Sequence[SourceFile], *, id_column: str, num_workers: int
) -> Selection:
    """Keeps rows by file and row number, and compares their ids with those of the mask.

    Raises:
        _OtherFilesError: If names, numbers of rows or ids of the files are not those of the mask.
    """
    ordered = _order_as_mask(manifest, sources)
    rows = _read_selected_rows(folder, manifest)
    _check_numbers(ordered, rows, num_dropped=sum(entry.num_dropped for entry in manifest.blocks.values()))
    bounds = np.searchsorted(rows.file_K, np.arange(len(ordered) + 1))
    spans = [slice(bounds[index], bounds[index + 1]) for index in range(len(ordered))]
    keep = {source.relative_name: np.zeros(source.num_rows, dtype=bool) for source in ordered}
    for source, span in zip(ordered, spans, strict=True):
        keep[source.relative_name][rows.row_K[span]] = True
    selection = [keep[source.relative_name] for source in sources]
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(partial(_check_ids, rows=rows, id_column=id_column), ordered, spans))
    return Selection(selection, "row")


def _order_as_mask(manifest: Manifest, sources: Sequence[SourceFile]) -> list[SourceFile]:
    """The files in the order of the manifest, matched by their names below the folder that they share."""
    shared = common_folder(manifest.files)
    names = [name[len(shared) :] for name in manifest.files]
    by_name = {source.relative_name: source for source in sources}
    if len(set(names)) < len(names):
        raise _OtherFilesError("several of those have one name")
    if set(names) != set(by_name):
        name = min(set(names) ^ set(by_name))
        raise _OtherFilesError(f"{name} is only {'in the source' if name in by_name else 'among those of the mask'}")
    return [by_name[name] for name in names]


def _check_numbers(ordered: Sequence[SourceFile], rows: _SelectedRows, *, num_dropped: int) -> None:
    """Compares numbers of rows; which files the dropped rows were in is not known."""
    for source, num_samples, last_row in zip(ordered, rows.num_samples, rows.last_row, strict=True):
        has = f"{source.name} has {source.num_rows} rows and the mask is of"
        if last_row >= source.num_rows:
            raise _OtherFilesError(f"{has} {last_row + 1} or more")
        if num_samples + num_dropped < source.num_rows:
            raise _OtherFilesError(f"{has} {num_samples}")
    num_rows, num_expected = sum(source.num_rows for source in ordered), rows.num_samples.sum() + num_dropped
    if num_rows != num_expected:
        raise _OtherFilesError(f"the source has {num_rows} rows and the mask is of {num_expected}")


def _read_selected_rows(folder: AnyPath, manifest: Manifest) -> _SelectedRows:
    num_samples = np.zeros(len(manifest.files), dtype=np.int64)
    last_row = np.full(len(manifest.files), -1, dtype=np.int64)
    files, rows, ids = [], [], [pa.array([], plain_type(part_schema(folder).field("id").type))]
    for table in read_parts(folder, manifest, ["id", "source_file", "source_row", "selected"]):
        names = pa.array(manifest.files, pa.string())
        file_M = _numbers(pc.index_in(table["source_file"].cast(pa.string()), value_set=names))
        row_M, selected_M = _numbers(table["source_row"]), np.asarray(table["selected"])
        num_samples += np.bincount(file_M, minlength=len(num_samples))
        np.maximum.at(last_row, file_M, row_M)
        files.append(file_M[selected_M])
        rows.append(row_M[selected_M])
        ids += [plain(chunk) for chunk in table["id"].filter(pa.array(selected_M)).chunks]
    file_K, row_K = np.concatenate(files), np.concatenate(rows)
    order_K = np.lexsort((row_K, file_K))
    id_K = pa.concat_arrays(ids).take(pa.array(order_K))
    return _SelectedRows(num_samples, last_row, file_K[order_K], row_K[order_K], id_K)


def _check_ids(source: SourceFile, span: slice, *, rows: _SelectedRows, id_column: str) -> None:
    """Compares the ids of the rows that are kept with those that the mask selects."""
    row_K, id_K = rows.row_K[span], rows.id_K.slice(span.start, span.stop - span.start)
    start = 0
    for ids in iterate_ids(source, id_column):
        low, high = np.searchsorted(row_K, [start, start + len(ids)])
        if low < high:
            in_mask, in_file = id_K.slice(low, high - low), ids.take(pa.array(row_K[low:high] - start))
            if in_mask.type != in_file.type:
                raise _OtherFilesError(
                    f"{source.name} has ids of type {in_file.type} and those of the mask are {in_mask.type}"
                )
            if not in_mask.equals(in_file):
                pairs = zip(row_K[low:high], in_file.to_pylist(), in_mask.to_pylist(), strict=True)
                row, one, other = next(pair for pair in pairs if pair[1] != pair[2])
                raise _OtherFilesError(f"{source.name}, row {row}, has id {one!r} and the mask has {other!r} there")
        start += len(ids)


def _join_by_id(
    folder: AnyPath,
    manifest: Manifest,
    sources: Sequence[SourceFile],
    *,
    id_type: pa.DataType,
    id_column: str,
    on_missing: OnMissing,
    on_duplicate: OnDuplicate,
) -> Selection:
    id_U, selected_U = _read_ids(
        folder, manifest, id_type, only_selected=on_missing == "drop", is_unique=on_duplicate == "error"
    )
    ends = np.cumsum([source.num_rows for source in sources])
    seen_U = np.zeros(len(id_U), dtype=bool)
    missing, repeated = _Faults(sources, ends), _Faults(sources, ends)
    keeps: list[NDArray[np.bool_]] = []
    start = 0
    for ids, position_B in look_up(sources, id_column, id_U):
        is_known_B = position_B >= 0
        known_K = position_B[is_known_B]
        keep_B = np.zeros(len(position_B), dtype=bool)
        keep_B[is_known_B] = selected_U[known_K]
        keeps.append(keep_B)
        if on_missing == "error":
            missing.note(~is_known_B, ids, start)
        if on_duplicate == "error":
            is_repeated_B = np.zeros(len(position_B), dtype=bool)
            is_repeated_B[is_known_B] = seen_U[known_K] | ~_is_first(known_K)
            repeated.note(is_repeated_B, ids, start)
        seen_U[known_K] = True
        start += len(position_B)
    if missing.num_rows:
        num_dropped = sum(entry.num_dropped for entry in manifest.blocks.values())
        note = f" (the run dropped {num_dropped} bad rows)" if num_dropped else ""
        raise BadRowError(
            f"{missing.first}: the mask does not have id {missing.first_id!r}, nor those of {missing.num_rows - 1} "
            f"more of {start} rows{note}; pass the data that the mask was learned from, or set on_missing: drop."
        )
    if repeated.num_rows:
        raise BadRowError(
            f"{repeated.first}: duplicate id {repeated.first_id!r}: it already occurs in an earlier row, as do the ids "
            f"of {repeated.num_rows - 1} other rows of {start}; make ids unique, or set on_duplicate: keep to keep "
            "every row whose id is selected."
        )
    keep_N = np.concatenate(keeps) if keeps else np.zeros(0, dtype=bool)
    return Selection(np.split(keep_N, ends[:-1]), "id", int((selected_U & ~seen_U).sum()))


class _Faults:
    """Counts rows that break a rule, and remembers the first."""

    def __init__(self, sources: Sequence[SourceFile], ends: NDArray[np.int64]) -> None:
        self.num_rows = 0
        self.first = ""
        self.first_id: Any = None
        self._sources = sources
        self._ends = ends

    def note(self, is_bad_B: NDArray[np.bool_], ids: pa.Array, start: int) -> None:
        """Adds the bad rows of a batch that begins at row `start` of all."""
        rows = np.flatnonzero(is_bad_B)
        if rows.size and not self.num_rows:
            row = start + int(rows[0])
            file = int(np.searchsorted(self._ends, row, side="right"))
            before = int(self._ends[file]) - self._sources[file].num_rows
            self.first = f"{self._sources[file].name}, row {row - before}"
            self.first_id = ids[int(rows[0])].as_py()
        self.num_rows += rows.size


def _read_ids(
    folder: AnyPath, manifest: Manifest, id_type: pa.DataType, *, only_selected: bool, is_unique: bool
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The distinct ids of the mask, and which of them it selects.

    Raises:
        BadRowError: If they must be unique and are not.
    """
    chunks, flags = [], []
    for table in read_parts(folder, manifest, ["id", "selected"]):
        selected_M = np.asarray(table["selected"])
        if only_selected:
            table, selected_M = table.filter(pa.array(selected_M)), selected_M[selected_M]
        chunks += [plain(chunk) for chunk in table["id"].chunks]
        flags.append(selected_M)
    # chunks, not one array: a copy of all ids is a lot
    id_M, selected_M = pa.chunked_array(chunks, id_type), np.concatenate(flags)
    id_U = id_M.unique()
    if len(id_U) == len(id_M):
        return id_U, selected_M
    code_M = _numbers(pc.index_in(id_M, value_set=id_U))
    if is_unique:
        first = int(np.flatnonzero(~_is_first(code_M))[0])
        raise BadRowError(
            f"{folder}: id {id_M[first].as_py()!r} occurs more than once in the mask ({len(id_M) - len(id_U)} of "
            f"{len(id_M)} ids are duplicates), so rows cannot be matched by id; apply the mask to the original files, "
            "or set on_duplicate: keep to keep every row whose id is selected once."
        )
    selected_U = np.zeros(len(id_U), dtype=bool)
    selected_U[code_M[selected_M]] = True
    return id_U, selected_U


def look_up(
    sources: Sequence[SourceFile], id_column: str, id_U: pa.Array
) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
    """The ids of all files, and for each its position in `id_U`, -1 if it is not there."""
    batches = (pa.record_batch([array], names=["id"]) for source in sources for array in iterate_ids(source, id_column))
    reader = pa.RecordBatchReader.from_batches(pa.schema([("id", id_U.type)]), batches)
    # A bound expression makes its hash table once; pc.index_in would make it anew for every batch.
    position = pc.index_in(pc.field("id"), options=pc.SetLookupOptions(value_set=id_U))
    scanner = ds.Scanner.from_batches(reader, columns={"id": pc.field("id"), "position": position})
    for batch in scanner.to_batches():
        yield batch.column(0), _numbers(pc.fill_null(batch.column(1), -1))


def _is_first(code_B: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where a number stands for the first time."""
    is_first_B = np.zeros(len(code_B), dtype=bool)
    is_first_B[np.unique(code_B, return_index=True)[1]] = True
    return is_first_B


def check_id_type(source: SourceFile, id_column: str, expected: pa.DataType, reason: str | None) -> None:
    """Raises a SchemaError if a file has no ids of the mask's type; `reason` is why they are joined by id."""
    why = f" (joined by id, for {reason})" if reason else ""
    if source.id_type is None:
        raise SchemaError(
            f"{source.name} has no column {id_column!r} to compare with the mask's ids{why}; set id_column to "
            "that of the ids."
        )
    if plain_type(source.id_type) != expected:
        raise SchemaError(
            f"column {id_column!r} is {source.id_type} in {source.name} and {expected} in the mask{why}; "
            "write it with the mask's type."
        )


def _numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = np.asarray(column).astype(np.int64, copy=False)
    return numbers
