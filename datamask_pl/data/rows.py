"""A few thousand rows at a time: from arrow columns to numpy, every row checked.

Shape suffixes: M rows of a chunk, K rows of it that are kept, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from datamask_pl.data.schema import Columns
from datamask_pl.errors import BadRowError

# Outside this range 1 / norm leaves the normal float32 numbers, and a GPU may take it for 0 or infinity.
MIN_NORM, MAX_NORM = 1e-37, 1e37
MAX_LISTED = 1000
# A million costs of the range add up to a finite number, and none is lost in the sum of its like.
MIN_COST, MAX_COST = 1e-30, 1e30
# Told which rows break a rule, and how to word what was seen in one of them.
Note = Callable[[NDArray[np.bool_], Callable[[int], str]], None]


@dataclass(frozen=True)
class BadRow:
    """A row that was dropped.

    Attributes:
        file: name of the file.
        row: its number in the file, from 0.
        reason: the rule that it breaks and what was seen.
    """

    file: str
    row: int
    reason: str


@dataclass
class BadRows:
    """Counts the rows that were dropped and lists the first of them.

    Attributes:
        num_rows: how many there were.
        listed: the first 1,000.
    """

    num_rows: int = 0
    listed: list[BadRow] = field(default_factory=list)

    def add(self, other: BadRows) -> None:
        """Takes in what another counted."""
        self.num_rows += other.num_rows
        self.listed += other.listed[: MAX_LISTED - len(self.listed)]


@dataclass(frozen=True)
class Chunk:
    """Rows of one file that passed every check.

    Attributes:
        features_KD: float16 or float32 (K, D).
        inv_norm_K: float32 (K,), 1 / L2 norm of each row.
        quality_K: float32 (K,).
        ids: pyarrow Array (K,), in its exact type.
        source_row_K: int64 (K,), row number in the file.
        cost_K: float64 (K,), positive, if there is a cost column.
        group_K: large_string (K,), if there is a group column.
    """

    features_KD: NDArray[Any]
    inv_norm_K: NDArray[np.float32]
    quality_K: NDArray[np.float32]
    ids: pa.Array
    source_row_K: NDArray[np.int64]
    cost_K: NDArray[np.float64] | None = None
    group_K: pa.Array | None = None


class _Faults:
    """The first rule that each row of a chunk breaks."""

    def __init__(self, num_rows: int) -> None:
        self.is_bad_M = np.zeros(num_rows, dtype=bool)
        self.reasons: dict[int, str] = {}

    def note(self, is_bad_M: NDArray[np.bool_], reasons: Any) -> None:  # noqa: ANN401
        """Adds a rule. `reasons(row)` words what was seen; it is called for rows without an earlier fault only."""
        for row in np.flatnonzero(is_bad_M & ~self.is_bad_M):
            self.reasons[int(row)] = reasons(int(row))
        self.is_bad_M |= is_bad_M


def check_rows(
    batch: pa.RecordBatch, columns: Columns, *, num_features: int, file_name: str, first_row: int, drops: bool
) -> tuple[Chunk, BadRows]:
    """Converts a batch of rows and checks every one.

    A row is bad if its quality is null, NaN or infinite; if its features are null, of another length than
    `num_features`, or hold a null, a NaN or an infinity (one beyond float32 included); or if their L2 norm is 0, or so
    small or large (outside 1e-37 to 1e37) that its inverse is not a normal float32; if its cost is null, NaN, or
    outside of 1e-30 to 1e30; or if its group is null.

    Args:
        batch: M rows with the columns that are read.
        columns: their names.
        num_features: D.
        file_name: for messages.
        first_row: number in the file of the batch's first row.
        drops: drops bad rows instead of raising.

    Returns:
        The rows that are kept, and those that were dropped.

    Raises:
        BadRowError: If an id is null, or if a row is bad and `drops` is False.
    """
    ids = batch.column(columns.id_column)
    if ids.null_count:
        row = first_row + int(np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadRowError(
            f"{file_name}, row {row}: id column {columns.id_column!r} must not be null, {ids.null_count} of "
            f"{len(batch)} rows here are; give every row an id (data.on_bad_row does not cover ids)."
        )
    faults = _Faults(len(batch))
    quality_M = _read_quality(batch, columns, faults)
    features_MD = _read_features(batch.column(columns.feature_column), columns.feature_column, num_features, faults)
    inv_norm_M = _invert_norms(features_MD, columns.feature_column, faults)
    cost_M = None if columns.cost_column is None else read_costs(batch, columns.cost_column, faults.note)
    groups = None if columns.group_column is None else read_groups(batch, columns.group_column, faults.note)
    source_row_M = np.arange(first_row, first_row + len(batch), dtype=np.int64)
    if not faults.reasons:
        return Chunk(features_MD, inv_norm_M, quality_M, ids, source_row_M, cost_M, groups), BadRows()
    rows = sorted(faults.reasons)
    if not drops:
        more = f" {len(rows) - 1} of the next {len(batch) - rows[0] - 1} rows are bad too." if len(rows) > 1 else ""
        raise BadRowError(
            f"{file_name}, row {first_row + rows[0]}: {faults.reasons[rows[0]]}; repair the file, or set "
            f"data.on_bad_row: drop to drop such rows.{more}"
        )
    bad = [BadRow(file_name, first_row + row, faults.reasons[row]) for row in rows[:MAX_LISTED]]
    keep_M = ~faults.is_bad_M
    chunk = Chunk(
        features_MD[keep_M],
        inv_norm_M[keep_M],
        quality_M[keep_M],
        ids.filter(pa.array(keep_M)),
        source_row_M[keep_M],
        None if cost_M is None else cost_M[keep_M],
        None if groups is None else groups.filter(pa.array(keep_M)),
    )
    return chunk, BadRows(len(rows), bad)


def list_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Length of every list; -1 where the list itself is null."""
    lengths = pc.fill_null(pc.list_value_length(column), -1)
    result: NDArray[np.int64] = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def read_costs(batch: pa.RecordBatch, name: str, note: Note) -> NDArray[np.float64]:
    """The costs; `note` is told of rows whose cost cannot be used."""
    column = batch.column(name)
    cost_M = _to_float64(column)
    if column.null_count:
        note(column.is_null().to_numpy(zero_copy_only=False), lambda row: f"cost column {name!r} must not be null")
    note(
        ~((cost_M >= MIN_COST) & (cost_M <= MAX_COST)),
        lambda row: f"cost column {name!r} must be from {MIN_COST:.0e} to {MAX_COST:.0e}, it is {cost_M[row]:.6g}",
    )
    return cost_M


