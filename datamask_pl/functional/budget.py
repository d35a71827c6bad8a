"""How many samples a ratio keeps, of a block or of each of its groups, or what they may cost.

Shapes: G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction

from datamask_pl.errors import BudgetError


def budget(select_ratio: float, num_samples: int) -> int:
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
        >>> budget(0.29, 100), budget(0.1, 25), budget(1.0, 7)
        (29, 3, 7)
    """
    if not 0.0 < select_ratio <= 1.0:
        raise BudgetError(f"select_ratio must be above 0 and at most 1, got {select_ratio}.")
    if num_samples < 1:
        raise BudgetError(f"a block must have at least 1 sample, got {num_samples}; give longer input.")
    num_selected = _round_half_up(Fraction(repr(float(select_ratio))) * num_samples)
    if num_selected == 0:
        # rounded up: the number in the message has to work
        needed = Context(prec=6, rounding=ROUND_CEILING).divide(Decimal(1), Decimal(2 * num_samples))
        raise BudgetError(
            f"select_ratio keeps 0 of {num_samples} samples ({select_ratio}); "
            f"raise it to at least {float(needed):g} or give larger blocks."
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
    """What a block, or a part of one, holds of each group. Without groups it is one group without a name.

    Costs are numbers of samples where samples have no cost.

    Attributes:
        names: the groups.
        num_samples: of each group.
        costs: of all samples of each group.
        kept_costs: of those that are kept in any case.
        free_costs: of those that are neither kept nor left out in any case.
        lowest_costs: of the cheapest free sample; infinite where there is none.
        has_costs: True if samples have costs.
        cost_step: what all costs are multiples of.
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
class BudgetRule:
    """How much of every block may be kept.

    Attributes:
        select_ratio: share of the samples, or of their total cost, in (0, 1].
        group_budget: `proportional` gives every group this share of its own, `free` does not look at groups, and
            ratios by name give the groups that they name another share, from 0 to 1.

    Raises:
        BudgetError: If a ratio is out of range.
    """

    select_ratio: float
    group_budget: str | Mapping[str, float] = "proportional"

    def __post_init__(self) -> None:
        budget(self.select_ratio, 2**62)
        if isinstance(self.group_budget, str) and self.group_budget not in ("proportional", "free"):
            raise BudgetError(
                f"group_budget must be proportional, free or ratios by name such as {{code: 0.3}}, got "
                f"{self.group_budget!r}."
            )
        for name, ratio in self.named_ratios.items():
            if not 0.0 <= ratio <= 1.0:
                raise BudgetError(f"group_budget: the ratio of {name!r} must be from 0 to 1, got {ratio}.")

    @property
    def named_ratios(self) -> Mapping[str, float]:
        """Ratios of groups that have one of their own."""
        return {} if isinstance(self.group_budget, str) else self.group_budget

    def ratio(self, name: str) -> float:
        """The share of a group that may be kept."""
        return float(self.named_ratios.get(name, self.select_ratio))


def apportion(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers near the shares that add up to their rounded sum: the largest remainders are rounded up.

    Args:
        shares: exact, not negative.

    Returns:
        One number a share, its floor or one more; of equal remainders the first come first.

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


def group_budgets(rule: BudgetRule, totals: Totals) -> list[float]:
    """What each group of a block may cost, or how many samples it keeps.

    Numbers are rounded so that they add up to the whole. Costs are rounded down to a multiple of `totals.cost_step`.

    Args:
        rule: the shares.
        totals: of the block.

    Returns:
        float (G,).

    Raises:
        BudgetError: If nothing can be kept, or samples that are kept in any case exceed the budget, or what is left
            after others are left out does not fill a number.

    Example:
        >>> totals = Totals(("a", "b"), (10, 5), (10.0, 5.0), (0.0, 0.0), (10.0, 5.0), (1.0, 1.0), has_costs=False)
        >>> group_budgets(BudgetRule(0.1), totals), group_budgets(BudgetRule(0.1, {"a": 0.5}), totals)
        ([1.0, 1.0], [5.0, 1.0])
    """
    budgets = _unchecked_budgets(rule, totals)
    num_samples = sum(totals.num_samples)
    if not totals.has_costs and not sum(budgets):
        budget(rule.select_ratio, num_samples)  # its error says what would be enough
        raise BudgetError(f"group_budget keeps 0 of {num_samples} samples; raise a ratio or give larger blocks.")
    for index, (name, limit) in enumerate(zip(totals.names, budgets, strict=True)):
        of_group = f" of group {name!r}" if name else ""
        ratio, whole, kept = rule.ratio(name), totals.costs[index], totals.kept_costs[index]
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
            f"{sum(totals.costs):.12g} ({rule.select_ratio}), the cheapest sample costs "
            f"{min(totals.lowest_costs):.12g}; raise it or give larger blocks."
        )
    return budgets


def part_budgets(rule: BudgetRule, totals: Totals) -> list[float]:
    """The same for a random part of a block that can be filled as a whole: budgets give way, and never fail.

    What is kept in any case fits, what is left out is not missed, and at least one sample is kept if one can be.
    """
    budgets = [max(*pair) for pair in zip(_unchecked_budgets(rule, totals), totals.kept_costs, strict=True)]
    if not totals.has_costs:
        most = [kept + free for kept, free in zip(totals.kept_costs, totals.free_costs, strict=True)]
        budgets = [min(*pair) for pair in zip(budgets, most, strict=True)]
    if not _keeps_any(totals, budgets):
        cheapest = min(range(len(budgets)), key=lambda index: totals.lowest_costs[index])
        if totals.lowest_costs[cheapest] < float("inf"):
            budgets[cheapest] = totals.lowest_costs[cheapest]
    return budgets


def _unchecked_budgets(rule: BudgetRule, totals: Totals) -> list[float]:
    ratios = [Fraction(repr(rule.ratio(name))) for name in totals.names]
    if not totals.has_costs:
        return list(map(float, apportion([r * n for r, n in zip(ratios, totals.num_samples, strict=True)])))
    step = Fraction(totals.cost_step)
    shares = [ratio * Fraction(cost) for ratio, cost in zip(ratios, totals.costs, strict=True)]
    return [float(share // step * step) for share in shares]


def _keeps_any(totals: Totals, budgets: Sequence[float]) -> bool:
    lowest = zip(totals.lowest_costs, totals.kept_costs, budgets, strict=True)
    return any(kept > 0 or cost <= limit for cost, kept, limit in lowest)
