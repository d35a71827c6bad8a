"""The budget with quotas, costs and forced samples: the kept samples of group g may cost at most B_g.

A sample costs 1 if it has no cost, and a block without groups is one group. Without costs the budgets are met exactly.
With costs they are never exceeded, and no dropped sample would still fit where samples are taken by their score.

Rollouts are Plackett-Luce within the budget: in every group, samples are drawn one after the other from the softmax
over the samples that still fit. Taking samples in the order of Gumbel keys and skipping those that no longer fit draws
from this distribution: the room only shrinks, so a sample that does not fit never will, and the odds between the others
do not depend on it (Luce's choice axiom). The probability of a draw is then a product of softmaxes, each over the
samples that could have been drawn in that step, and so is its score. Samples that are always kept are not drawn and
have no score.

Shapes: N samples, F free samples (neither always kept nor always dropped) sorted by group, G groups, J free
samples of a group, K of them drawn.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from datamask_pl.functional.bound import LinearMaximum, largest_by_group, nearest_by_group, with_sizes
from datamask_pl.functional.budget import (
    BudgetSpec,
    OverSlices,
    group_budgets,
    in_one_slice,
    part_budgets,
)
from datamask_pl.functional.holdings import DROP, FREE, KEEP, Holdings
from datamask_pl.functional.multilinear import NEGLIGIBLE, entropy_share
from datamask_pl.functional.rollouts import control_variate
from datamask_pl.functional.rollouts.advantages import normalized
from datamask_pl.functional.rollouts.constrained import ConstrainedDraw, ConstrainedRollouts, gumbel_keys
from datamask_pl.functional.values import GroupBudget

MAX_NEWTON_STEPS = 100
RELATIVE_TOLERANCE = 1e-10


class Constrained:
    """A budget of costs or numbers by group, with samples that are always kept or dropped.

    Args:
        holdings: of the samples, on the device where everything is computed.
        spec: the options.
        is_part: True for a random part of a block, whose budgets give way where they cannot be met.

    Raises:
        BudgetError: If a block cannot meet the budget.
    """

    def __init__(self, holdings: Holdings, spec: BudgetSpec, *, is_part: bool = False) -> None:
        self.spec = spec
        self._grouped = holdings
        self.holdings = holdings.without_groups() if spec.group_budget == "free" else holdings
        holdings = self.holdings
        self.totals = totals = holdings.totals()
        self.budgets = (part_budgets if is_part else group_budgets)(spec, totals)
        self.has_costs = holdings.cost_N is not None
        self.num_samples = holdings.group_N.numel()
        share = sum(self.budgets) / sum(totals.costs)
        self.typical_size = max(1, round(self.num_samples * share)) if self.has_costs else int(sum(self.budgets))
        free = (holdings.forced_N == FREE).nonzero().squeeze(1)
        self.rows_F = free[holdings.group_N[free].argsort(stable=True)]
        self.group_F = holdings.group_N[self.rows_F]
        self.length_G = torch.bincount(self.group_F, minlength=len(holdings.names))
        self.lengths: list[int] = self.length_G.tolist()
        ones_F = torch.ones(self.rows_F.numel(), dtype=torch.float64, device=free.device)
        self.cost_F = ones_F if holdings.cost_N is None else holdings.cost_N[self.rows_F]
        rooms = [limit - kept for limit, kept in zip(self.budgets, totals.kept_costs, strict=True)]
        self.room_G = torch.tensor(rooms, dtype=torch.float64, device=free.device)
        self._free_cost_G = torch.tensor(totals.free_costs, dtype=torch.float64, device=free.device)

    # ---- sizes and parts

    @property
    def is_size_fixed(self) -> bool:
        """See `Budget.is_size_fixed`."""
        return not self.has_costs

    @property
    def can_keep_any(self) -> bool:
        """See `Budget.can_keep_any`."""
        return bool(self.rows_F.numel()) or any(self.totals.kept_costs)

    @property
    def max_drawn(self) -> int:
        """See `Budget.max_drawn`."""
        return self.num_samples

    def expected_size(self, p_N: Tensor) -> int | Tensor:
        """See `Budget.expected_size`."""
        return p_N.sum() if self.has_costs else self.typical_size

    def by_size(self, masks_RN: Tensor) -> list[tuple[slice | Tensor, int]]:
        """See `Budget.by_size`."""
        if not self.has_costs:
            return [(slice(None), self.typical_size)]
        sizes = masks_RN.sum(1)
        return [(sizes == size, size) for size in sorted(set(sizes.tolist()))]

    def part(self, rows: Tensor) -> Constrained:
        """See `Budget.part`."""
        return Constrained(self.holdings.part(rows), self.spec, is_part=True)

    def spent(self, mask_N: Tensor) -> list[GroupBudget]:
        """See `Budget.spent`; by the groups of the data also where they have no budgets of their own."""
        holdings = self._grouped
        is_limited = holdings is self.holdings
        totals = self.totals if is_limited else holdings.totals()
        budgets = self.budgets if is_limited else [None] * len(holdings.names)
        is_kept_N = mask_N.double()
        cost_N = is_kept_N if holdings.cost_N is None else is_kept_N * holdings.cost_N
        columns = (totals.names, totals.num_samples, holdings.sums(is_kept_N), totals.costs, budgets)
        return [
            GroupBudget(name, num_samples, int(kept), cost, limit, spent)
            for name, num_samples, kept, cost, limit, spent in zip(*columns, holdings.sums(cost_N), strict=True)
        ]

    # ---- masks

    def kept(self) -> Tensor:
        """The samples that are always kept: bool (N,)."""
        return self.holdings.forced_N == KEEP

    def fill(self, scores_N: Tensor, *, start_N: Tensor | None = None) -> Tensor:
        """Takes free samples in the order of their scores, each that still fits.

        Args:
            scores_N: float (N,), not NaN; equal ones are taken in row order.
            start_N: bool (N,), an allowed mask to add to; by default the samples that are always kept.

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
        """Which positions are taken, each group in the given order, skipping what does not fit; in that order.

        The same as, for each position p of `waiting`:
            if cost_F[p] <= room_G[group_F[p]]:
                take p
                room_G[group_F[p]] -= cost_F[p]
        but whole runs at once: each round takes, in every group, the longest prefix that fits.
        """
        order, room_G = waiting, room_G.clone()
        is_taken_F = torch.zeros_like(self.cost_F, dtype=torch.bool)
        while True:
            # 1. drop the positions that do not fit any more: the room only shrinks, so they never will
            waiting = waiting[self.cost_F[waiting] <= room_G[self.group_F[waiting]]]
            if waiting.numel() == 0:
                return order[is_taken_F[order]]
            # 2. running cost within each group: the total minus the total of the groups before
            cost, group = self.cost_F[waiting], self.group_F[waiting]
            total = cost.cumsum(0)
            is_first = torch.ones_like(group, dtype=torch.bool)
            is_first[1:] = group[1:] != group[:-1]
            # costs are positive, so the maximum so far is the total before the latest first position
            before = torch.where(is_first, total - cost, 0.0).cummax(0).values
            # 3. take the prefix that fits; its next position, which does not, is dropped by the next round at 1
            fits = total - before <= room_G[group]
            is_taken_F[waiting[fits]] = True
            room_G -= torch.bincount(group[fits], weights=cost[fits], minlength=room_G.numel())
            waiting = waiting[~fits]

    def room_left(self, mask_N: Tensor) -> Tensor:
        """Rest of each group's budget: float64 (G,); negative if the mask exceeds it."""
        is_kept_F = mask_N[self.rows_F]
        spent_G = torch.bincount(self.group_F[is_kept_F], weights=self.cost_F[is_kept_F], minlength=self.room_G.numel())
        return self.room_G - spent_G

    def allows(self, mask_N: Tensor) -> bool:
        """See `Budget.allows`; also False if a forced sample is not as it must be."""
        forced_N, room_G = self.holdings.forced_N, self.room_left(mask_N)
        is_forced_met = bool(mask_N[forced_N == KEEP].all()) and not bool(mask_N[forced_N == DROP].any())
        return is_forced_met and bool((room_G >= 0).all() if self.has_costs else (room_G == 0).all())

    def linear_maximum(
        self, slope_N: Tensor, *, sizes: tuple[int, int] | None = None, near: float = 0.0
    ) -> LinearMaximum:
        """See `Budget.linear_maximum`; a sample may be kept in part. Over masks to which no sample can be added."""
        if sizes is not None and self.has_costs:
            return with_sizes(self.linear_maximum, slope_N, sizes=sizes, near=near)
        slope_F = slope_N[self.rows_F]
        point_F, price_G = largest_by_group(slope_F, self.cost_F, self.room_G, self.length_G, least_G=self._least_G)
        point_N = self.kept().double()
        value = (slope_N * point_N).sum() + (slope_F * point_F).sum()
        point_N[self.rows_F] = point_F
        return LinearMaximum(value, point_N, price_G)

    @functools.cached_property
    def _least_G(self) -> Tensor:
        """The least that a mask spends to which no sample can be added: float64 (G,).

        If the J cheapest samples of a group fit, and not J + 1, every mask drops one of these J + 1, and has less room
        left than that costs.
        """
        if not self.has_costs:
            return self.room_G
        least_G = torch.minimum(self.room_G, self._free_cost_G)
        for group, cost_J in enumerate(torch.split(self.cost_F, self.lengths)):
            cheapest_J = cost_J.sort().values
            num_fitting = int((cheapest_J.cumsum(0) <= self.room_G[group]).sum())
            if num_fitting < len(cheapest_J):
                least_G[group] = (self.room_G[group] - cheapest_J[num_fitting]).clamp(min=0.0)
        return least_G

    def size_range(self) -> tuple[int, int]:
        """See `Budget.size_range`."""
        if not self.has_costs:
            return self.typical_size, self.typical_size
        ones_N = torch.ones(self.num_samples, dtype=torch.float64, device=self.cost_F.device)
        most, fewest = (float(self.linear_maximum(sign * ones_N).point_N.sum()) for sign in (1.0, -1.0))
        return max(math.ceil(fewest - 1e-6), 1), max(math.floor(most + 1e-6), 1)

    def nearest(self, target_N: Tensor) -> Tensor:
        """See `Budget.nearest`."""
        point_N = self.kept().double()
        point_N[self.rows_F] = nearest_by_group(target_N[self.rows_F], self.cost_F, self.room_G, self.length_G)
        return point_N

    def sums(self, values_F: Tensor) -> Tensor:
        """Sum over each group, the same bits each time: (G,)."""
        return torch.segment_reduce(values_F, "sum", lengths=self.length_G, initial=0.0)

    # ---- the policy that keeps samples independently

    def probabilities(self, logits_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """Probability of keeping each sample: sigmoid(logit - threshold of its group), such that budgets are met.

        Args:
            logits_N: float (N,), finite.
            over_slices: not used: every rank computes all of them.

        Returns:
            float64 (N,); the expected cost of every group is its budget, or its whole cost where that is less.
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

    def rollout_probabilities(self, logits_N: Tensor) -> Tensor:
        """See `Budget.rollout_probabilities`; those of the independent policy."""
        return self.probabilities(logits_N)

    def entropy_share(self, p_N: Tensor) -> Tensor:
        """See `Budget.entropy_share`."""
        return entropy_share(p_N, self.expected_size(p_N))

    def ascent_direction(self, gradient_N: Tensor, p_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """Direction of mirror ascent on the logits that keeps every budget to first order.

        The entropy counts a sample as many times as it costs, sum c_i H(p_i), so that the step of
        largest <g, p> - distance / eta under sum c_i p_i = B is logit_i + eta (g_i / c_i - lambda), and restoring the
        budget is one threshold for all. lambda = sum p (1 - p) g / sum c p (1 - p), of each group.

        Without costs the root mean square over the free samples is 1, as in `FixedSize`. With costs a few cheap
        samples have the largest g / c, and most are decided early: there the square is weighted by c p (1 - p), the
        curvature of the entropy, and the undecided samples move by 1.

        Args:
            gradient_N: float64 (N,), dF/dp.
            p_N: float64 (N,), inclusion probabilities.
            over_slices: not used.

        Returns:
            float64 (N,). Forced samples move as well, so that their logits, too, say what they add.
        """
        gradient_F, p_F = gradient_N[self.rows_F], p_N[self.rows_F]
        variance_F = p_F * (1 - p_F)
        total_G = self.sums(self.cost_F * variance_F)
        mean_G = self.sums(gradient_F) / self._free_cost_G
        center_G = torch.where(total_G > 0, self.sums(variance_F * gradient_F) / total_G, mean_G)
        # a group without free samples has no center
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

    # ---- the policy that draws samples one after the other

    def uniform_masks(self, num_masks: int, *, generator: torch.Generator, device: torch.device) -> Tensor:
        """See `Budget.uniform_masks`."""
        equal_N = torch.zeros(self.num_samples)
        keys = [gumbel_keys(equal_N, generator=generator) for _ in range(num_masks)]
        return torch.stack([self.fill(key_N.to(device)) for key_N in keys])

    def draw(self, logits_N: Tensor, *, generators: list[torch.Generator]) -> ConstrainedRollouts:
        """See `Budget.draw`."""
        draws = [self._draw_one(logits_N, generator) for generator in generators]
        return ConstrainedRollouts(logits_N, self.rows_F, self.lengths, draws, self.has_costs)

    def _draw_one(self, logits_N: Tensor, generator: torch.Generator) -> ConstrainedDraw:
        """Draws the samples that fit, group by group."""
        keys_N = gumbel_keys(logits_N, generator=generator)
        mask_N = self.fill(keys_N)
        order = self.by_score(keys_N)
        order = order[mask_N[self.rows_F[order]]]
        last_step_F = torch.empty_like(self.rows_F)
        drawn, log_times = [], []
        start = 0
        for group, (length, room) in enumerate(zip(self.lengths, self.room_G, strict=True)):
            chosen_K = order[self.group_F[order] == group] - start if len(self.lengths) > 1 else order
            cost_J = self.cost_F[start : start + length]
            cost_K = cost_J[chosen_K]
            # A sample can be drawn in step t if it costs no more than the room before t, which falls with t. With
            # rooms 9, 5, 2 a sample of cost 4 has one step too late for it, the third: its last is 3 - 1 - 1 = 1,
            # counted from 0. `searchsorted` needs rising numbers, so the rooms are flipped.
            room_K = (room - (cost_K.cumsum(0) - cost_K)).flip(0)
            last_step_J = len(chosen_K) - 1 - torch.searchsorted(room_K, cost_J)
            # a drawn sample is gone after its own step, whatever the room
            last_step_J[chosen_K] = torch.arange(len(chosen_K), device=order.device)
            last_step_F[start : start + length] = last_step_J
            drawn.append(chosen_K)
            # minus a Gumbel key is the logarithm of a clock's time
            log_times.append(-keys_N[self.rows_F[start + chosen_K[-1:]]])
            start += length
        return ConstrainedDraw(mask_N, tuple(drawn), last_step_F, tuple(log_times))

    def controlled_direction(
        self, logits_N: Tensor, p_N: Tensor, slopes_N: Tensor, *, linear_N: Tensor, rest_N: Tensor
    ) -> Tensor:
        """See `Budget.controlled_direction`; 0 for forced samples, and for groups that are decided, without costs.

        Where samples have costs the policy gradient of the linear part is not known. Its slope, plus the rest divided
        by the mean of p (1 - p), takes its place, as in `multilinear`.
        """
        if self.has_costs:
            curvature = (p_N * (1 - p_N)).mean().clamp(min=torch.finfo(torch.float64).tiny)
            return self.ascent_direction(slopes_N + rest_N / curvature, p_N)
        direction_N = torch.zeros_like(linear_N)
        for rows_J, room in zip(torch.split(self.rows_F, self.lengths), self.room_G.tolist(), strict=True):
            if room:
                direction_N[rows_J] = control_variate.dual_direction(
                    logits_N[rows_J], linear_N[rows_J], rest_N[rows_J], num_selected=int(room)
                )
        return normalized(direction_N)