def read_groups(batch: pa.RecordBatch, name: str, note: Note) -> pa.Array:
    """The groups as text: large_string (M,); `note` is told of rows that have none."""
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        note(column.is_null().to_numpy(zero_copy_only=False), lambda row: f"group column {name!r} must not be null")
    return column.cast(pa.large_string())


def _read_quality(batch: pa.RecordBatch, columns: Columns, faults: _Faults) -> NDArray[np.float32]:
    """Weighted sum of the quality columns, in float64 and then rounded to float32."""
    total_M = np.zeros(len(batch))
    for name, weight in columns.quality_columns.items():
        column = batch.column(name)
        values_M = _to_float64(column)
        if column.null_count:
            is_null_M = column.is_null().to_numpy(zero_copy_only=False)
            faults.note(is_null_M, lambda row, name=name: f"quality column {name!r} must not be null")
        faults.note(
            ~np.isfinite(values_M),
            lambda row, name=name, values_M=values_M: f"quality column {name!r} must be finite, it is {values_M[row]}",
        )
        total_M += weight * np.where(np.isfinite(values_M), values_M, 0.0)
    with np.errstate(over="ignore"):
        quality_M = total_M.astype(np.float32)
    faults.note(
        ~np.isfinite(quality_M), lambda row: f"the weighted quality must fit into float32, it is {total_M[row]:.6g}"
    )
    return quality_M


