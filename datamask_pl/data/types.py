"""What flows from the data module to the learner. Both meet here and know nothing else of each other.

Shape suffixes: N samples of a block, M samples of a step's batch, D features, F ids.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.functional.budget import Totals
from datamask_pl.functional.device import move
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.values import GroupBudget, Values

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class Limits:
    """Costs, groups and forced ids of a block: what limits a budget, in addition to the number of samples.

    Attributes:
        cost_N: float64 (N,), positive, or None if samples have no cost.
        group_N: int64 (N,), index into `names`, or None if samples have no group.
        names: groups of the block, sorted.
        forced_N: int8 (N,), 1 for samples to keep, -1 for samples to drop, 0 for the others.
        forced_F: int64 (F,), which ids to keep or to drop the samples have, see `ForcedIds.find`.
    """

    cost_N: Tensor | None
    group_N: Tensor | None
    names: tuple[str, ...]
    forced_N: Tensor
    forced_F: NDArray[np.int64]

    def holdings(self) -> Holdings:
        """The same as the budget's rule takes it."""
        return Holdings.of(
            self.forced_N.numel(),
            cost_N=self.cost_N,
            group_N=self.group_N,
            names=self.names or ("",),
            forced_N=self.forced_N,
        )


@dataclass(frozen=True)
class Block:
    """One ground set, resident in memory: the rows that one mask is learned for.

    Attributes:
        index: position of the block in the plan, from 0.
        features_ND: float16 or float32 (N, D), as stored in the shards, not scaled.
        inv_norm_N: float32 (N,), 1 / L2 norm of each row; features_ND * inv_norm_N[:, None] has unit rows.
        quality_N: float32 (N,), the weighted sum of the quality columns, not scaled.
        scaled_quality_N: float32 (N,), quality_N after `quality_scaling`; what the objective sees.
        ids: pyarrow Array (N,), the id column in its exact type.
        source_file_N: int32 (N,), index into the plan's file list.
        source_row_N: int64 (N,), row number within that file, from 0.
        num_dropped: rows of the block's share of the files that `on_bad_row: drop` dropped.
        limits: cost, group and fate of the samples, where any of them is given.
    """

    index: int
    features_ND: Tensor
    inv_norm_N: Tensor
    quality_N: Tensor
    scaled_quality_N: Tensor
    ids: pa.Array
    source_file_N: Tensor
    source_row_N: Tensor
    num_dropped: int = 0
    limits: Limits | None = None

    @property
    def num_samples(self) -> int:
        """N, the number of samples in the block."""
        return self.features_ND.shape[0]


@dataclass(frozen=True)
class PartialBatch:
    """What one step reads: rows of a block. The features stay where the block is, on the learner's device if they fit.

    Attributes:
        block: the block the step belongs to.
        step: step within the block, from 0.
        num_slice_rows: rows to read at once where the step sees the whole block.
        rows_M: int64 (M,), ascending rows of the block that the step may draw and update, or None for all of them.
    """

    block: Block
    step: int
    num_slice_rows: int
    rows_M: Tensor | None = None

    def to(self, device: torch.device, **_: Any) -> PartialBatch:  # noqa: ANN401
        """Returns the batch with its row numbers on `device`."""
        return self if self.rows_M is None else replace(self, rows_M=move(self.rows_M, device))


class BlockSource(Protocol):
    """What the learner asks of a data module, so that neither imports the other."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole data set, this run's and others'. Valid after `setup`."""

    @property
    def schedule(self) -> list[int]:
        """Blocks that this group of ranks is to solve, in order, one an epoch. Valid after `setup`."""

    @property
    def next_block(self) -> int | None:
        """The block of the epoch that begins next, None after the last."""

    @property
    def block_sizes(self) -> list[int]:
        """Number of samples of every block of the schedule. Valid after `prepare`."""

    @property
    def block_totals(self) -> list[Totals | None]:
        """Totals by group of every block of the schedule; None where `prepare` has not read it, or did not need to."""

    @property
    def has_groups(self) -> bool:
        """True if samples have groups."""

    @property
    def seed(self) -> int:
        """Seed from which the slices, and the learner's rollouts, are drawn."""

    @property
    def plan_hash(self) -> str:
        """SHA-256 hex digest of what decides which row is in which block, and of the columns read."""

    @property
    def files(self) -> list[str]:
        """Names of the source files; `Block.source_file_N` is an index into it. Valid after `setup`."""

    @property
    def partial(self) -> float | None:
        """Share of a block that a step reads at once, None for the default of the kind of step."""

    def skip_blocks(self, finished: Collection[int]) -> None:
        """Takes finished blocks out of the schedule; between `setup` and `prepare`."""

    def prepare(self) -> None:
        """Reads every row of the schedule's blocks once, if rows are to be checked. Collective."""

    def find_groups(self) -> set[str]:
        """Names of all groups of the whole data set, also of blocks that other jobs solve. Collective."""

    def resume_at(self, block: int, step: int) -> None:
        """Says that the next epoch, of this block, begins with this step."""

    def set_steps(self, *, num_steps: int, is_whole_block: bool, default_partial: float) -> None:
        """Says how many batches a block yields, and whether each is the whole block or a random part of it.

        `default_partial` is the share of a random part where `partial` is None.
        """

    def set_reading(self, *, is_ahead: bool) -> None:
        """Says whether the next block is read while one is learned, or after it: memory is two blocks, or one."""

    def skip_rest_of_block(self) -> None:
        """Says that the block is settled: its remaining batches need not be drawn or read."""


@dataclass(frozen=True)
class BlockResult:
    """The mask learned for a block, on the host, with what it is compared to.

    Attributes:
        block: the block it was learned for.
        num_selected: samples kept; the budget, exactly, unless that is a cost.
        mask_N: bool (N,).
        logits_N: float32 (N,), log-odds of keeping, up to a constant of the block.
        probability_N: float32 (N,), inclusion probabilities at the end.
        mask: value of the mask.
        random: value of one random mask of the same budget.
        top_quality: value of the mask of the highest quality.
        scales: what each term was divided by.
        num_steps: steps taken.
        seconds: wall-clock time from the block's first step.
        budgets: what was kept of each group, where there are limits.
    """

    block: Block
    num_selected: int
    mask_N: Tensor
    logits_N: Tensor
    probability_N: Tensor
    mask: Values
    random: Values
    top_quality: Values
    scales: dict[str, float]
    num_steps: int
    seconds: float
    budgets: list[GroupBudget] = field(default_factory=list)


class Learner(Protocol):
    """What the callbacks ask of the learner, so that neither imports the other."""

    num_steps: int
    result: BlockResult | None

    @property
    def is_block_done(self) -> bool:
        """False if the run stops within the block."""

    def settings(self) -> dict[str, Any]:
        """Options that decide the mask, by name."""

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Takes over logits and state of the block that begins next."""

    def check_agreement(self, when: str) -> None:
        """Compares the logits of all ranks. Collective."""


def source_of(trainer: Trainer) -> BlockSource:
    """The data module of a trainer."""
    return cast(BlockSource, trainer.datamodule)  # type: ignore[attr-defined]  # set by Lightning's data connector


def learner_of(module: LightningModule) -> Learner:
    """The module that a trainer fits, as callbacks know it."""
    return cast(Learner, module)
