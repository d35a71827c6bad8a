"""Which row belongs to which block: integers and a seed in, a plan out. Nothing here opens a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from datamask_pl.errors import ConfigError
from datamask_pl.functional.seeding import derive_seed

BlockBy = Literal["rows", "row_groups_shuffled", "file"]


@dataclass(frozen=True)
class Segment:
    """Rows of one row group that stand next to each other.

    Attributes:
        file_index: index into the list of files.
        row_group: index of the row group in that file.
        start: first row, counted within the row group.
        stop: row after the last, counted within the row group.
    """

    file_index: int
    row_group: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows, at least 1 in a plan."""
        return self.stop - self.start


@dataclass(frozen=True)
class BlockPlan:
    """The rows of one block, in the order in which they are read.

    Attributes:
        segments: at least one.
    """

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the block before any is dropped."""
        return sum(segment.num_rows for segment in self.segments)


def plan_blocks(
    row_group_rows: Sequence[Sequence[int]], *, block_by: BlockBy, block_size: int, seed: int
) -> list[BlockPlan]:
    """Divides all rows of all files into blocks. Every row is in exactly one block.

    Args:
        row_group_rows: for every file, the number of rows of each of its row groups; zeros are fine.
        block_by: `rows` takes the rows in the order of the files; `row_groups_shuffled` permutes the row groups
            of all files first, so that a block is drawn from many files. Both then cut ceil(rows / block_size)
            blocks whose sizes differ by at most one row. `file` makes one block of every file that has rows.
        block_size: largest number of rows of a block, at least 1; not used by `file`.
        seed: decides the permutation of `row_groups_shuffled`; the others do not depend on it.

    Returns:
        The blocks; none if there are no rows.

    Raises:
        ValueError: If block_by is not one of the three.

    Example:
        >>> [block.num_rows for block in plan_blocks([[4], [3, 3]], block_by="rows", block_size=4, seed=0)]
        [4, 3, 3]
    """
    groups = [
        Segment(file_index, row_group, 0, num_rows)
        for file_index, rows in enumerate(row_group_rows)
        for row_group, num_rows in enumerate(rows)
        if num_rows > 0
    ]
    if block_by == "rows":
        return _cut(groups, block_size)
    if block_by == "row_groups_shuffled":
        # Sorting by a hash needs no library's generator, whose stream may change with its version.
        return _cut(sorted(groups, key=lambda group: derive_seed(seed, group.file_index, group.row_group)), block_size)
    if block_by == "file":
        by_file: dict[int, list[Segment]] = {}
        for group in groups:
            by_file.setdefault(group.file_index, []).append(group)
        return [BlockPlan(tuple(segments)) for segments in by_file.values()]
    raise ValueError(f"block_by must be rows, row_groups_shuffled or file, got {block_by!r}.")


def _cut(groups: Iterable[Segment], block_size: int) -> list[BlockPlan]:
    """Cuts a sequence of row groups into balanced blocks."""
    groups = list(groups)
    num_rows = sum(group.num_rows for group in groups)
    num_blocks = -(-num_rows // block_size)
    blocks: list[BlockPlan] = []
    segments: list[Segment] = []
    room = 0
    for group in groups:
        start = group.start
        while start < group.stop:
            if room == 0:
                # The first num_rows % num_blocks blocks are one row larger.
                room = num_rows // num_blocks + (len(blocks) < num_rows % num_blocks)
            stop = min(group.stop, start + room)
            segments.append(Segment(group.file_index, group.row_group, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                blocks.append(BlockPlan(tuple(segments)))
                segments = []
    return blocks


def hash_plan(
    *, files: Sequence[tuple[str, int, Sequence[int]]], columns: Mapping[str, object], options: Mapping[str, object]
) -> str:
    """Hash of everything that decides which row is in which block and what is read of it.

    Names count from the folder that all files share, so that a data set may be moved between two runs.

    Args:
        files: name, size in bytes and rows of each row group, of every file in the order of the plan.
        columns: names of the columns and weights of the qualities.
        options: quality_scaling, block_by, block_size, seed and on_bad_row.

    Returns:
        SHA-256 as 64 hexadecimal digits.
    """
    folder = common_folder([name for name, _, _ in files])
    content = {
        "files": [(name[len(folder) :], num_bytes, list(rows)) for name, num_bytes, rows in files],
        "columns": dict(columns),
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def common_folder(names: Sequence[str]) -> str:
    """Longest prefix of all names that ends in a slash, or nothing."""
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind("/", 0, length) + 1]


def deal_blocks(num_blocks: int, *, shard: tuple[int, int], group: tuple[int, int]) -> list[int]:
    """Blocks that a group of ranks of a shard of jobs solves, in order.

    Jobs that share nothing but the output folder each take every n-th block, and within a job every group takes every
    n-th of those. Every block is dealt to exactly one group of one shard, and the counts differ by at most one within a
    job. What is done already plays no part, so that jobs which start at different times deal alike.

    Args:
        num_blocks: blocks of the whole data set.
        shard: index of the job, from 0, and number of jobs.
        group: index of the group in the job, from 0, and number of groups.

    Example:
        >>> [deal_blocks(7, shard=(1, 2), group=(group, 2)) for group in range(2)]
        [[1, 5], [3]]
    """
    return list(range(num_blocks))[shard[0] :: shard[1]][group[0] :: group[1]]


def parse_shard(text: str, option: str = "data.shard") -> tuple[int, int]:
    """Index and number of jobs from "i/n".

    Args:
        text: of the option.
        option: what the user calls it, for errors.

    Raises:
        ConfigError: If the text is not of this form, or i is not below n.

    Example:
        >>> parse_shard("2/8")
        (2, 8)
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"{option} must be i/n with i from 0 to n - 1, such as 0/4, got {text!r}.")
    return int(index), int(count)