def _to_float64(column: pa.Array) -> NDArray[np.float64]:
    """Any numeric column; nulls become NaN."""
    if not pa.types.is_floating(column.type):
        # not safe: integers beyond 2^53 are rounded, which is fine for a score
        column = pc.cast(column, pa.float64(), safe=False)
    values_M: NDArray[np.float64] = column.to_numpy(zero_copy_only=False).astype(np.float64)
    return values_M


def _read_features(column: pa.Array, name: str, num_features: int, faults: _Faults) -> NDArray[Any]:
    """The vectors as (M, D); rows that have none are zeros, and noted."""
    lengths_M = list_lengths(column)
    has_length_M = lengths_M == num_features
    is_whole = bool(has_length_M.all())
    if not is_whole:
        faults.note(lengths_M < 0, lambda row: f"feature column {name!r} must not be null")
        faults.note(
            ~has_length_M,
            lambda row: (
                f"feature column {name!r} must have {num_features} elements as in the other rows, "
                f"it has {lengths_M[row]}"
            ),
        )
        column = column.filter(pa.array(has_length_M))
    # flatten, not .values: the latter ignores the offset of a slice
    values = column.flatten()
    flat_values = _ignoring_nulls(values).reshape(-1, num_features)
    if values.null_count:
        has_null_M = np.zeros(len(lengths_M), dtype=bool)
        is_null = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, num_features)
        has_null_M[has_length_M] = is_null.any(axis=1)
        faults.note(has_null_M, lambda row: f"feature column {name!r} must not hold a null element")
    features_MD = flat_values
    if not is_whole:
        features_MD = np.zeros((len(lengths_M), num_features), dtype=flat_values.dtype)
        features_MD[has_length_M] = flat_values
    if features_MD.dtype == np.float64:
        with np.errstate(over="ignore"):
            features_MD = features_MD.astype(np.float32)
    return features_MD


def _ignoring_nulls(values: pa.Array) -> NDArray[Any]:
    """The numbers as they lie in memory; what a null hides is arbitrary."""
    data = values.buffers()[1]
    whole = pa.Array.from_buffers(values.type, len(values), [None, data], null_count=0, offset=values.offset)
    numbers: NDArray[Any] = whole.to_numpy()
    return numbers


def _invert_norms(features_MD: NDArray[Any], name: str, faults: _Faults) -> NDArray[np.float32]:
    """1 / L2 norm of every row, 0 for a row that has a fault."""
    # float64: squares of float32 numbers overflow and vanish in float32; a sum of squares is then finite if and only
    # if every element is
    norm_M = np.sqrt(np.einsum("md,md->m", features_MD, features_MD, dtype=np.float64))
    is_usable_M = (norm_M >= MIN_NORM) & (norm_M <= MAX_NORM)
    inv_norm_M: NDArray[np.float32] = (1.0 / np.where(is_usable_M, norm_M, np.inf)).astype(np.float32)
    if is_usable_M.all():
        return inv_norm_M
    faults.note(~np.isfinite(norm_M), lambda row: _describe_element(features_MD[row], name))
    faults.note(norm_M == 0, lambda row: f"feature column {name!r} must not be a zero vector")
    faults.note(
        ~is_usable_M,
        lambda row: (
            f"feature column {name!r} must have an L2 norm from {MIN_NORM:.0e} to {MAX_NORM:.0e}, "
            f"it is {norm_M[row]:.6g}"
        ),
    )
    return inv_norm_M


def _describe_element(features_D: NDArray[Any], name: str) -> str:
    """Words the first element that is not finite."""
    element = int(np.flatnonzero(~np.isfinite(features_D))[0])
    return (
        f"feature column {name!r}: every element must be a finite {features_D.dtype}, "
        f"element {element} is {features_D[element]}"
    )
