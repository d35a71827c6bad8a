"""Swaps that keep a constraint: budgets of groups, costs, forced samples.

Shapes: N samples, F free ones, G groups, R masks, A candidates outside of the mask, B inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import FREE
from datamask_pl.functional.swaps import search

# Up to this many free samples every allowed mask is tried.
MAX_ENUMERATED_SAMPLES = 12


@dataclass(frozen=True)
class ConstrainedSwaps:
    """Proposes masks within a constraint by the gains of single samples beyond their cost.

    A round first moves, all at once or only the most promising, what the gains say is on the wrong side, as in the
    relaxation of a knapsack problem: a sample outside that gains more than its cost does at the budget's margin, or one
    inside that gains less. Where that is no better, since similar samples came in together, it tries pairs that are
    unlike each other, and then single pairs, both within groups.

    With costs a sample that comes in may cost as much as the one that goes and what is left of the budget. What still
    fits is always added, also where that lowers the objective, a mean: otherwise few samples would be the best.

    Attributes:
        constraint: which masks are allowed.
        gains: mask bool (N,) -> float64 (N,), what keeping each sample adds, or any proxy of it.
        features: rows int64 (C,) -> float (C, D), which tell similar candidates; None for no such test.
    """

    constraint: Constrained
    gains: Callable[[Tensor], Tensor]
    features: Callable[[Tensor], Tensor] | None

    def __call__(self, mask_N: Tensor) -> Iterator[Iterable[Tensor]]:
        """Moves across the threshold, pairs, single pairs."""
        gain_N = self.gains(mask_N)
        net_gain_N = net_gains(gain_N, self.constraint)
        for trials_RN in (self._moved, self._paired, self._singles):
            yield search.in_parts(self._completed(trials_RN(mask_N, net_gain_N), gain_N))

    def _completed(self, trials_RN: Tensor, gain_N: Tensor) -> Tensor:
        """The trials and what still fits, the best first: a budget is there to be spent."""
        per_cost_N = _per_cost(gain_N, self.constraint)
        for trial_N in trials_RN:
            trial_N.copy_(self.constraint.fill(per_cost_N, start_N=trial_N))
        return trials_RN

    def _moved(self, mask_N: Tensor, net_gain_N: Tensor) -> Tensor:
        """Masks without the samples of negative net gain, without the worse half of them, a quarter, ...: bool (R, N).

        What has a positive one comes in for them as the best of what fits.
        """
        goes = (mask_N & (self.constraint.holdings.forced_N == FREE) & (net_gain_N < 0)).nonzero().squeeze(1)
        goes = goes[net_gain_N[goes].argsort(stable=True)]
        return search.joint_swaps(mask_N, goes[:0], goes)

    def _paired(self, mask_N: Tensor, net_gain_N: Tensor) -> Tensor:
        """Masks with pairs of candidates swapped that are unlike each other: bool (R, N)."""
        added, removed = candidates(mask_N, self.constraint, net_gain_N, search.NUM_CANDIDATES)
        if self.features is not None:
            added = search.spread_out(added, self.features(added))
            removed = search.spread_out(removed, self.features(removed))
        room_G = self.constraint.room_left(mask_N)
        pairs_P2 = match(added, removed, self.constraint, net_gain_N=net_gain_N, room_G=room_G)
        return search.joint_swaps(mask_N, pairs_P2[:, 0], pairs_P2[:, 1])

    def _singles(self, mask_N: Tensor, net_gain_N: Tensor) -> Tensor:
        """Masks with one swap each between the first few of either side, as far as they are allowed: bool (R, N)."""
        trials_RN = search.single_swaps(mask_N, *candidates(mask_N, self.constraint, net_gain_N, search.NUM_SINGLES))
        return trials_RN[[self.constraint.allows(trial_N) for trial_N in trials_RN]]


def fill_up(mask_N: Tensor, constraint: Constrained, gains: Callable[[Tensor], Tensor]) -> Tensor:
    """The mask and what still fits, by gain per cost; gains are asked for only where something does: bool (N,)."""
    if torch.equal(constraint.fill(mask_N.double()), mask_N):
        return mask_N
    return constraint.fill(_per_cost(gains(mask_N), constraint), start_N=mask_N)


def net_gains(gain_N: Tensor, constraint: Constrained) -> Tensor:
    """Gains minus what their costs would gain elsewhere in the group: float64 (N,).

    A unit of cost gains what it does where the group's budget would end if it were spent by gain per cost, the dual
    price of the knapsack problem's relaxation. A sample of positive net gain is kept there, one of negative is not.

    Args:
        gain_N: float64 (N,), what keeping each sample adds.
        constraint: which masks are allowed.
    """
    cost_N = constraint.holdings.cost_N
    per_cost_N = _per_cost(gain_N, constraint)
    # 1. every group's free samples, by gain per cost, and what they cost up to each
    order_F = constraint.by_score(per_cost_N)
    group_F, cost_F = constraint.group_F[order_F], constraint.cost_F[order_F]
    starts_G = constraint.length_G.cumsum(0) - constraint.length_G
    total_F = torch.cat([cost_F.new_zeros(1), cost_F.cumsum(0)])
    spent_F = total_F[1:] - total_F[starts_G[group_F]]
    # 2. the first that the budget does not hold is at the margin; the last where it holds all
    num_kept_G = constraint.sums((spent_F <= constraint.room_G[group_F]).double()).long()
    margin_G = starts_G + torch.minimum(num_kept_G, constraint.length_G - 1)
    # 3. its gain per cost is the group's price; groups without free samples have none
    has_free_G = constraint.length_G > 0
    price_G = torch.zeros_like(constraint.room_G)
    price_G[has_free_G] = per_cost_N[constraint.rows_F[order_F[margin_G[has_free_G]]]]
    price_N = price_G[constraint.holdings.group_N]
    return gain_N - (price_N if cost_N is None else price_N * cost_N)


def _per_cost(gain_N: Tensor, constraint: Constrained) -> Tensor:
    return gain_N if constraint.holdings.cost_N is None else gain_N / constraint.holdings.cost_N


def match(added: Tensor, removed: Tensor, constraint: Constrained, *, net_gain_N: Tensor, room_G: Tensor) -> Tensor:
    """Pairs of a sample that comes in and one of its group that goes, of a smaller net gain.

    The best candidates choose first, and each takes the least valuable kept sample that makes enough room. So the
    first pairs of the list, as many as one likes, may be swapped together.

    Args:
        added: int64 (A,), rows outside of the mask, best first.
        removed: int64 (B,), rows inside.
        constraint: which masks are allowed.
        net_gain_N: float64 (N,), what each sample gains beyond its cost.
        room_G: float64 (G,), what is left of the budgets.

    Returns:
        int64 (number of pairs, 2), of the largest gain first as far as the order of choosing allows.
    """
    (group_A, cost_A), gain_A = groups_and_costs(added, constraint), net_gain_N[added].cpu().numpy()
    (group_B, cost_B), gain_B = groups_and_costs(removed, constraint), net_gain_N[removed].cpu().numpy()
    left_G = room_G.cpu().numpy().copy()
    is_there_B = np.ones(len(gain_B), dtype=bool)
    pairs = []
    for row, (group, cost, gain) in enumerate(zip(group_A, cost_A, gain_A, strict=True)):
        may_go_B = is_there_B & (group_B == group) & (cost_B + left_G[group] >= cost) & (gain_B < gain)
        if may_go_B.any():
            other = int(np.where(may_go_B, gain_B, np.inf).argmin())
            is_there_B[other] = False
            left_G[group] += cost_B[other] - cost
            pairs.append((row, other))
    rows = torch.tensor(pairs, dtype=torch.int64, device=added.device).reshape(-1, 2)
    return torch.stack([added[rows[:, 0]], removed[rows[:, 1]]], dim=1)


def groups_and_costs(rows: Tensor, constraint: Constrained) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Group and cost of some rows, on the host."""
    cost_N = constraint.holdings.cost_N
    cost = np.ones(rows.numel()) if cost_N is None else cost_N[rows].cpu().numpy()
    return constraint.holdings.group_N[rows].cpu().numpy(), cost


