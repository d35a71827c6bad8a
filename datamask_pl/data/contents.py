"""The planned data of a run: files, blocks, their reader, and the results of checking them."""

from __future__ import annotations

from datamask_pl.data.forced_ids import describe_unmatched_ids
from datamask_pl.data.limits import Survey
from datamask_pl.data.loader import BlockQueue
from datamask_pl.data.plan import BlockPlan
from datamask_pl.data.reader import BlockReader
from datamask_pl.data.rows import BadRows
from datamask_pl.data.schema import Dataset


class Contents:
    """The files and blocks that `setup` has planned, and what checking them has found.

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
        surveys: what the rows of checked blocks add up to.
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
        self.surveys: dict[int, Survey] = {}

    def note(self, index: int, bad_rows: BadRows, survey: Survey) -> None:
        """Takes in what checking a block has found."""
        self.block_sizes[index] = self.plan[index].num_rows - bad_rows.num_rows
        self.bad_rows.add(bad_rows)
        self.surveys[index] = survey
        self.checked.add(index)

    def find_unmatched_ids(self) -> str | None:
        """A text that names ids of keep_ids and drop_ids that match no sample, if any, once all blocks were read."""
        forced = self.reader.forced
        if forced is None or len(self.checked) < len(self.plan):
            return None
        return describe_unmatched_ids(forced, (survey.forced_F for survey in self.surveys.values()), prefix="data.")

    def _follower(self, index: int) -> int | None:
        """The block that comes after one in the schedule."""
        position = self.schedule.index(index) + 1
        return self.schedule[position] if position < len(self.schedule) else None
