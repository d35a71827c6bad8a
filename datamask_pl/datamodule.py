"""FeatureDataModule: parquet shards in, one block of samples an epoch out."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch import LightningDataModule

from datamask_pl.data.blocks import BlockBy, BlockPlan, deal_blocks, hash_plan, parse_shard, plan_blocks
from datamask_pl.data.loader import BlockQueue, StepLoader
from datamask_pl.data.reader import BlockReader, OnBadRow
from datamask_pl.data.rows import MAX_LISTED, BadRow, BadRows
from datamask_pl.data.scaling import QualityScaling, quality_warning
from datamask_pl.data.schema import Columns, Dataset, read_dataset
from datamask_pl.data.types import Block
from datamask_pl.distributed import failing_together, gather_objects, place, rank_and_world
from datamask_pl.errors import ConfigError, DataFileError

_log = logging.getLogger(__name__)


class FeatureDataModule(LightningDataModule):
    """Reads ids, qualities and features from parquet files, block by block.

    A block is a set of rows that one mask is learned for, and one Lightning epoch. Memory is two blocks, whatever the
    size of the data set.

    Args:
        path: parquet files, directories, globs or fsspec URLs (s3://, hf://, gs://), one or a list. Their order is by
            name.
        id_column: column that identifies a sample, of any type but a nested one; written to the mask as it is.
        quality_columns: weight of each quality column, by name; the weighted sum is the quality of a sample.
            {"quality_score": 1.0} if left out.
        feature_column: column of vectors, a list of float16, float32 or float64; all of one length. They are scaled to
            unit L2 norm.
        quality_scaling: how quality is scaled within a block. `rank` gives each sample the share of the others that it
            is above, `minmax` stretches to [0, 1], `zscore` to mean 0 and standard deviation 1, `none` leaves it.
        block_size: largest number of rows of a block; blocks are made equal, to a row. Not used by `block_by: file`.
        block_by: `rows` cuts the rows in the order of the files, `row_groups_shuffled` shuffles the row groups of all
            files first, `file` makes every file a block.
        partial: share of the block that a step reads at once, in (0, 1]. Steps that draw masks are confined to a random
            part of this size, 0.1 if left out. Steps over the whole block read it in slices of this size, 16,384 rows
            if left out.
        on_bad_row: what to do with a row whose quality or features are null, not finite, of the wrong length or zero.
            `error` stops, `drop` leaves it out and lists it. A null id always stops.
        check_rows: reads all rows once before training, shared among the ranks, so that a bad row in the last block
            does not end a run after hours. Costs nothing if there is one block.
        shard: "i/n": this run takes every n-th block, from the i-th on, counted from 0. For jobs that share nothing but
            the folder of the mask.
        seed: decides the shuffle, the random parts and the rollouts; from 0 up to, but without, 2^63.

    Raises:
        ConfigError: If a value is not allowed, or if rows are to be dropped unchecked.
    """

    def __init__(
        self,
        *,
        path: str | list[str],
        id_column: str = "chunk_id",
        quality_columns: dict[str, float] | None = None,
        feature_column: str = "feature_arr",
        quality_scaling: Literal["rank", "minmax", "zscore", "none"] = "rank",
        block_size: int = 1_000_000,
        block_by: Literal["rows", "row_groups_shuffled", "file"] = "rows",
        partial: float | None = None,
        on_bad_row: Literal["error", "drop"] = "error",
        check_rows: bool = True,
        shard: str = "0/1",
        seed: int = 0,
    ) -> None:
        super().__init__()
        weights = {"quality_score": 1.0} if quality_columns is None else quality_columns
        _check_weights(weights)
        _check_choice("quality_scaling", quality_scaling, get_args(QualityScaling))
        _check_choice("block_by", block_by, get_args(BlockBy))
        _check_choice("on_bad_row", on_bad_row, get_args(OnBadRow))
        if block_size < 1:
            raise ConfigError(f"data.block_size must be at least 1, got {block_size}.")
        if partial is not None and not 0.0 < partial <= 1.0:
            raise ConfigError(f"data.partial must be above 0 and at most 1, got {partial}.")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"data.seed must be at least 0 and below 2^63, got {seed}.")
        if on_bad_row == "drop" and not check_rows:
            raise ConfigError(
                "data.check_rows: false cannot go with data.on_bad_row: drop, since the size of a block is not known "
                "until its rows are checked; leave check_rows at true."
            )
        self.path = path
        # float: 1 and 1.0 are the same weight, and give the same hash
        self.columns = Columns(id_column, {name: float(weights[name]) for name in weights}, feature_column)
        self.quality_scaling = quality_scaling
        self.block_size = block_size
        self.block_by = block_by
        self.partial = partial
        self.on_bad_row = on_bad_row
        self.check_rows = check_rows
        self.shard = parse_shard(shard)
        self._seed = seed
        self._contents: _Contents | None = None
        self._steps: tuple[int, bool] | None = None
        self._loader: StepLoader | None = None
        self._has_warned = False
        self._epoch = 0
        self._resume: tuple[int, int] | None = None

    @property
    def seed(self) -> int:
        """Seed from which the slices, and the learner's rollouts, are drawn."""
        return self._seed

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole data set. Valid after `setup`."""
        return len(self._ready.plan)

    @property
    def schedule(self) -> list[int]:
        """Blocks that this group of ranks is to solve, in order, one an epoch. Valid after `setup`."""
        return list(self._ready.schedule)

    @property
    def next_block(self) -> int | None:
        """The block of the epoch that begins next, None after the last."""
        contents = self._ready
        return contents.schedule[self._epoch] if self._epoch < len(contents.schedule) else None

    @property
    def block_sizes(self) -> list[int]:
        """Number of samples of every block of the schedule, without rows that were dropped. Valid after `prepare`."""
        return [self._ready.block_sizes[index] for index in self._ready.schedule]

    @property
    def plan_hash(self) -> str:
        """SHA-256 hex digest of files, columns and options that decide the blocks. Valid after `setup`."""
        return self._ready.plan_hash

    @property
    def files(self) -> list[str]:
        """Names of the files; `Block.source_file_N` is an index into it. Valid after `setup`."""
        return [file.name for file in self._ready.dataset.files]

    @property
    def bad_rows(self) -> list[BadRow]:
        """The first 1,000 rows that were dropped, in the order of the blocks. Valid after `setup`."""
        return list(self._ready.bad_rows.listed)

    @property
    def num_dropped(self) -> int:
        """How many rows were dropped, over all blocks. Valid after `setup`."""
        return self._ready.bad_rows.num_rows

    def set_steps(self, *, num_steps: int, is_whole_block: bool) -> None:
        """Says how many batches a block yields, and whether each is the whole block or a random part of it."""
        self._steps = (num_steps, is_whole_block)

    def skip_rest_of_block(self) -> None:
        """Says that the block is settled: its remaining batches are neither drawn nor read. Ends the epoch."""
        assert self._loader is not None
        self._loader.skip_rest_of_block()

    def setup(self, stage: str | None = None) -> None:
        """Finds the files, checks them, plans the blocks, and deals them to the groups of ranks.

        Called by every rank; a second call only begins the schedule anew.

        Args:
            stage: not used.

        Raises:
            DataFileError: If a file is missing, damaged or empty, or the ranks see different files.
            SchemaError: If a column is missing or its type cannot be used.
        """
        if self._contents is None:
            contents: _Contents | None = None
            with failing_together():
                contents = self._plan()
            assert contents is not None
            _check_same_plan(gather_objects(contents.plan_hash))
            self._contents = contents
        here = place()
        self._ready.schedule = deal_blocks(len(self._ready.plan), shard=self.shard, group=(here.group, here.num_groups))
        self._epoch = 0
        self._resume = None

    def skip_blocks(self, finished: Collection[int]) -> None:
        """Takes finished blocks out of the schedule; between `setup` and `prepare`."""
        self._ready.schedule = [index for index in self._ready.schedule if index not in finished]

    def prepare(self) -> None:
        """Reads every row of the schedule's blocks once, if `check_rows` is set; a second call does nothing.

        Raises:
            BadRowError: If a row is bad.
        """
        if self.check_rows:
            self._scan(self._ready)

    def read_block(self, index: int) -> Block:
        """Reads a block apart from the schedule, to look at a mask after its run. Not a collective."""
        return self._ready.reader.read(self._ready.plan[index], index)[0]

    def resume_at(self, block: int, step: int) -> None:
        """Says that the next epoch, of this block, begins with this step."""
        self._resume = (block, step)

    def train_dataloader(self) -> StepLoader:
        """The batches of one block of the schedule an epoch.

        Raises:
            ConfigError: If `set_steps` was not called.
        """
        if self._steps is None:
            raise ConfigError("FeatureDataModule.set_steps must be called before training, as MaskLearner does.")
        num_steps, is_whole_block = self._steps
        self._loader = StepLoader(
            take_block=self._take_block,
            begin=self._begin_epoch,
            num_steps=num_steps,
            is_whole_block=is_whole_block,
            partial=self.partial,
            seed=self.seed,
        )
        return self._loader

    def teardown(self, stage: str | None = None) -> None:
        """Ends the thread that reads ahead.

        Args:
            stage: not used.
        """
        if self._contents is not None:
            self._contents.queue.close()

    def on_exception(self, exception: BaseException) -> None:
        """Ends the thread that reads ahead, as Lightning does not call `teardown` after an error."""
        self.teardown()

    @property
    def _ready(self) -> _Contents:
        if self._contents is None:
            raise ConfigError("FeatureDataModule.setup must be called before its blocks are used.")
        return self._contents

    def _plan(self) -> _Contents:
        """Reads the footers and plans the blocks; needs no process group."""
        dataset = read_dataset(self.path, self.columns)
        row_group_rows = [file.row_group_rows for file in dataset.files]
        plan = plan_blocks(row_group_rows, block_by=self.block_by, block_size=self.block_size, seed=self.seed)
        plan_hash = hash_plan(
            files=[(file.name, file.num_bytes, file.row_group_rows) for file in dataset.files],
            columns={
                "id_column": self.columns.id_column,
                "quality_columns": self.columns.quality_columns,
                "feature_column": self.columns.feature_column,
            },
            options={
                "quality_scaling": self.quality_scaling,
                "block_by": self.block_by,
                "block_size": self.block_size,
                "seed": self.seed,
                "on_bad_row": self.on_bad_row,
            },
        )
        reader = BlockReader(dataset, quality_scaling=self.quality_scaling, on_bad_row=self.on_bad_row)
        return _Contents(dataset, plan, plan_hash, reader)

    def _scan(self, contents: _Contents) -> None:
        """Checks every row, the ranks taking the blocks in turn."""
        rank, world = rank_and_world()
        found: dict[int, BadRows] = {}
        unchecked = [index for index in contents.schedule if index not in contents.checked]
        with failing_together():
            if len(contents.plan) == 1 and unchecked:
                # Every rank needs the only block: read it once and keep it.
                block, found[0] = contents.reader.read(contents.plan[0], 0)
                contents.queue.put(block)
            else:
                num_listed = 0
                for index in unchecked[rank::world]:
                    found[index] = contents.reader.check(contents.plan[index], index)
                    # No more than all blocks together may list: this is sent to every rank.
                    del found[index].listed[MAX_LISTED - num_listed :]
                    num_listed += len(found[index].listed)
        for part in gather_objects(found):
            found.update(part)
        for index in sorted(found):
            contents.block_sizes[index] = contents.plan[index].num_rows - found[index].num_rows
            contents.bad_rows.add(found[index])
            contents.checked.add(index)
        if contents.bad_rows.num_rows and found and rank == 0:
            first = contents.bad_rows.listed[0]
            _log.warning(
                "data.on_bad_row: drop leaves out %d of %d rows; the first is row %d of %s: %s.",
                contents.bad_rows.num_rows,
                sum(contents.plan[index].num_rows for index in contents.checked),
                first.row,
                first.file,
                first.reason,
            )

    def _begin_epoch(self) -> tuple[int, int]:
        index = self.next_block
        if index is None:
            raise ConfigError(
                f"trainer.max_epochs asks for more than the {len(self._ready.schedule)} blocks left; leave it unset."
            )
        self._epoch += 1
        block, step = self._resume or (index, 0)
        self._resume = None
        return index, step if block == index else 0

    def _take_block(self, index: int) -> Block:
        """The block, or on every rank the error that any rank met; the next one is read meanwhile."""
        block: Block | None = None
        with failing_together():
            block = self._ready.queue.take(index)
        assert block is not None
        self._warn_of_quality(block)
        return block

    def _warn_of_quality(self, block: Block) -> None:
        if rank_and_world()[0] > 0 or self._has_warned:
            return
        quality_N, scaled_N = block.quality_N.numpy(), block.scaled_quality_N.numpy()
        warning = quality_warning(quality_N, scaled_N, block=block.index, scaling=self.quality_scaling)
        if warning is not None:
            self._has_warned = True
            warnings.warn(warning, stacklevel=2)


class _Contents:
    """What `setup` finds out.

    Attributes:
        dataset: files and columns.
        plan: the blocks.
        plan_hash: see `hash_plan`.
        reader: reads them.
        queue: hands them out.
        block_sizes: rows of each, without those dropped.
        schedule: blocks that this group of ranks is to solve.
        checked: blocks whose rows have been read and checked.
        bad_rows: rows dropped.
    """

    def __init__(self, dataset: Dataset, plan: list[BlockPlan], plan_hash: str, reader: BlockReader) -> None:
        self.dataset = dataset
        self.plan = plan
        self.plan_hash = plan_hash
        self.reader = reader
        self.queue = BlockQueue(lambda index: reader.read(plan[index], index)[0], self._follower)
        self.schedule: list[int] = []
        self.checked: set[int] = set()
        self.block_sizes = [block_plan.num_rows for block_plan in plan]
        self.bad_rows = BadRows()

    def _follower(self, index: int) -> int | None:
        """The block that comes after one in the schedule."""
        position = self.schedule.index(index) + 1
        return self.schedule[position] if position < len(self.schedule) else None


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:  # noqa: ANN401
    if value not in choices:
        raise ConfigError(f"data.{name} must be one of {', '.join(choices)}, got {value!r}.")


def _check_weights(quality_columns: dict[str, float]) -> None:
    if not quality_columns:
        raise ConfigError("data.quality_columns must name at least one column, got {}.")
    for name, weight in quality_columns.items():
        if not math.isfinite(weight):
            raise ConfigError(f"data.quality_columns: the weight of {name!r} must be finite, got {weight}.")


def _check_same_plan(plan_hashes: list[str]) -> None:
    for rank, plan_hash in enumerate(plan_hashes):
        if plan_hash != plan_hashes[0]:
            error = DataFileError(
                f"data.path: rank {rank} sees other files than rank 0 does (plan {plan_hash[:12]} against "
                f"{plan_hashes[0][:12]}); all nodes must see the same files under the same names."
            )
            error.is_on_all_ranks = True
            raise error
