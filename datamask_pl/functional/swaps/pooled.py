"""Swaps that keep the number of samples, by the gains of single samples and, where known, their interactions.

Swapping a in and r out gains gain_a - gain_r - interaction_ar, and changes every other gain by its interaction with a
less its interaction with r.

Shapes: N samples, P samples of a pool, C candidates, O of them outside and I inside of the mask, M moved ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.functional.swaps import search

# Up to this many samples every mask of the budget is tried, 12,870 at most.
MAX_ENUMERATED_SAMPLES = 16
# Samples on either side whose gains follow what is swapped, the most of them that are matched at once, how often, and
# rows of the pool of which interactions are found at once.
NUM_POOLED, NUM_KNOWN_CANDIDATES, MAX_POOL_ROUNDS, POOL_CHUNK = 8192, 1024, 200, 2048
# A pool is left where a round moves less than one in so many of what the best round moved.
LEAST_SHARE_MOVED = 8
# A pool that raises the value by less than this share of what the best pool did is the last.
LEAST_SHARE_GAINED = 1 / 256
# Swaps that gain less than this share of the median gain are rounding.
RELATIVE_ROUNDING = 1e-6

# Between places, a slice or int64 (C,), and others, int64 (O,), of some rows: float (C, O).
Interactions = Callable[[slice | Tensor, Tensor], Tensor]


def propose_by_gains(
    mask_N: Tensor, *, gains: Callable[[Tensor], Tensor], features: Callable[[Tensor], Tensor] | None
) -> Iterator[Iterable[Tensor]]:
    """Proposes swaps by the gains of single samples; what several gain together is found by trying.

    Pairs the samples outside of largest gain with those inside of smallest gain. First all pairs that gain by that are
    swapped together, then half of them, a quarter, and so on down to one; then single pairs. Two similar samples share
    their gain, so of similar candidates only the best is swapped together with others.

    Args:
        mask_N: bool (N,).
        gains: mask bool (N,) -> float64 (N,), f(S + i) - f(S - i) of each sample, or any proxy of it.
        features: rows int64 (C,) -> float (C, D), which tell similar candidates; None for no such test.
    """
    if bool(mask_N.all()):
        return
    gain_N = gains(mask_N)
    added, removed = search.candidates(gain_N, ~mask_N, mask_N, search.NUM_CANDIDATES)
    singles = added[: search.NUM_SINGLES], removed[: search.NUM_SINGLES]
    if features is not None:
        added, removed = search.spread_out(added, features(added)), search.spread_out(removed, features(removed))
    num_pairs = min(added.numel(), removed.numel())
    # gains fall along one list and rise along the other: the pairs that gain are the first
    num_promising = int((gain_N[added[:num_pairs]] > gain_N[removed[:num_pairs]]).sum())
    yield search.in_parts(search.joint_swaps(mask_N, added[:num_promising], removed[:num_promising]))
    yield search.in_parts(search.single_swaps(mask_N, *singles))


@dataclass
class PooledSwaps:
    """Proposes the mask after many swaps, each of whose gains is known after any number of others.

    A round swaps within a pool, whose gains follow, until hardly any swap gains. Gains of all samples are asked for
    once per round.

    Attributes:
        gains: mask bool (N,) -> float64 (N,), exactly f(S + i) - f(S - i).
        interactions: rows int64 (P,) -> by how much keeping one of them raises the gain of another: of places in these
            rows, a slice or int64 (C,), and others, int64 (O,), float (C, O); 0 for a sample and itself.
        is_done: whether the last pool cannot have missed a candidate.
    """

    gains: Callable[[Tensor], Tensor]
    interactions: Callable[[Tensor], Interactions]
    is_done: bool = False

    def __call__(self, mask_N: Tensor) -> Iterator[Iterable[Tensor]]:
        """One mask, or none where no swap gains."""
        if self.is_done or bool(mask_N.all()):
            return
        gain_N = self.gains(mask_N)
        rows_P = torch.cat(search.candidates(gain_N, ~mask_N, mask_N, NUM_POOLED))
        trial_N = mask_N.clone()
        trial_N[rows_P], self.is_done = swap_pooled(mask_N[rows_P], gain_N[rows_P], self.interactions(rows_P))
        if not torch.equal(trial_N, mask_N):
            yield [trial_N[None]]


def same_size_masks(mask_N: Tensor) -> Iterable[Tensor]:
    """All masks with as many samples as the given one, in parts: bool (R, N)."""
    rows_RK = torch.tensor(list(combinations(range(mask_N.numel()), int(mask_N.sum()))), device=mask_N.device)
    masks_RN = mask_N.new_zeros(rows_RK.shape[0], mask_N.numel()).scatter_(1, rows_RK, True)
    return torch.split(masks_RN, 64 * search.MASKS_AT_ONCE)


class _Pool:
    """Samples whose gains follow what is swapped among them.

    Args:
        is_kept_P: bool (P,), at the start; both sides have a sample.
        gain_P: float64 (P,), at the start.
        interactions: between places of the pool.
    """

    def __init__(self, is_kept_P: Tensor, gain_P: Tensor, interactions: Interactions) -> None:
        self.start_P, self.start_gain_P = is_kept_P, gain_P
        self.is_kept_P, self.gain_P = is_kept_P.clone(), gain_P.clone()
        self.interactions = interactions

    def swap(self, moved: Tensor) -> None:
        """Swaps some places, and lets all gains follow."""
        self.is_kept_P[moved] = ~self.is_kept_P[moved]
        signs_M = self.is_kept_P[moved].double() * 2 - 1
        # of the same shape on every rank, for each has the whole pool
        for start in range(0, self.gain_P.numel(), POOL_CHUNK):
            places = slice(start, min(start + POOL_CHUNK, self.gain_P.numel()))
            self.gain_P[places] += self.interactions(places, moved).double() @ signs_M

    def may_miss(self, added: Tensor, removed: Tensor) -> bool:
        """Whether a sample that is not in the pool can now be a better candidate than the last ones of these."""
        change = (self.gain_P - self.start_gain_P).abs().max()
        sides = (
            (self.start_gain_P[~self.start_P], self.gain_P[added]),
            (-self.start_gain_P[self.start_P], -self.gain_P[removed]),
        )
        return any(_may_miss(pooled, last, change) for pooled, last in sides)


def swap_pooled(is_kept_P: Tensor, gain_P: Tensor, interactions: Interactions) -> tuple[Tensor, bool]:
    """Swaps candidates of a pool until hardly any swap gains. Both sides have a sample.

    What was swapped changes the gains of the whole pool, which says who the next candidates are. A pool that yields
    little is left; if no swap gains nothing is changed.

    Args:
        is_kept_P: bool (P,), the kept ones.
        gain_P: float64 (P,), with up to NUM_POOLED samples on either side those with the gains next to another's.
        interactions: between places of the pool.

    Returns:
        bool (P,), the kept ones; and whether another pool would have the same last candidates, of which no swap gains,
        as long as no gain outside of the pool changed by more than all gains inside.
    """
    pool = _Pool(is_kept_P, gain_P, interactions)
    most_moved, num_candidates = 0, max(NUM_KNOWN_CANDIDATES // 2, 1)
    for _ in range(MAX_POOL_ROUNDS):
        # 1. match the best candidates of both sides
        added, removed = search.candidates(pool.gain_P, ~pool.is_kept_P, pool.is_kept_P, num_candidates)
        chosen, num_added = torch.cat([added, removed]), added.numel()
        is_moved_C = _swap_among(added, removed, pool.gain_P, interactions) != (np.arange(chosen.numel()) >= num_added)
        num_moved = int(is_moved_C.sum())
        # 2. few candidates are quicker, more find more: before the end the full number is tried
        if num_moved == 0 and num_candidates < NUM_KNOWN_CANDIDATES:
            num_candidates = NUM_KNOWN_CANDIDATES
            continue
        misses_some = pool.may_miss(added, removed)
        if num_moved == 0:
            return pool.is_kept_P, not misses_some
        # 3. make the swaps; a pool that moves little is left for a new one, if that could have other candidates
        pool.swap(chosen[torch.from_numpy(is_moved_C).to(chosen.device)])
        most_moved = max(most_moved, num_moved)
        if misses_some and num_moved * LEAST_SHARE_MOVED < most_moved:
            break
    return pool.is_kept_P, False


def _may_miss(pooled_gain: Tensor, last_gain: Tensor, change: Tensor) -> bool:
    """Whether a sample that was not pooled, for its gain was lower, can now be above the last candidate."""
    return pooled_gain.numel() >= NUM_POOLED and bool(pooled_gain.min() + change >= last_gain.min())


def _swap_among(added: Tensor, removed: Tensor, gain_P: Tensor, interactions: Interactions) -> NDArray[np.bool_]:
    """`swap_candidates` of samples outside and inside, in this order: bool (C,), the kept ones.

    A last look multiplies one side by the other, and nothing else.
    """
    num_added, chosen = added.numel(), torch.cat([added, removed])
    is_kept_C, gain_C = np.arange(chosen.numel()) >= num_added, gain_P[chosen].cpu().numpy()
    between_OI = interactions(added, removed)
    if _best_gains(gain_C[:num_added], gain_C[num_added:], between_OI.cpu().numpy()).max() <= _rounding(gain_C):
        return is_kept_C
    interaction_CC = between_OI.new_empty(chosen.numel(), chosen.numel())
    interaction_CC[:num_added, num_added:] = between_OI
    interaction_CC[num_added:, :num_added] = between_OI.T
    interaction_CC[:num_added, :num_added] = interactions(added, added)
    interaction_CC[num_added:, num_added:] = interactions(removed, removed)
    return swap_candidates(is_kept_C, gain_C, interaction_CC.cpu().numpy())


def swap_candidates(
    is_kept_C: NDArray[np.bool_], gain_C: NDArray[np.float64], interaction_CC: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Swaps candidates one for one, each time about the best swap, until none gains.

    A sweep looks at all swaps at once, and makes those that still gain half as much as the best one when their turn
    comes.

    Args:
        is_kept_C: bool (C,), which of the candidates are kept, neither all nor none.
        gain_C: float64 (C,), what keeping each adds.
        interaction_CC: float (C, C), symmetric, 0 on the diagonal.

    Returns:
        bool (C,), with as many kept.

    Example:
        >>> swap_candidates(np.array([True, False, False]), np.array([1.0, 2.0, 3.0]), np.zeros((3, 3))).tolist()
        [False, False, True]
    """
    gain_C = gain_C.copy()
    inside, outside = np.flatnonzero(is_kept_C), np.flatnonzero(~is_kept_C)
    rounding = _rounding(gain_C)
    between_OI = interaction_CC[np.ix_(outside, inside)]
    for _ in range(10 * is_kept_C.size):
        best_O = _best_gains(gain_C[outside], gain_C[inside], between_OI)
        least = max(rounding, best_O.max() / 2)
        is_settled = True
        for at in np.argsort(-best_O, kind="stable")[: np.count_nonzero(best_O > least)]:
            # gains have changed since the sweep began: the partner is chosen anew
            removal_loss_I = gain_C[inside] + between_OI[at]
            place = removal_loss_I.argmin()
            if gain_C[outside[at]] - removal_loss_I[place] <= least:
                continue
            outside[at], inside[place] = inside[place], outside[at]
            gain_C += interaction_CC[inside[place]] - interaction_CC[outside[at]]
            between_OI[at], between_OI[:, place] = (
                interaction_CC[outside[at], inside],
                interaction_CC[inside[place], outside],
            )
            is_settled = False
        if is_settled:
            break
    swapped_C = np.zeros_like(is_kept_C)
    swapped_C[inside] = True
    return swapped_C


def _rounding(gain_C: NDArray[np.float64]) -> float:
    # of most of them: a few outliers must not hide what the others differ by
    return float(RELATIVE_ROUNDING * np.median(np.abs(gain_C)))


def _best_gains(
    gain_O: NDArray[np.float64], gain_I: NDArray[np.float64], between_OI: NDArray[np.floating]
) -> NDArray[np.float64]:
    """What the best swap of each candidate outside gains."""
    least_O: NDArray[np.floating] = (between_OI + gain_I.astype(between_OI.dtype)).min(1)
    return gain_O - least_O
