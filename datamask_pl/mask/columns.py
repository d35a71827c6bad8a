"""Joins columns of other files to the samples of a mask, by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from datamask_pl.data.shards import SourceFile, plain, plain_type
from datamask_pl.errors import BadRowError
from datamask_pl.io.parquet import open_parquet, read_table
from datamask_pl.io.paths import AnyPath
from datamask_pl.mask.join import check_id_type, look_up
from datamask_pl.mask.manifest import Manifest, part_schema, read_parts


def join_columns(
    folder: AnyPath, manifest: Manifest, sources: Sequence[SourceFile], names: Sequence[str], *, id_column: str
) -> list[pa.Table]:
    """Some columns of other files, for the samples of every part in their order.

    Args:
        folder: of the mask.
        manifest: of the mask, which is complete.
        sources: files with the mask's ids, among others; all have rows.
        names: columns wanted.
        id_column: the files' column that holds the ids.

    Raises:
        SchemaError: If the id column is missing, or of another type than the mask's ids.
        BadRowError: If an id of the mask is not in the files, or there or in the mask several times.
    """
    id_type = plain_type(part_schema(folder).field("id").type)
    for source in sources:
        check_id_type(source, id_column, id_type, None)
    chunks, lengths = [], []
    for table in read_parts(folder, manifest, ["id"]):
        chunks += [plain(chunk) for chunk in table["id"].chunks]
        lengths.append(table.num_rows)
    id_M = pa.concat_arrays([pa.array([], id_type), *chunks])
    if len(id_M.unique()) < len(id_M):
        raise BadRowError(
            f"{folder}: {len(id_M) - len(id_M.unique())} ids repeat another; rows cannot be joined by id."
        )
    position_S = np.concatenate([position for _, position in look_up(sources, id_column, id_M)])
    row_M = np.full(len(id_M), -1, dtype=np.int64)
    known = np.flatnonzero(position_S >= 0)
    row_M[position_S[known]] = known
    if len(np.unique(position_S[known])) < len(known):
        count_M = np.bincount(position_S[known], minlength=len(id_M))
        first = id_M[int(count_M.argmax())].as_py()
        raise BadRowError(f"source has id {first!r} {count_M.max()} times; give every sample once.")
    if (row_M < 0).any():
        first = id_M[int(np.flatnonzero(row_M < 0)[0])].as_py()
        raise BadRowError(
            f"source does not have id {first!r} of the mask, nor {int((row_M < 0).sum()) - 1} more of {len(id_M)}; "
            "give all files."
        )
    tables = []
    for source in sources:
        with open_parquet(source.path) as parquet:
            tables.append(read_table(parquet, source.name, list(names)))
    joined = pa.concat_tables(tables, promote_options="permissive").take(pa.array(row_M))
    starts = np.cumsum([0, *lengths])
    return [joined.slice(start, length) for start, length in zip(starts, lengths, strict=False)]
