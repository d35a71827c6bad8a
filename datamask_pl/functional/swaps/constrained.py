"""Exchanges that make a mask better and keep a constraint.

Shapes: N samples, R masks, A left-out candidates, B kept ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.functional.constraint import FREE, Constraint
from datamask_pl.functional.swaps import pooled

# Up to this many free samples every allowed mask is tried.
MAX_ENUMERATED_SAMPLES = 12


def polish_within(
    mask_N: Tensor,
    constraint: Constraint,
    *,
    values: Callable[[Tensor], Tensor],
    gains: Callable[[Tensor], Tensor],
    features: Callable[[Tensor], Tensor] | None = None,
    max_rounds: int = 100,
) -> tuple[Tensor, float]:
    """Exchanges kept for left-out samples of the same group as long as the objective rises.

    A round first moves, all at once or only the most promising, what the gains say is on the wrong side, as in the
    relaxation of a knapsack problem: a left-out sample worth more than its cost is at the budget's margin, or a kept
    one worth less. Where that is no better, since what is alike came in together, it goes on with pairs that are unlike
    each other, and then with single pairs; see `rounding.polish`.

    With costs a sample that comes in may cost as much as the one that goes and what is left of the budget; and what
    still fits is added, at first, too, also where that lowers the objective, a mean: otherwise few samples would be the
    best. From then on the value never falls.

    Args:
        mask_N: bool (N,), allowed, where to start.
        constraint: which masks are allowed.
        values: masks bool (R, N) -> float64 (R,), the objective.
        gains: mask bool (N,) -> float64 (N,), what keeping each sample adds, or any proxy of it.
        features: rows int64 (C,) -> float (C, D), by which similar candidates are told; None moves similar ones too.
        max_rounds: rounds at most.

    Returns:
        The mask, bool (N,), allowed, and its value.
    """
    if not torch.equal(constraint.fill(mask_N.double()), mask_N):
        mask_N = constraint.fill(_per_cost(gains(mask_N), constraint), start_N=mask_N)
    best_value = float(values(mask_N[None])[0])
    if constraint.rows_F.numel() <= MAX_ENUMERATED_SAMPLES:
        for bits_RF in torch.split(_all_allowed(constraint), pooled.MASKS_AT_ONCE):
            trials_RN = constraint.kept().repeat(len(bits_RF), 1)
            trials_RN[:, constraint.rows_F] = bits_RF
            mask_N, best_value = _better(mask_N, best_value, trials_RN, values)
        return mask_N, best_value
    for _ in range(max_rounds):
        now = _Round.of(mask_N, constraint, gains(mask_N))
        before = best_value
        for trials in (_moved, lambda now: _paired(now, features), _singles):
            mask_N, best_value = _better(mask_N, best_value, now.completed(trials(now)), values)
            if best_value > before:
                break
        else:
            break
    return mask_N, best_value


@dataclass(frozen=True)
class _Round:
    """A mask that is to become better.

    Attributes:
        mask_N: bool (N,).
        constraint: which masks are allowed.
        per_cost_N: float64 (N,), gain per cost: in this order a budget is filled up.
        worth_N: float64 (N,), gain beyond cost.
    """

    mask_N: Tensor
    constraint: Constraint
    per_cost_N: Tensor
    worth_N: Tensor

    @classmethod
    def of(cls, mask_N: Tensor, constraint: Constraint, gain_N: Tensor) -> _Round:
        return cls(mask_N, constraint, _per_cost(gain_N, constraint), worth_beyond_cost(gain_N, constraint))

    def completed(self, trials_RN: Tensor) -> Tensor:
        """The trials and what still fits, the best first: a budget is there to be spent."""
        for trial_N in trials_RN:
            trial_N.copy_(self.constraint.fill(self.per_cost_N, start_N=trial_N))
        return trials_RN


def worth_beyond_cost(gain_N: Tensor, constraint: Constraint) -> Tensor:
    """Gains minus what their costs would bring elsewhere in the group: float64 (N,).

    A unit of cost brings what it does where the group's budget would end if it were spent by gain per cost, the dual
    price of the knapsack problem's relaxation. What has a positive worth is kept there, what has a negative one is not.

    Args:
        gain_N: float64 (N,), what keeping each sample adds.
        constraint: which masks are allowed.
    """
    cost_N = constraint.holdings.cost_N
    per_cost_N = _per_cost(gain_N, constraint)
    order_F = constraint.by_score(per_cost_N)
    group_F, cost_F = constraint.group_F[order_F], constraint.cost_F[order_F]
    starts_G = constraint.length_G.cumsum(0) - constraint.length_G
    total_F = torch.cat([cost_F.new_zeros(1), cost_F.cumsum(0)])
    spent_F = total_F[1:] - total_F[starts_G[group_F]]
    num_kept_G = constraint.sums((spent_F <= constraint.room_G[group_F]).double()).long()
    margin_G = starts_G + torch.minimum(num_kept_G, constraint.length_G - 1)
    is_there_G = constraint.length_G > 0
    price_G = torch.zeros_like(constraint.room_G)
    price_G[is_there_G] = per_cost_N[constraint.rows_F[order_F[margin_G[is_there_G]]]]
    price_N = price_G[constraint.holdings.group_N]
    return gain_N - (price_N if cost_N is None else price_N * cost_N)


def _per_cost(gain_N: Tensor, constraint: Constraint) -> Tensor:
    return gain_N if constraint.holdings.cost_N is None else gain_N / constraint.holdings.cost_N


def match(added: Tensor, removed: Tensor, constraint: Constraint, *, worth_N: Tensor, room_G: Tensor) -> Tensor:
    """Pairs of a sample that comes in and one of its group that goes, every one of which promises something.

    The best candidates choose first, and each takes the least valuable kept sample that makes enough room. So the
    first pairs of the list, as many as one likes, may be exchanged together.

    Args:
        added: int64 (A,), left-out rows, best first.
        removed: int64 (B,), kept rows.
        constraint: which masks are allowed.
        worth_N: float64 (N,), what each sample adds beyond its cost.
        room_G: float64 (G,), what is left of the budgets.

    Returns:
        int64 (number of pairs, 2), of the largest promise first as far as the order of choosing allows.
    """
    (group_A, cost_A), worth_A = groups_and_costs(added, constraint), worth_N[added].cpu().numpy()
    (group_B, cost_B), worth_B = groups_and_costs(removed, constraint), worth_N[removed].cpu().numpy()
    left_G = room_G.cpu().numpy().copy()
    is_there_B = np.ones(len(worth_B), dtype=bool)
    pairs = []
    for row, (group, cost, worth) in enumerate(zip(group_A, cost_A, worth_A, strict=True)):
        may_go_B = is_there_B & (group_B == group) & (cost_B + left_G[group] >= cost) & (worth_B < worth)
        if may_go_B.any():
            other = int(np.where(may_go_B, worth_B, np.inf).argmin())
            is_there_B[other] = False
            left_G[group] += cost_B[other] - cost
            pairs.append((row, other))
    rows = torch.tensor(pairs, dtype=torch.int64, device=added.device).reshape(-1, 2)
    return torch.stack([added[rows[:, 0]], removed[rows[:, 1]]], dim=1)


def groups_and_costs(rows: Tensor, constraint: Constraint) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Group and cost of some rows, on the host."""
    cost_N = constraint.holdings.cost_N
    cost = np.ones(rows.numel()) if cost_N is None else cost_N[rows].cpu().numpy()
    return constraint.holdings.group_N[rows].cpu().numpy(), cost


