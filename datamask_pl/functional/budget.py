"""How much a mask may keep: ratios as the user sets them, the arithmetic of their rounding, and what a budget can do.

`BudgetSpec` holds the options. A `Budget` is the set of masks that they allow of given samples, and the policy over
these masks; `fixed_size.FixedSize` and `constraint.Constrained` are the two there are.

Shapes: N samples, R masks, C rollouts of a chunk, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

from datamask_pl.errors import BudgetError
from datamask_pl.functional.bound import LinearMaximum
from datamask_pl.functional.values import GroupBudget

# Applies a function to every slice of the rows and stacks the results: (number of slices, ...).
OverSlices = Callable[[Callable[[slice], Tensor]], Tensor]


def in_one_slice(part: Callable[[slice], Tensor]) -> Tensor:
    """All rows as one slice: the `OverSlices` of one process."""
    return part(slice(None))[None]


class Rollouts(Protocol):
    """Masks drawn from the policy, a chunk of the rollouts of a step."""

    def masks(self) -> Tensor:
        """The masks: bool (C, N)."""

    def scores(self, slopes_N: Tensor | None, *, num_rollouts: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Scores of some rollouts at a time, as many as a CPU's caches hold.

        Args:
            slopes_N: float64 (N,), the linear part of the rewards, or None.
            num_rollouts: of all chunks.

        Yields:
            Positions in the chunk; their scores, float64 (positions, N), which may be overwritten; and the sum of the
            policy gradients of the linear part, float64 (N,), None without slopes or where it is not known.
        """


