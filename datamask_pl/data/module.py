"""FeatureDataModule: parquet shards in, one block of samples an epoch out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from lightning.pytorch import LightningDataModule

from datamask_pl.data.contents import Contents
from datamask_pl.data.forced_ids import read_forced_ids
from datamask_pl.data.limits import Survey, find_group_names
from datamask_pl.data.loader import DEFAULT_PARTIAL, StepLoader
from datamask_pl.data.plan import BlockBy, deal_blocks, hash_plan, parse_shard, plan_blocks
from datamask_pl.data.reader import BlockReader, OnBadRow
from datamask_pl.data.rows import MAX_LISTED, BadRow, BadRows
from datamask_pl.data.scaling import QualityScaling, quality_warning
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.data.types import Block
from datamask_pl.distributed.collectives import RankGroup, gather_objects, raise_on_all_ranks
from datamask_pl.distributed.world import world
from datamask_pl.errors import ConfigError, DataFileError, check_choice, warn
from datamask_pl.functional.budget import Totals


class FeatureDataModule(LightningDataModule):
    """Reads ids, qualities and features from parquet files, block by block.

    A block is a set of rows that one mask is learned for, and one Lightning epoch. Memory is two blocks, whatever the
    size of the data set.

    Args:
        path: parquet files, directories, globs or fsspec URLs (s3://, hf://, gs://), one or a list. Their order is by
            name.
        id_column: column that identifies a sample, of any type but a nested one; written to the mask as it is.
        quality_columns: weight of each quality column, by name; the weighted sum is the quality of a sample.
            Default: {"quality_score": 1.0}.
        feature_column: column of vectors, a list of float16, float32 or float64; all of one length. They are scaled to
            unit L2 norm.
        cost_column: column of what keeping a sample costs, such as its number of tokens: numbers above 0. The budget is
            then model.select_ratio of the total cost of a block, which a mask does not exceed, whatever its number of
            samples.
        group_column: column of the group of a sample, such as its source or language: strings or integers. Every group
            gets a budget of its own, see model.group_budget.
        keep_ids: parquet files with the id column, or text files with one id per line, one or a list: samples to always
            keep. They count towards the budget.
        drop_ids: the same, of samples to always drop.
        quality_scaling: how quality is scaled within a block. `rank` gives each sample the share of the others that it
            is above, `minmax` stretches to [0, 1], `zscore` to mean 0 and standard deviation 1, `none` leaves it.
        block_size: largest number of rows of a block; blocks are made equal, to a row. Not used by `block_by: file`.
        block_by: `rows` cuts the rows in the order of the files, `row_groups_shuffled` shuffles the row groups of all
            files first, `file` makes every file a block.
        partial: fraction of the block that a step uses, in (0, 1]. Default: 1 with a control variate, otherwise 0.1.
            Steps over the whole block read it in slices of this size (default 16,384 rows).
        on_bad_row: what to do with a row whose quality or features are null, not finite, of the wrong length or zero.
            `error` stops, `drop` drops and lists it. The same goes for a cost that is null, not finite or not
            above 0, and a group that is null. A null id always stops.
        check_rows: reads all rows once before training, shared among the ranks, so that a bad row in the last block
            does not end a run after hours. Costs nothing if there is one block.
        shard: "i/n": this run takes every n-th block, from the i-th on, counted from 0. For jobs that share nothing but
            the folder of the mask.
        seed: decides the shuffle, the random parts and the rollouts; 0 <= seed < 2^63.

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
        cost_column: str | None = None,
        group_column: str | None = None,
        keep_ids: str | list[str] | None = None,
        drop_ids: str | list[str] | None = None,
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
        _check_choices(quality_scaling, block_by, on_bad_row)
        _check_values(block_size, partial, seed)
        if on_bad_row == "drop" and not check_rows:
            raise ConfigError(
                "data.check_rows: false cannot go with data.on_bad_row: drop, since the size of a block is not known "
                "until its rows are checked; leave check_rows at true."
            )
        self.path = path
        # float: 1 and 1.0 are the same weight, and give the same hash
        quality_weights = {name: float(weights[name]) for name in weights}
        self.columns = Columns(id_column, quality_weights, feature_column, cost_column, group_column)
        self.keep_ids = keep_ids
        self.drop_ids = drop_ids
        self.quality_scaling = quality_scaling
        self.block_size = block_size
        self.block_by = block_by
        self.partial = partial
        self.on_bad_row = on_bad_row
        self.check_rows = check_rows
        self.shard = parse_shard(shard)
        self._seed = seed
        self._contents: Contents | None = None
        self._steps: tuple[int, bool, float] | None = None
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
    def block_totals(self) -> list[Totals | None]:
        """Totals by group of every block of the schedule; None where `prepare` has not read it, or did not need to."""
        return [self._ready.surveys.get(index, Survey()).totals for index in self._ready.schedule]

    @property
    def has_groups(self) -> bool:
        """True if samples have groups."""
        return self.columns.group_column is not None

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

    def set_steps(self, *, num_steps: int, is_whole_block: bool, default_partial: float = DEFAULT_PARTIAL) -> None:
        """Says how many batches a block yields, and what each is; see `BlockSource.set_steps`."""
        self._steps = (num_steps, is_whole_block, default_partial)

    def set_reading(self, *, is_ahead: bool) -> None:
        """Says whether the next block is read while one is learned. Valid after `setup`."""
        self._ready.queue.is_ahead = is_ahead

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
            contents: Contents | None = None
            with raise_on_all_ranks():
                contents = self._plan()
            assert contents is not None
            _check_same_plan(gather_objects(contents.plan_hash))
            self._contents = contents
        group = world().group, world().num_groups
        self._ready.schedule = deal_blocks(len(self._ready.plan), shard=self.shard, group=group)
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

    def find_groups(self) -> set[str]:
        """Names of all groups of the whole data set, also of blocks that other jobs solve. Collective."""
        contents, column = self._ready, self.columns.group_column
        if column is None:
            return set()
        if len(contents.surveys) == len(contents.plan):
            totals = [survey.totals for survey in contents.surveys.values()]
            return {name for total in totals if total is not None for name in total.names}
        ranks, found = RankGroup.current(), set[str]()
        with raise_on_all_ranks():
            found = find_group_names(contents.dataset.files[ranks.rank :: ranks.size], column)
        return set().union(*gather_objects(found))

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
        num_steps, is_whole_block, default_partial = self._steps
        self._loader = StepLoader(
            take_block=self._take_block,
            begin=self._begin_epoch,
            num_steps=num_steps,
            is_whole_block=is_whole_block,
            partial=self.partial,
            default_partial=default_partial,
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
    def _ready(self) -> Contents:
        if self._contents is None:
            raise ConfigError("FeatureDataModule.setup must be called before its blocks are used.")
        return self._contents

    def _plan(self) -> Contents:
        """Reads the footers and plans the blocks; needs no process group."""
        dataset = read_dataset(self.path, self.columns)
        row_group_rows = [file.row_group_rows for file in dataset.files]
        plan = plan_blocks(row_group_rows, block_by=self.block_by, block_size=self.block_size, seed=self.seed)
        forced = read_forced_ids(
            self.keep_ids, self.drop_ids, id_column=self.columns.id_column, id_type=dataset.id_type, prefix="data."
        )
        limited_by = {"cost_column": self.columns.cost_column, "group_column": self.columns.group_column}
        plan_hash = hash_plan(
            files=[(file.name, file.num_bytes, file.row_group_rows) for file in dataset.files],
            columns={
                "id_column": self.columns.id_column,
                "quality_columns": self.columns.quality_columns,
                "feature_column": self.columns.feature_column,
                # options that are omitted leave no trace: old runs, before there were limits, keep their hash
                **{name: column for name, column in limited_by.items() if column is not None},
            },
            options={
                "quality_scaling": self.quality_scaling,
                "block_by": self.block_by,
                "block_size": self.block_size,
                "seed": self.seed,
                "on_bad_row": self.on_bad_row,
                **({} if forced is None else forced.digests()),
            },
        )
        reader = BlockReader(dataset, quality_scaling=self.quality_scaling, on_bad_row=self.on_bad_row, forced=forced)
        return Contents(dataset, plan, plan_hash, reader)

    def _scan(self, contents: Contents) -> None:
        """Checks every row, the ranks taking the blocks in turn."""
        ranks = RankGroup.current()
        found: dict[int, tuple[BadRows, Survey]] = {}
        unchecked = [index for index in contents.schedule if index not in contents.checked]
        with raise_on_all_ranks():
            if len(contents.plan) == 1 and unchecked:
                # Every rank needs the only block: read it once and keep it.
                block, bad_rows = contents.reader.read(contents.plan[0], 0)
                found[0] = bad_rows, Survey.of(block.limits)
                contents.queue.put(block)
            else:
                num_listed = 0
                for index in unchecked[ranks.rank :: ranks.size]:
                    found[index] = contents.reader.check(contents.plan[index], index)
                    # No more than all blocks together may list: this is sent to every rank.
                    listed = found[index][0].listed
                    del listed[MAX_LISTED - num_listed :]
                    num_listed += len(listed)
        for part in gather_objects(found):
            found.update(part)
        for index in sorted(found):
            contents.note(index, *found[index])
        if ranks.rank == 0 and found and (words := contents.find_unmatched_ids()):
            warn(words)
        if contents.bad_rows.num_rows and found and ranks.rank == 0:
            first = contents.bad_rows.listed[0]
            num_rows = sum(contents.plan[index].num_rows for index in contents.checked)
            warn(
                f"data.on_bad_row: dropped {contents.bad_rows.num_rows} of {num_rows} rows; the first is row "
                f"{first.row} of {first.file}: {first.reason}."
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
        with raise_on_all_ranks():
            block = self._ready.queue.take(index)
        assert block is not None
        self._warn_of_quality(block)
        return block

    def _warn_of_quality(self, block: Block) -> None:
        if RankGroup.current().rank > 0 or self._has_warned:
            return
        quality_N, scaled_N = block.quality_N.numpy(), block.scaled_quality_N.numpy()
        warning = quality_warning(quality_N, scaled_N, block=block.index, scaling=self.quality_scaling)
        if warning is not None:
            self._has_warned = True
            warn(warning)


def _check_same_plan(plan_hashes: list[str]) -> None:
    for rank, plan_hash in enumerate(plan_hashes):
        if plan_hash != plan_hashes[0]:
            error = DataFileError(
                f"data.path: rank {rank} sees other files than rank 0 does (plan {plan_hash[:12]} against "
                f"{plan_hashes[0][:12]}); all nodes must see the same files under the same names."
            )
            error.is_on_all_ranks = True
            raise error


def _check_choices(quality_scaling: str, block_by: str, on_bad_row: str) -> None:
    check_choice("data.quality_scaling", quality_scaling, get_args(QualityScaling))
    check_choice("data.block_by", block_by, get_args(BlockBy))
    check_choice("data.on_bad_row", on_bad_row, get_args(OnBadRow))


def _check_values(block_size: int, partial: float | None, seed: int) -> None:
    if block_size < 1:
        raise ConfigError(f"data.block_size must be at least 1, got {block_size}.")
    if partial is not None and not 0.0 < partial <= 1.0:
        raise ConfigError(f"data.partial must be above 0 and at most 1, got {partial}.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"data.seed must be at least 0 and below 2^63, got {seed}.")