def candidates(mask_N: Tensor, constraint: Constraint, worth_N: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Free samples to take in, best first, and to let go, worst first: both int64, at most so many."""
    is_free_N = constraint.holdings.fate_N == FREE
    outside, inside = (~mask_N & is_free_N).nonzero().squeeze(1), (mask_N & is_free_N).nonzero().squeeze(1)
    added = outside[pooled.first_largest(worth_N[outside], num_candidates)]
    return added, inside[pooled.first_largest(-worth_N[inside], num_candidates)]


def _moved(now: _Round) -> Tensor:
    """Masks without the kept samples that are worth less than their cost, the worse half of them, a quarter, ...

    What is worth more than its cost comes in for them as the best of what fits. bool (R, N).
    """
    goes = (now.mask_N & (now.constraint.holdings.fate_N == FREE) & (now.worth_N < 0)).nonzero().squeeze(1)
    goes = goes[now.worth_N[goes].argsort(stable=True)]
    counts = pooled.halves(len(goes))
    trials_RN = now.mask_N.repeat(len(counts), 1)
    for trial_N, count in zip(trials_RN, counts, strict=True):
        trial_N[goes[:count]] = False
    return trials_RN


def _paired(now: _Round, features: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Masks with pairs of candidates exchanged that are unlike each other: bool (R, N)."""
    added, removed = candidates(now.mask_N, now.constraint, now.worth_N, pooled.NUM_CANDIDATES)
    if features is not None:
        added = pooled.spread_out(added, features(added))
        removed = pooled.spread_out(removed, features(removed))
    room_G = now.constraint.room_left(now.mask_N)
    pairs_P2 = match(added, removed, now.constraint, worth_N=now.worth_N, room_G=room_G)
    return pooled.joint_swaps(now.mask_N, pairs_P2[:, 0], pairs_P2[:, 1])


def _singles(now: _Round) -> Tensor:
    """Masks with one exchange each between the first few of either side, as far as they are allowed: bool (R, N)."""
    added, removed = candidates(now.mask_N, now.constraint, now.worth_N, pooled.NUM_SINGLES)
    trials_RN = pooled.single_swaps(now.mask_N, added, removed)
    return trials_RN[[now.constraint.allows(trial_N) for trial_N in trials_RN]]


def _all_allowed(constraint: Constraint) -> Tensor:
    """Which free samples every allowed mask keeps to which nothing can be added: bool (R, F)."""
    num_free, device = constraint.rows_F.numel(), constraint.rows_F.device
    bits_RF = (torch.arange(2**num_free, device=device)[:, None] >> torch.arange(num_free, device=device)) & 1
    left_RG = constraint.room_G.expand(len(bits_RF), -1).clone()
    left_RG.index_add_(1, constraint.group_F, -bits_RF * constraint.cost_F)
    fits_RF = (bits_RF == 0) & (constraint.cost_F <= left_RG[:, constraint.group_F])
    return bits_RF[(left_RG >= 0).all(1) & ~fits_RF.any(1)].bool()


def _better(
    mask_N: Tensor, best_value: float, trials_RN: Tensor, values: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """The best of the trials, if it is better than the mask."""
    if len(trials_RN) == 0:
        return mask_N, best_value
    value_R = torch.cat([values(chunk_RN) for chunk_RN in torch.split(trials_RN, pooled.MASKS_AT_ONCE)])
    winner = int(value_R.argmax())
    return (trials_RN[winner], float(value_R[winner])) if float(value_R[winner]) > best_value else (mask_N, best_value)
