"""What a mask may keep: a number or a cost in each group, and samples that are kept or left out in any case.

One form for all: what a mask keeps of group g may cost B_g. A sample costs 1 where nothing else is said, and a block
without groups is one group. Without costs the budgets are kept exactly, with costs they are never exceeded, and no
sample that is left out would still fit where samples are taken in the order of a score.

Shapes: N samples, F free samples (neither kept nor left out in any case) sorted by group, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.budget import BudgetRule, Totals, group_budgets, part_budgets
from datamask_pl.functional.multilinear import NEGLIGIBLE

MAX_NEWTON_STEPS = 100
RELATIVE_TOLERANCE = 1e-10
# Costs are multiples of a power of two of which float64 holds 2^51: sums are exact in any order.
COST_BITS = 51
KEPT, FREE, LEFT_OUT = 1, 0, -1


@dataclass(frozen=True)
class Holdings:
    """Cost, group and fate of every sample of a block, as they were read.

    Attributes:
        names: the groups, sorted; ("",) where there are none.
        group_N: int64 (N,), index into `names`.
        cost_N: float64 (N,), positive and finite, multiples of `cost_step`; None if every sample costs 1.
        fate_N: int8 (N,), KEPT, FREE or LEFT_OUT.
        cost_step: a power of two.
    """

    names: tuple[str, ...]
    group_N: Tensor
    cost_N: Tensor | None
    fate_N: Tensor
    cost_step: float = 1.0

    @classmethod
    def of(
        cls,
        num_samples: int,
        *,
        cost_N: Tensor | None = None,
        group_N: Tensor | None = None,
        names: tuple[str, ...] = ("",),
        fate_N: Tensor | None = None,
    ) -> Holdings:
        """What is given of a block, and the rest filled in. Costs are rounded up, by a part in 2^50 of their sum."""
        cost_step = 1.0
        if cost_N is not None:
            cost_N = cost_N.double()
            cost_step = 2.0 ** (math.ceil(math.log2(float(cost_N.sum()))) - COST_BITS + 1)
            cost_N = (cost_N / cost_step).ceil() * cost_step
        group_N = torch.zeros(num_samples, dtype=torch.int64) if group_N is None else group_N
        fate_N = torch.zeros(num_samples, dtype=torch.int8) if fate_N is None else fate_N
        return cls(names, group_N, cost_N, fate_N, cost_step)

    def part(self, rows: Tensor) -> Holdings:
        """Those of some rows."""
        cost_M = None if self.cost_N is None else self.cost_N[rows]
        return Holdings(self.names, self.group_N[rows], cost_M, self.fate_N[rows], self.cost_step)

    def without_groups(self) -> Holdings:
        """The same, as one group."""
        return Holdings(("",), torch.zeros_like(self.group_N), self.cost_N, self.fate_N, self.cost_step)

    def to(self, device: torch.device) -> Holdings:
        """The same on a device."""
        cost_N = None if self.cost_N is None else self.cost_N.to(device)
        return Holdings(self.names, self.group_N.to(device), cost_N, self.fate_N.to(device), self.cost_step)

    def sums(self, values_N: Tensor) -> list[float]:
        """Sum over each group of numbers that float64 adds up exactly."""
        return torch.bincount(self.group_N, weights=values_N, minlength=len(self.names)).tolist()

    def totals(self) -> Totals:
        """Numbers and costs by group."""
        ones_N = torch.ones(self.group_N.numel(), dtype=torch.float64, device=self.group_N.device)
        cost_N = ones_N if self.cost_N is None else self.cost_N
        lowest_G = torch.full((len(self.names),), torch.inf, dtype=torch.float64, device=cost_N.device)
        is_free_N = self.fate_N == FREE
        lowest_G.scatter_reduce_(0, self.group_N[is_free_N], cost_N[is_free_N], "amin")
        return Totals(
            names=self.names,
            num_samples=tuple(map(int, self.sums(ones_N))),
            costs=tuple(self.sums(cost_N)),
            kept_costs=tuple(self.sums(cost_N * (self.fate_N == KEPT))),
            free_costs=tuple(self.sums(cost_N * is_free_N)),
            lowest_costs=tuple(lowest_G.tolist()),
            has_costs=self.cost_N is not None,
            cost_step=self.cost_step,
        )


class Constraint:
    """The masks that are allowed, and the policies over them.

    Args:
        holdings: of the samples, on the device where everything is computed.
        rule: how much may be kept.
        is_part: True for a random part of a block, whose budgets give way where they cannot be met.

    Raises:
        BudgetError: If the rule cannot be met by a block.
    """

    def __init__(self, holdings: Holdings, rule: BudgetRule, *, is_part: bool = False) -> None:
        self.rule = rule
        self.given = holdings
        self.holdings = holdings.without_groups() if rule.group_budget == "free" else holdings
        holdings = self.holdings
        self.totals = totals = holdings.totals()
        find = part_budgets if is_part else group_budgets
        self.budgets = find(rule, totals)
        self.has_costs = holdings.cost_N is not None
        self.num_samples = holdings.group_N.numel()
        share = sum(self.budgets) / sum(totals.costs)
        self.typical_size = max(1, round(self.num_samples * share)) if self.has_costs else int(sum(self.budgets))
        free = (holdings.fate_N == FREE).nonzero().squeeze(1)
        self.rows_F = free[holdings.group_N[free].argsort(stable=True)]
        self.group_F = holdings.group_N[self.rows_F]
        self.length_G = torch.bincount(self.group_F, minlength=len(holdings.names))
        self.lengths: list[int] = self.length_G.tolist()
        ones_F = torch.ones(self.rows_F.numel(), dtype=torch.float64, device=free.device)
        self.cost_F = ones_F if holdings.cost_N is None else holdings.cost_N[self.rows_F]
        rooms = [limit - kept for limit, kept in zip(self.budgets, totals.kept_costs, strict=True)]
        self.room_G = torch.tensor(rooms, dtype=torch.float64, device=free.device)
        self._free_cost_G = torch.tensor(totals.free_costs, dtype=torch.float64, device=free.device)

    def part(self, rows: Tensor) -> Constraint:
        """The same rule for a random part of the block."""
        return Constraint(self.holdings.part(rows), self.rule, is_part=True)

    def kept(self) -> Tensor:
        """The mask of what is kept in any case: bool (N,)."""
        return self.holdings.fate_N == KEPT

    def fill(self, scores_N: Tensor, *, start_N: Tensor | None = None) -> Tensor:
        """Takes free samples in the order of their scores, each that still fits.

        Args:
            scores_N: float (N,), not NaN; equal ones are taken in row order.
            start_N: bool (N,), an allowed mask to add to; that of what is kept in any case by default.

        Returns:
            bool (N,).
        """
        mask_N = self.kept() if start_N is None else start_N.clone()
        room_G = self.room_G if start_N is None else self.room_left(mask_N)
        among = None
        if start_N is not None:
            among = (~mask_N[self.rows_F] & (self.cost_F <= room_G[self.group_F])).nonzero().squeeze(1)
        mask_N[self.rows_F[self._take(self.by_score(scores_N, among=among), room_G)]] = True
        return mask_N

    def by_score(self, scores_N: Tensor, *, among: Tensor | None = None) -> Tensor:
        """Positions in `rows_F`, or some of them in ascending order, by group, and then from the highest score down."""
        scores = scores_N[self.rows_F if among is None else self.rows_F[among]]
        # rows in ascending order within a group: a stable sort takes equal ones in row order
        order = scores.argsort(descending=True, stable=True)
        order = order if among is None else among[order]
        return order if self.room_G.numel() == 1 else order[self.group_F[order].argsort(stable=True)]

    def _take(self, waiting: Tensor, room_G: Tensor) -> Tensor:
        """Which positions are taken, each group in the given order, skipping what does not fit; in that order."""
        order, room_G = waiting, room_G.clone()
        is_taken_F = torch.zeros_like(self.cost_F, dtype=torch.bool)
        while True:
            waiting = waiting[self.cost_F[waiting] <= room_G[self.group_F[waiting]]]
            if waiting.numel() == 0:
                return order[is_taken_F[order]]
            cost, group = self.cost_F[waiting], self.group_F[waiting]
            total = cost.cumsum(0)
            is_first = torch.ones_like(group, dtype=torch.bool)
            is_first[1:] = group[1:] != group[:-1]
            # what the groups before add up to: never less than before, as costs are positive
            before = torch.where(is_first, total - cost, 0.0).cummax(0).values
            fits = total - before <= room_G[group]
            is_taken_F[waiting[fits]] = True
            room_G -= torch.bincount(group[fits], weights=cost[fits], minlength=room_G.numel())
            waiting = waiting[~fits]

    def room_left(self, mask_N: Tensor) -> Tensor:
        """What every group may still cost: float64 (G,); negative if the mask is not allowed."""
        is_kept_F = mask_N[self.rows_F]
        spent_G = torch.bincount(self.group_F[is_kept_F], weights=self.cost_F[is_kept_F], minlength=self.room_G.numel())
        return self.room_G - spent_G

    def allows(self, mask_N: Tensor) -> bool:
        """True if the mask keeps the constraint: what must be, nothing that must not be, and the budget."""
        fate_N, room_G = self.holdings.fate_N, self.room_left(mask_N)
        is_fate_kept = bool(mask_N[fate_N == KEPT].all()) and not bool(mask_N[fate_N == LEFT_OUT].any())
        return is_fate_kept and bool((room_G >= 0).all() if self.has_costs else (room_G == 0).all())

    def sums(self, values_F: Tensor) -> Tensor:
        """Sum over each group, the same bits each time: (G,)."""
        return torch.segment_reduce(values_F, "sum", lengths=self.length_G, initial=0.0)

    def probabilities(self, logits_N: Tensor) -> Tensor:
        """Probability of keeping each sample: sigmoid(logit - threshold of its group), such that budgets are met.

        Args:
            logits_N: float (N,), finite.

        Returns:
            float64 (N,); the expected cost of every group is its budget, or all of it where that is less.
        """
        logits_F = logits_N[self.rows_F].double()
        threshold_G = self._thresholds(logits_F)
        p_N = self.kept().double()
        p_F = torch.sigmoid(logits_F - threshold_G[self.group_F])
        p_N[self.rows_F] = p_F.masked_fill_(p_F < NEGLIGIBLE, 0.0)
        return p_N

    def _thresholds(self, logits_F: Tensor) -> Tensor:
        """Safeguarded Newton for all groups at once: float64 (G,), infinite where nothing or everything is kept."""
        is_open_G = (self.room_G > 0) & (self.room_G < self._free_cost_G)
        uniform_G = torch.where(is_open_G, self.room_G / self._free_cost_G, 0.5).logit()
        low_G, high_G = torch.full_like(self.room_G, torch.inf), torch.full_like(self.room_G, -torch.inf)
        low_G = low_G.scatter_reduce(0, self.group_F, logits_F, "amin") - uniform_G
        high_G = high_G.scatter_reduce(0, self.group_F, logits_F, "amax") - uniform_G
        threshold_G = torch.where(is_open_G, (low_G + high_G) / 2, 0.0)
        for _ in range(MAX_NEWTON_STEPS):
            p_F = torch.sigmoid(logits_F - threshold_G[self.group_F])
            excess_G = self.sums(self.cost_F * p_F) - self.room_G
            is_done_G = (excess_G.abs() <= RELATIVE_TOLERANCE * self.room_G) | (low_G == high_G) | ~is_open_G
            if bool(is_done_G.all()):
                break
            low_G = torch.where(excess_G > 0, threshold_G, low_G)
            high_G = torch.where(excess_G > 0, high_G, threshold_G)
            slope_G = self.sums(self.cost_F * p_F * (1 - p_F))
            newton_G = threshold_G + excess_G / slope_G
            is_inside_G = (newton_G > low_G) & (newton_G < high_G)  # False for NaN
            moved_G = torch.where(is_inside_G, newton_G, (low_G + high_G) / 2)
            threshold_G = torch.where(is_done_G, threshold_G, moved_G)
        return torch.where(is_open_G, threshold_G, torch.where(self.room_G > 0, -torch.inf, torch.inf))

    def ascent_direction(self, gradient_N: Tensor, p_N: Tensor) -> Tensor:
        """Direction of mirror ascent on the logits that keeps every budget to first order.

        The entropy counts a sample as many times as it costs, sum c_i H(p_i), so that the step of
        largest <g, p> - distance / eta under sum c_i p_i = B is logit_i + eta (g_i / c_i - lambda), and restoring the
        budget is one threshold for all. lambda = sum p (1 - p) g / sum c p (1 - p), of each group.

        Without costs the root mean square over the free samples is 1, as without a constraint. With costs a few cheap
        samples have the largest g / c, and most are settled early: there the square is weighted by c p (1 - p), the
        curvature of the entropy, and it is the undecided samples that move by 1.

        Args:
            gradient_N: float64 (N,), dF/dp.
            p_N: float64 (N,), inclusion probabilities.

        Returns:
            float64 (N,). Samples that are not free move as well, so that their logits say what they are worth.
        """
        gradient_F, p_F = gradient_N[self.rows_F], p_N[self.rows_F]
        variance_F = p_F * (1 - p_F)
        total_G = self.sums(self.cost_F * variance_F)
        mean_G = self.sums(gradient_F) / self._free_cost_G
        center_G = torch.where(total_G > 0, self.sums(variance_F * gradient_F) / total_G, mean_G)
        # a group of which nothing is free has no center
        center_G = center_G.nan_to_num()
        cost_N = self.holdings.cost_N
        per_cost_N = gradient_N if cost_N is None else gradient_N / cost_N
        centered_N = per_cost_N - center_G[self.holdings.group_N]
        weight_F = self.cost_F * variance_F if self.has_costs else self.cost_F
        rms = ((weight_F * centered_N[self.rows_F].square()).sum() / weight_F.sum()).sqrt()
        # below this the differences are the rounding of equal gradients
        if not rms > 1e-12 * per_cost_N.abs().max():
            return torch.zeros_like(centered_N)
        return centered_N / rms
