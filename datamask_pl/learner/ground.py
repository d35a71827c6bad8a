"""From the blocks of a data module to ground sets with their budgets.

Shapes: N samples of the block, M samples of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from datamask_pl.data.types import Block, BlockSource
from datamask_pl.distributed.collectives import RankGroup, raise_on_all_ranks
from datamask_pl.errors import BudgetError, ConfigError, warn
from datamask_pl.functional.budget import Budget, BudgetSpec, Totals, group_budgets, num_to_keep
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.device import fits, move
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.learner.options import check_step_budget
from datamask_pl.objectives.ground_set import GroundSet

# Quotas of all groups that add up to another share than select_ratio by more than this part of it are warned of.
OTHER_TOTAL = 0.01


def check_budgets(spec: BudgetSpec, source: BlockSource, *, groups: set[str], step_share: float) -> None:
    """Checks that every block's budget can be met, as far as the data module knows its rows. Before any work.

    Args:
        spec: the options of the budget.
        source: of the blocks.
        groups: of the whole data set; not used where no group is named.
        step_share: share of a block in which the masks of a step are.

    Raises:
        BudgetError: If one cannot, or the ratio keeps nothing of a block.
        ConfigError: If groups are named that the data do not have.
    """
    if not source.has_groups and spec.group_budget != "proportional":
        raise ConfigError("model.group_budget needs groups; name the column that holds them in data.group_column.")
    if unknown := sorted(set(spec.named_ratios) - groups):
        listed = ", ".join(sorted(groups)[:20]) + (", ..." if len(groups) > 20 else "")
        raise ConfigError(f"model.group_budget names {', '.join(unknown)}; the groups of the data are: {listed}.")
    _warn_of_other_total(spec, [totals for totals in source.block_totals if totals is not None])
    for index, num_samples, totals in zip(source.schedule, source.block_sizes, source.block_totals, strict=True):
        if totals is not None:
            _check_block(spec, index, totals)
            continue
        num_to_keep(spec.select_ratio, num_samples)
        check_step_budget(spec.select_ratio, step_share, num_samples)


def _warn_of_other_total(spec: BudgetSpec, known: Sequence[Totals]) -> None:
    """Warns if every group has a ratio of its own, and together these keep another share than select_ratio."""
    groups = {name for totals in known for name in totals.names}
    if not groups or not groups <= set(spec.named_ratios):
        return
    whole = sum(sum(totals.costs) for totals in known)
    kept = sum(
        spec.ratio(name) * cost for totals in known for name, cost in zip(totals.names, totals.costs, strict=True)
    )
    if abs(kept / whole - spec.select_ratio) > OTHER_TOTAL * spec.select_ratio:
        warn(
            f"model.group_budget keeps {100 * kept / whole:.3g} % of the data, where model.select_ratio "
            f"({spec.select_ratio:g}) would keep {100 * spec.select_ratio:.3g} %: a ratio is the share of its group "
            "that is kept, not the share of the mask that the group makes up."
        )


def _check_block(spec: BudgetSpec, index: int, totals: Totals) -> None:
    try:
        group_budgets(spec, totals.merged() if spec.group_budget == "free" else totals)
    except BudgetError as error:
        raise BudgetError(f"block {index}: {error}") from error


def make_ground(
    block: Block, spec: BudgetSpec, *, num_slice_rows: int, ranks: RankGroup, device: torch.device
) -> GroundSet:
    """The whole block as a ground set, on the device if it fits there. Collective where there are limits.

    Raises:
        BudgetError: If the budget cannot be met; on all ranks.
    """
    budget: Budget = FixedSize(block.num_samples, num_to_keep(spec.select_ratio, block.num_samples), spec.select_ratio)
    if block.limits is not None:
        with raise_on_all_ranks():
            budget = Constrained(block.limits.holdings().to(device), spec)
    is_resident = fits(block.features_ND.numel() * block.features_ND.element_size(), device)
    return GroundSet.of(
        move(block.features_ND, device) if is_resident else block.features_ND,
        move(block.scaled_quality_N, device),
        budget,
        inv_norm_N=move(block.inv_norm_N, device),
        num_slice_rows=num_slice_rows,
        ranks=ranks,
        device=device,
    )


def part_of(ground: GroundSet, rows_M: Tensor, *, helpers: RankGroup) -> GroundSet:
    """Some rows, ascending, as a ground set that each rank evaluates for itself; made once if they are all."""
    if rows_M.numel() == ground.num_samples:
        # not kept by itself: a cycle would keep the block in memory
        shares = ground.shares
        return ground if shares.ranks.size == 1 else shares.cached("unshared", lambda: ground.unshared(helpers))
    return GroundSet.of(ground.features(rows_M), ground.quality_N[rows_M], ground.budget.part(rows_M), helpers=helpers)