def candidates(mask_N: Tensor, constraint: Constrained, net_gain_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Free samples to add, best first, and to remove, worst first: both int64, at most `count`."""
    is_free_N = constraint.holdings.forced_N == FREE
    return search.candidates(net_gain_N, ~mask_N & is_free_N, mask_N & is_free_N, count)


def allowed_masks(constraint: Constrained) -> Iterator[Tensor]:
    """Every allowed mask to which nothing can be added, in parts: bool (R, N)."""
    num_free, device = constraint.rows_F.numel(), constraint.rows_F.device
    bits_RF = (torch.arange(2**num_free, device=device)[:, None] >> torch.arange(num_free, device=device)) & 1
    left_RG = constraint.room_G.expand(len(bits_RF), -1).clone()
    left_RG.index_add_(1, constraint.group_F, -bits_RF * constraint.cost_F)
    fits_RF = (bits_RF == 0) & (constraint.cost_F <= left_RG[:, constraint.group_F])
    allowed_RF = bits_RF[(left_RG >= 0).all(1) & ~fits_RF.any(1)].bool()
    for part_RF in search.in_parts(allowed_RF):
        masks_RN = constraint.kept().repeat(len(part_RF), 1)
        masks_RN[:, constraint.rows_F] = part_RF
        yield masks_RN
