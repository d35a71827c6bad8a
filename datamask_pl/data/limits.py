"""Cost, group and fate of the samples of a block, gathered while its rows are read.

Shapes: N samples of a block, K rows of a chunk, F ids to always keep or drop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from datamask_pl.data.forced_ids import ForcedIds
from datamask_pl.data.rows import read_groups
from datamask_pl.data.types import Limits
from datamask_pl.functional.budget import Totals
from datamask_pl.io.parquet import Shard, iterate_batches, open_parquet

NAMES_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Survey:
    """Totals of the rows of a block.

    Attributes:
        totals: by group; None where only numbers of samples are limited.
        forced_F: which ids to keep or to drop the rows have, see `ForcedIds.find`.
    """

    totals: Totals | None = None
    forced_F: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(cls, limits: Limits | None) -> Survey:
        """The survey of a block."""
        if limits is None:
            return cls()
        return cls(limits.holdings().totals(), limits.forced_F)


@dataclass
class LimitsBuilder:
    """Gathers what the budget goes by, chunk by chunk.

    Attributes:
        forced: ids to always keep or drop, if any.
        costs: float64 (K,) of each chunk.
        groups: large_string (K,) of each chunk.
    """

    forced: ForcedIds | None = None
    costs: list[NDArray[np.float64]] = field(default_factory=list)
    groups: list[pa.Array] = field(default_factory=list)

    def add(self, cost_K: NDArray[np.float64] | None, group_K: pa.Array | None) -> None:
        """Takes in a chunk."""
        if cost_K is not None:
            self.costs.append(cost_K)
        if group_K is not None:
            self.groups.append(group_K)

    def build(self, ids: list[pa.Array]) -> Limits | None:
        """What was gathered, for the block's ids; None if there is nothing."""
        return self.limits(ids) if self.costs or self.groups or self.forced else None

    def limits(self, ids: list[pa.Array]) -> Limits:
        """The same, also where there is nothing to go by but numbers of samples."""
        forced_N, forced_F = np.zeros(sum(map(len, ids)), dtype=np.int8), np.zeros(0, dtype=np.int64)
        if self.forced is not None:
            forced_N, forced_F = self.forced.find(ids)
        names, group_N = encode_groups(self.groups) if self.groups else ((), None)
        return Limits(
            cost_N=torch.from_numpy(np.concatenate(self.costs)) if self.costs else None,
            group_N=None if group_N is None else torch.from_numpy(group_N),
            names=names,
            forced_N=torch.from_numpy(forced_N),
            forced_F=forced_F,
        )


def find_group_names(files: Iterable[Shard], column: str) -> set[str]:
    """All groups of some files, from the group column alone.

    Raises:
        DataFileError: If a file cannot be read.
    """
    names: set[str] = set()
    for file in files:
        with open_parquet(file.path) as parquet:
            for batch in iterate_batches(parquet, file.name, batch_rows=NAMES_BATCH_ROWS, columns=[column]):
                groups = read_groups(batch, column, lambda is_bad_M, reasons: None)
                names.update(name for name in pc.unique(groups).to_pylist() if name is not None)
    return names


def encode_groups(chunks: list[pa.Array]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Names of the groups, sorted, and the index of each row's: (N,).

    Example:
        >>> encode_groups([pa.array(["b", "a"]), pa.array(["b"])])
        (('a', 'b'), array([1, 0, 1]))
    """
    column = pa.chunked_array(chunks)
    names = pc.unique(column).sort()
    code_N = np.concatenate([np.asarray(pc.index_in(chunk, value_set=names)) for chunk in column.chunks])
    return tuple(names.to_pylist()), code_N.astype(np.int64)