class Budget(Protocol):
    """The masks that may be chosen, and the policies over them."""

    @property
    def num_samples(self) -> int:
        """N."""

    @property
    def typical_size(self) -> int:
        """Samples of a mask: exact where `is_size_fixed`, else about the number that the budget pays for."""

    @property
    def is_size_fixed(self) -> bool:
        """True if all masks have the same number of samples; False where samples have costs."""

    @property
    def can_keep_any(self) -> bool:
        """False if every sample is always dropped, as in a random part of a block."""

    @property
    def max_drawn(self) -> int:
        """The most samples that a rollout can draw."""

    def expected_size(self, p_N: Tensor) -> int | Tensor:
        """Expected number of kept samples, for inclusion probabilities that meet the budget."""

    def by_size(self, masks_RN: Tensor) -> list[tuple[slice | Tensor, int]]:
        """The masks in groups of equal size: an index into the masks, and their number of samples."""

    def probabilities(self, logits_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """Inclusion probabilities that meet the budget on average, where samples are kept independently: float64 (N,).

        Args:
            logits_N: float (N,), finite.
            over_slices: how sums over the rows are taken, and shared among ranks that all hold the logits.
        """

    def rollout_probabilities(self, logits_N: Tensor) -> Tensor:
        """Inclusion probabilities of `draw`, as far as they are known: float64 (N,)."""

    def ascent_direction(self, gradient_N: Tensor, p_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """Direction of mirror ascent on the logits, for a gradient in the inclusion probabilities: float64 (N,)."""

    def controlled_direction(
        self, logits_N: Tensor, p_N: Tensor, slopes_N: Tensor, *, linear_N: Tensor, rest_N: Tensor
    ) -> Tensor:
        """Direction of ascent from a control variate and the estimate of the rest: float64 (N,).

        Args:
            logits_N: float (N,).
            p_N: float64 (N,), from `rollout_probabilities`.
            slopes_N: float64 (N,), the linear part of the rewards.
            linear_N: float64 (N,), policy gradient of the linear part, where `Rollouts.scores` knows it.
            rest_N: float64 (N,), estimated policy gradient of the rest.
        """

    def entropy_share(self, p_N: Tensor) -> Tensor:
        """Share of the budget that is still undecided, sum p (1 - p) / sum p: scalar in [0, 1]."""

    def fill(self, scores_N: Tensor) -> Tensor:
        """The mask of the highest scores: bool (N,). Equal scores are taken in row order."""

    def draw(self, logits_N: Tensor, *, generators: list[torch.Generator]) -> Rollouts:
        """Draws one mask per generator, each of which is on the device of the logits."""

    def uniform_masks(self, num_masks: int, *, generator: torch.Generator, device: torch.device) -> Tensor:
        """Random masks, the same on any device: bool (R, N) on `device`, from a generator of the CPU."""

    def allows(self, mask_N: Tensor) -> bool:
        """True if the mask meets the budget."""

    def linear_maximum(
        self, slope_N: Tensor, *, sizes: tuple[int, int] | None = None, near: float = 0.0
    ) -> LinearMaximum:
        """The maximum of sum_i slope_i m_i over the masks that use the budget up, or over a relaxation of them.

        Args:
            slope_N: float64 (N,).
            sizes: limits of the number of kept samples, where that is free; see `with_sizes`, as for `near`.
            near: see above.
        """

    def size_range(self) -> tuple[int, int]:
        """The smallest and the largest number of samples of a mask that uses the budget up."""

    def nearest(self, target_N: Tensor) -> Tensor:
        """The nearest probabilities that meet the budget: float64 (N,)."""

    def part(self, rows: Tensor) -> Budget:
        """The budget of a random part of the samples, int64 rows, by the same options."""

    def spent(self, mask_N: Tensor) -> list[GroupBudget]:
        """The use of each group's budget; empty where only the number of samples is limited."""


def num_to_keep(select_ratio: float, num_samples: int) -> int:
    """Number of samples to keep: floor(select_ratio * num_samples + 1/2), exact in decimal.

    The ratio is taken as the decimal number that Python prints for it, so that 0.29 of 100 is 29 although the
    binary product is 28.999999999999996.

    Args:
        select_ratio: share to keep, in (0, 1].
        num_samples: size of the block, at least 1.

    Returns:
        k in [1, num_samples].

    Raises:
        BudgetError: If the ratio is outside (0, 1], or keeps no sample, or there is none.

    Example:
        >>> num_to_keep(0.29, 100), num_to_keep(0.1, 25), num_to_keep(1.0, 7)
        (29, 3, 7)
    """
    if not 0.0 < select_ratio <= 1.0:
        percent = f"; {select_ratio:g} % is {select_ratio / 100:g}" if 1.0 < select_ratio <= 100.0 else ""
        raise BudgetError(f"select_ratio must be above 0 and at most 1, got {select_ratio}{percent}.")
    if num_samples < 1:
        raise BudgetError(f"a block must have at least 1 sample, got {num_samples}; add input files.")
    num_selected = _round_half_up(Fraction(repr(float(select_ratio))) * num_samples)
    if num_selected == 0:
        # rounded up: the number in the message has to work
        needed = Context(prec=6, rounding=ROUND_CEILING).divide(Decimal(1), Decimal(2 * num_samples))
        raise BudgetError(
            f"select_ratio keeps 0 of {num_samples} samples ({select_ratio}); "
            f"raise it to at least {float(needed):g} or use larger blocks."
        )
    return num_selected


def share_of(fraction: float, num_samples: int) -> int:
    """Number of rows in a fraction of a block, rounded half up and at least 1.

    Example:
        >>> share_of(0.1, 12), share_of(0.1, 4)
        (1, 1)
    """
    return min(num_samples, max(1, _round_half_up(Fraction(repr(float(fraction))) * num_samples)))


def _round_half_up(value: Fraction) -> int:
    return int((value + Fraction(1, 2)) // 1)


@dataclass(frozen=True)
class Totals:
    """Numbers and costs of the samples of each group of a block, or of a part of one.

    Without groups there is one group with an empty name. Costs are numbers of samples where samples have no cost.

    Attributes:
        names: the groups.
        num_samples: of each group.
        costs: of all samples of each group.
        kept_costs: of the samples that are always kept.
        free_costs: of the samples that are neither always kept nor always dropped.
        lowest_costs: of the cheapest free sample; infinite where there is none.
        has_costs: True if samples have costs.
        cost_step: all costs are multiples of it.
    """

    names: tuple[str, ...]
    num_samples: tuple[int, ...]
    costs: tuple[float, ...]
    kept_costs: tuple[float, ...]
    free_costs: tuple[float, ...]
    lowest_costs: tuple[float, ...]
    has_costs: bool
    cost_step: float = 1.0

    def merged(self) -> Totals:
        """The same as one group."""
        return replace(
            self,
            names=("",),
            num_samples=(sum(self.num_samples),),
            costs=(sum(self.costs),),
            kept_costs=(sum(self.kept_costs),),
            free_costs=(sum(self.free_costs),),
            lowest_costs=(min(self.lowest_costs),),
        )


@dataclass(frozen=True)
class BudgetSpec:
    """The budget of every block, as the user sets it.

    Attributes:
        select_ratio: share of the samples, or of their total cost, in (0, 1].
        group_budget: `proportional` keeps this share of every group, `free` ignores groups, and ratios by name set
            another share, from 0 to 1, for the groups that they name.

    Raises:
        BudgetError: If a ratio is out of range, or the name of a group is neither text nor an integer.
    """

    select_ratio: float
    group_budget: str | Mapping[str, float] = "proportional"

    def __post_init__(self) -> None:
        num_to_keep(self.select_ratio, 2**62)
        if not isinstance(self.group_budget, str):
            # groups are compared as text, and YAML reads 0 as an integer
            named = {_group_name(name): ratio for name, ratio in self.group_budget.items()}
            object.__setattr__(self, "group_budget", named)
        if isinstance(self.group_budget, str) and self.group_budget not in ("proportional", "free"):
            raise BudgetError(
                f"group_budget must be proportional, free or ratios by name such as {{code: 0.3}}, got "
                f"{self.group_budget!r}."
            )
        for name, ratio in self.named_ratios.items():
            if not 0.0 <= ratio <= 1.0:
                percent = f"; {ratio:g} % is {ratio / 100:g}" if 1.0 < ratio <= 100.0 else ""
                raise BudgetError(f"group_budget: the ratio of {name!r} must be from 0 to 1, got {ratio}{percent}.")

    @property
    def named_ratios(self) -> Mapping[str, float]:
        """Ratios of groups that have one of their own."""
        return {} if isinstance(self.group_budget, str) else self.group_budget

    def ratio(self, name: str) -> float:
        """The share of a group that may be kept."""
        return float(self.named_ratios.get(name, self.select_ratio))


def _group_name(name: object) -> str:
    """The text of a group's name, as `group_budget` names it."""
    if isinstance(name, str):
        return name
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    raise BudgetError(
        f"group_budget: YAML reads the name of a group as {name!r}; put names such as 'no', 'on' and '1e3' in quotes."
    )


def apportion(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers near the shares that add up to their rounded sum: the largest remainders are rounded up.

    Args:
        shares: exact, not negative.

    Returns:
        One number per share, its floor or one more; among equal remainders the first ones are rounded up.

    Example:
        >>> apportion([Fraction(3, 2), Fraction(3, 2), Fraction(7, 5)])
        [2, 1, 1]
    """
    floors = [int(share // 1) for share in shares]
    num_up = _round_half_up(sum(shares, Fraction(0))) - sum(floors)
    by_remainder = sorted(range(len(shares)), key=lambda index: floors[index] - shares[index])
    for index in by_remainder[:num_up]:
        floors[index] += 1
    return floors


def group_budgets(spec: BudgetSpec, totals: Totals) -> list[float]:
    """Budget of each group of a block: its largest cost, or its number of samples.

    Numbers are rounded so that they add up to the whole. Costs are rounded down to a multiple of `totals.cost_step`.

    Args:
        spec: the shares.
        totals: of the block.

    Returns:
        float (G,).

    Raises:
        BudgetError: If nothing can be kept, the samples that are always kept exceed the budget, or the samples that
            remain without those that are always dropped are fewer than the budget.

    Example:
        >>> totals = Totals(("a", "b"), (10, 5), (10.0, 5.0), (0.0, 0.0), (10.0, 5.0), (1.0, 1.0), has_costs=False)
        >>> group_budgets(BudgetSpec(0.1), totals), group_budgets(BudgetSpec(0.1, {"a": 0.5}), totals)
        ([1.0, 1.0], [5.0, 1.0])
    """
    budgets = _unchecked_budgets(spec, totals)
    num_samples = sum(totals.num_samples)
    if not totals.has_costs and not sum(budgets):
        num_to_keep(spec.select_ratio, num_samples)  # its error says what would be enough
        raise BudgetError(f"group_budget keeps 0 of {num_samples} samples; raise a ratio or use larger blocks.")
    for index, (name, limit) in enumerate(zip(totals.names, budgets, strict=True)):
        of_group = f" of group {name!r}" if name else ""
        ratio, whole, kept = spec.ratio(name), totals.costs[index], totals.kept_costs[index]
        unit = "a cost" if totals.has_costs else "samples"
        if kept > limit:
            raise BudgetError(
                f"keep_ids keep {kept:.12g} of {whole:.12g} ({unit}){of_group}, more than the budget of {limit:.12g} "
                f"({ratio}); raise the ratio to at least {kept / whole:.6g} and a little, or keep fewer."
            )
        if not totals.has_costs and kept + totals.free_costs[index] < limit:
            raise BudgetError(
                f"drop_ids leave {kept + totals.free_costs[index]:.12g} of {whole:.12g} samples{of_group}, fewer than "
                f"the budget of {limit:.12g} ({ratio}); lower the ratio, or drop fewer."
            )
    if totals.has_costs and not _keeps_any(totals, budgets):
        raise BudgetError(
            f"select_ratio keeps 0 of {num_samples} samples: the budget is {sum(budgets):.12g} of a total cost of "
            f"{sum(totals.costs):.12g} ({spec.select_ratio}), the cheapest sample costs "
            f"{min(totals.lowest_costs):.12g}; raise it or use larger blocks."
        )
    return budgets


def part_budgets(spec: BudgetSpec, totals: Totals) -> list[float]:
    """`group_budgets` for a random part of a block that can be filled as a whole; never raises.

    Budgets grow to hold the samples that are always kept, shrink to the samples that are left, and keep at least one
    sample if one can be kept.
    """
    budgets = [max(*pair) for pair in zip(_unchecked_budgets(spec, totals), totals.kept_costs, strict=True)]
    if not totals.has_costs:
        most = [kept + free for kept, free in zip(totals.kept_costs, totals.free_costs, strict=True)]
        budgets = [min(*pair) for pair in zip(budgets, most, strict=True)]
    if not _keeps_any(totals, budgets):
        cheapest = min(range(len(budgets)), key=lambda index: totals.lowest_costs[index])
        if totals.lowest_costs[cheapest] < float("inf"):
            budgets[cheapest] = totals.lowest_costs[cheapest]
    return budgets


def _unchecked_budgets(spec: BudgetSpec, totals: Totals) -> list[float]:
    ratios = [Fraction(repr(spec.ratio(name))) for name in totals.names]
    if not totals.has_costs:
        return list(map(float, apportion([r * n for r, n in zip(ratios, totals.num_samples, strict=True)])))
    step = Fraction(totals.cost_step)
    shares = [ratio * Fraction(cost) for ratio, cost in zip(ratios, totals.costs, strict=True)]
    return [float(share // step * step) for share in shares]


def _keeps_any(totals: Totals, budgets: Sequence[float]) -> bool:
    lowest = zip(totals.lowest_costs, totals.kept_costs, budgets, strict=True)
    return any(kept > 0 or cost <= limit for cost, kept, limit in lowest)
