"""Ids of samples to always keep or always drop: read from files, and looked up in a block.

Shapes: N samples, I ids of both lists, F of them that samples have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from datamask_pl.data.shards import plain, plain_type
from datamask_pl.errors import BudgetError, DataFileError, SchemaError
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import MAGIC, find_column, open_bytes, open_parquet, read_table
from datamask_pl.io.paths import AnyPath


@dataclass(frozen=True)
class ForcedIds:
    """Ids that a budget does not decide on.

    Attributes:
        keep: distinct ids that are kept, in the plain type of the id column.
        drop: distinct ids that are dropped.
    """

    keep: pa.Array
    drop: pa.Array

    def find(self, chunks: Sequence[pa.Array]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        """Looks the ids of N samples up.

        Returns:
            forced_N: (N,), over all chunks: 1 for ids to keep, -1 for ids to drop, 0 for the others.
            found_F: (F,), which ids of `keep`, and then of `drop`, are among them.
        """
        plain_ids = pa.chunked_array([plain(chunk) for chunk in chunks], self.keep.type)
        forced_N = np.zeros(len(plain_ids), dtype=np.int8)
        found = []
        for fate, forced, start in ((1, self.keep, 0), (-1, self.drop, len(self.keep))):
            place_N = np.asarray(pc.fill_null(pc.index_in(plain_ids, value_set=forced), -1))
            forced_N[place_N >= 0] = fate
            found.append(np.unique(place_N[place_N >= 0]).astype(np.int64) + start)
        return forced_N, np.concatenate(found)

    def digests(self) -> dict[str, str]:
        """SHA-256 of either list, whatever the order of its ids; none of an empty one."""
        lists = {"keep_ids": self.keep, "drop_ids": self.drop}
        return {name: _digest(ids) for name, ids in lists.items() if len(ids)}


def describe_unmatched_ids(forced: ForcedIds, found: Iterable[NDArray[np.int64]], *, prefix: str = "") -> str | None:
    """A text that names ids that match no sample; None if all do.

    Args:
        forced: both lists.
        found: which of their ids there are, see `ForcedIds.find`, by block.
        prefix: what stands before the options' names in messages.
    """
    is_unmatched_I = np.ones(len(forced.keep) + len(forced.drop), dtype=bool)
    for found_F in found:
        is_unmatched_I[found_F] = False
    unmatched = np.flatnonzero(is_unmatched_I)
    if not unmatched.size:
        return None
    in_keep = unmatched[0] < len(forced.keep)
    first = forced.keep[unmatched[0]] if in_keep else forced.drop[unmatched[0] - len(forced.keep)]
    return (
        f"{prefix}keep_ids and {prefix}drop_ids: {unmatched.size:,} of {len(is_unmatched_I):,} ids match no sample and "
        f"are ignored, the first is {first.as_py()!r}."
    )


def read_forced_ids(
    keep: str | Sequence[str] | None,
    drop: str | Sequence[str] | None,
    *,
    id_column: str,
    id_type: pa.DataType,
    prefix: str = "",
) -> ForcedIds | None:
    """Reads both lists.

    Args:
        keep: parquet files with the id column, or text files with one id a line; None for no ids.
        drop: the same.
        id_column: the column.
        id_type: type of the ids that they are compared with.
        prefix: what stands before the options' names in messages.

    Returns:
        The ids; None if neither list is given.

    Raises:
        DataFileError: If a file is missing or cannot be read.
        SchemaError: If ids are of another type, or null.
        BudgetError: If an id is in both lists.
    """
    if keep is None and drop is None:
        return None
    kept = _read(keep, f"{prefix}keep_ids", id_column, id_type)
    dropped = _read(drop, f"{prefix}drop_ids", id_column, id_type)
    both = kept.filter(pc.is_in(kept, value_set=dropped))
    if len(both):
        raise BudgetError(
            f"{prefix}keep_ids and {prefix}drop_ids share {len(both)} ids, such as {both[0].as_py()!r}; "
            "take them out of one."
        )
    return ForcedIds(kept, dropped)


def _read(path: str | Sequence[str] | None, option: str, id_column: str, id_type: pa.DataType) -> pa.Array:
    expected = plain_type(id_type)
    if path is None:
        return pa.array([], expected)
    chunks = []
    for file in expand(path, option=option, wanted="a text file with an id a line, a parquet file"):
        with open_bytes(file) as source:
            # by its name, too: one that is empty or damaged is not a text
            is_parquet = source.read(len(MAGIC)) == MAGIC or file.name.endswith(".parquet")
        read = _read_parquet if is_parquet else _read_text
        chunks.append(read(file, option, id_column, expected))
    return pc.unique(pa.concat_arrays(chunks))


def _read_parquet(path: AnyPath, option: str, id_column: str, expected: pa.DataType) -> pa.Array:
    with open_parquet(path) as parquet:
        if not parquet.metadata.num_rows:
            return pa.array([], expected)
        found = find_column(parquet.schema_arrow, f"{option}: {path}", id_column, "id_column")
        if plain_type(found) != expected:
            raise SchemaError(
                f"{option}: column {id_column!r} is {found} in {path} and {expected} in the data; write it with the "
                "type of the data."
            )
        column = read_table(parquet, str(path), [id_column])[id_column]
    if column.null_count:
        raise SchemaError(f"{option}: {path} has {column.null_count} null ids; remove them.")
    return pa.concat_arrays([pa.array([], expected), *(plain(chunk) for chunk in column.chunks)])


def _read_text(path: AnyPath, option: str, id_column: str, expected: pa.DataType) -> pa.Array:
    with open_bytes(path) as file:
        content = bytes(file.read())
    try:
        # not splitlines, which ends a line at ten characters that an id may hold; some writers put a mark first
        lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise DataFileError(
            f"{option}: {path} is neither a parquet file nor a text in UTF-8; give one id a line."
        ) from error
    ids = [line for line in lines if line]
    try:
        return pa.array(ids, pa.large_string()).cast(expected)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{option}: {path} has lines that are not ids of type {expected}, as column {id_column!r} holds "
            f"({str(error).rstrip('.')}); repair them, or pass a parquet file with that column."
        ) from error


def _digest(ids: pa.Array) -> str:
    ordered = ids.take(pc.sort_indices(ids)).to_pylist()
    return hashlib.sha256(repr([str(ids.type), ordered]).encode()).hexdigest()
