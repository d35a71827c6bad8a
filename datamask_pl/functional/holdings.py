"""Costs, groups and forced samples of a block: what its budget is computed from.

Shapes: N samples, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.budget import Totals

# Costs are multiples of a power of two of which float64 holds 2^51: sums are exact in any order.
COST_BITS = 51
KEEP, FREE, DROP = 1, 0, -1


@dataclass(frozen=True)
class Holdings:
    """Cost and group of every sample of a block, and which samples are always kept or dropped.

    Attributes:
        names: the groups, sorted; ("",) if there are none.
        group_N: int64 (N,), index into `names`.
        cost_N: float64 (N,), positive and finite, multiples of `cost_step`; None if every sample costs 1.
        forced_N: int8 (N,), 1 for samples that are always kept, -1 for those that are always dropped, 0 for free ones.
        cost_step: a power of two.
    """

    names: tuple[str, ...]
    group_N: Tensor
    cost_N: Tensor | None
    forced_N: Tensor
    cost_step: float = 1.0

    @classmethod
    def of(
        cls,
        num_samples: int,
        *,
        cost_N: Tensor | None = None,
        group_N: Tensor | None = None,
        names: tuple[str, ...] = ("",),
        forced_N: Tensor | None = None,
    ) -> Holdings:
        """Fills in the omitted columns. Costs are rounded up, by a part in 2^50 of their sum."""
        cost_step = 1.0
        if cost_N is not None:
            cost_N = cost_N.double()
            cost_step = 2.0 ** (math.ceil(math.log2(float(cost_N.sum()))) - COST_BITS + 1)
            cost_N = (cost_N / cost_step).ceil() * cost_step
        group_N = torch.zeros(num_samples, dtype=torch.int64) if group_N is None else group_N
        forced_N = torch.zeros(num_samples, dtype=torch.int8) if forced_N is None else forced_N
        return cls(names, group_N, cost_N, forced_N, cost_step)

    def part(self, rows: Tensor) -> Holdings:
        """The holdings of some rows."""
        cost_M = None if self.cost_N is None else self.cost_N[rows]
        return Holdings(self.names, self.group_N[rows], cost_M, self.forced_N[rows], self.cost_step)

    def without_groups(self) -> Holdings:
        """All samples as one group."""
        return Holdings(("",), torch.zeros_like(self.group_N), self.cost_N, self.forced_N, self.cost_step)

    def to(self, device: torch.device) -> Holdings:
        """Copies to a device."""
        cost_N = None if self.cost_N is None else self.cost_N.to(device)
        return Holdings(self.names, self.group_N.to(device), cost_N, self.forced_N.to(device), self.cost_step)

    def sums(self, values_N: Tensor) -> list[float]:
        """Sum over each group, of numbers whose sums are exact in float64."""
        return torch.bincount(self.group_N, weights=values_N, minlength=len(self.names)).tolist()

    def totals(self) -> Totals:
        """Numbers and costs by group."""
        ones_N = torch.ones(self.group_N.numel(), dtype=torch.float64, device=self.group_N.device)
        cost_N = ones_N if self.cost_N is None else self.cost_N
        lowest_G = torch.full((len(self.names),), torch.inf, dtype=torch.float64, device=cost_N.device)
        is_free_N = self.forced_N == FREE
        lowest_G.scatter_reduce_(0, self.group_N[is_free_N], cost_N[is_free_N], "amin")
        return Totals(
            names=self.names,
            num_samples=tuple(map(int, self.sums(ones_N))),
            costs=tuple(self.sums(cost_N)),
            kept_costs=tuple(self.sums(cost_N * (self.forced_N == KEEP))),
            free_costs=tuple(self.sums(cost_N * is_free_N)),
            lowest_costs=tuple(lowest_G.tolist()),
            has_costs=self.cost_N is not None,
            cost_step=self.cost_step,
        )
