"""From logits to a mask of exactly the budget, and swaps that make it better.

Shapes: N samples, R masks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Samples looked at on either side of the threshold in a round.
NUM_CANDIDATES = 512
# Where no set of swaps is better, every exchange between this many on either side is tried.
NUM_SINGLES = 4
# Of two candidates on the same side with a higher cosine than this, only the better one is swapped in a round.
MAX_COSINE = 0.4
# The same where interactions are known: samples on either side whose gains follow what is exchanged, the most of them
# that are matched at once, how often, and rows of the pool of which interactions are found at once.
NUM_POOLED, NUM_KNOWN_CANDIDATES, MAX_POOL_ROUNDS, POOL_CHUNK = 8192, 1024, 200, 2048
# A pool is left where a round moves less than one in so many of what the best round moved.
LEAST_SHARE_MOVED = 8
# A pool that raises the value by less than one in so many of what the best pool did is the last.
LEAST_SHARE_GAINED = 256
# Exchanges that promise less than this share of the largest gain are rounding.
RELATIVE_ROUNDING = 1e-6
# Masks whose values are asked for in one call.
MASKS_AT_ONCE = 16
# Up to this many samples every mask of the budget is tried, 12,870 at most, where exchanges stop at a local optimum.
MAX_ENUMERATED_SAMPLES = 16

# Between places, a slice or int64 (C,), and others, int64 (O,), of some rows: float (C, O).
Interactions = Callable[[slice | Tensor, Tensor], Tensor]


def top_k_mask(logits_N: Tensor, num_selected: int) -> Tensor:
    """The samples with the largest logits; equal logits are taken in row order, on every device.

    Args:
        logits_N: float (N,), finite.
        num_selected: the budget, in [1, N].

    Returns:
        bool (N,) with exactly `num_selected` True.

    Example:
        >>> top_k_mask(torch.tensor([1.0, 3.0, 1.0, 1.0]), 2)
        tensor([ True,  True, False, False])
    """
    threshold = logits_N.kthvalue(logits_N.numel() - num_selected + 1).values
    mask_N = logits_N > threshold
    ties = (logits_N == threshold).nonzero().squeeze(1)
    mask_N[ties[: num_selected - int(mask_N.sum())]] = True
    return mask_N


def polish(
    mask_N: Tensor,
    *,
    values: Callable[[Tensor], Tensor],
    gains: Callable[[Tensor], Tensor],
    features: Callable[[Tensor], Tensor] | None = None,
    interactions: Callable[[Tensor], Interactions] | None = None,
    max_rounds: int = 100,
) -> tuple[Tensor, float]:
    """Exchanges kept for left-out samples, one for one, as long as the objective rises.

    A round pairs the left-out samples of largest gain with the kept ones of smallest gain, tries all pairs that promise
    something together, then half of them, a quarter, and so on down to one, and takes the best. Gains are of single
    samples, and two similar samples share theirs, so of similar candidates a round moves only the best. Where no set
    of pairs is better it tries single exchanges, and ends when those fail too.

    Where interactions are known, what every exchange is worth is known after any number of others: a round makes them
    one by one until no single one among its candidates is better, and takes new candidates from a pool whose gains
    follow. Gains of all samples are asked for when the pool yields little, unless those of the pool say that no other
    sample can have become a candidate.

    A handful of samples is solved by trying every mask. The budget never changes, and the value never falls.

    Args:
        mask_N: bool (N,), where to start.
        values: masks bool (R, N) -> float64 (R,), the objective.
        gains: mask bool (N,) -> float64 (N,), what keeping each sample adds: f(S + i) - f(S - i), or any proxy of it.
        features: rows int64 (C,) -> float (C, D), by which similar candidates are told; None moves similar ones too.
        interactions: rows int64 (P,) -> by how much keeping one of them raises the gain of another: of places in these
            rows, a slice or int64 (C,), and others, int64 (O,), float (C, O); 0 for a sample and itself. Only where the
            gains are exact, and this depends on nothing else.
        max_rounds: rounds at most.

    Returns:
        The mask, bool (N,), and its value.
    """
    best_value = float(values(mask_N[None])[0])
    if mask_N.numel() <= MAX_ENUMERATED_SAMPLES:
        return _best_of_all(mask_N, best_value, values)
    if interactions is not None:
        return _polish_known(mask_N, best_value, values, gains, interactions, max_rounds)
    for _ in range(max_rounds):
        if bool(mask_N.all()):
            break
        gain_N = gains(mask_N)
        added, removed = candidates(mask_N, gain_N, NUM_CANDIDATES)
        singles_RN = single_swaps(mask_N, added[:NUM_SINGLES], removed[:NUM_SINGLES])
        if features is not None:
            added, removed = spread_out(added, features(added)), spread_out(removed, features(removed))
        num_pairs = min(added.numel(), removed.numel())
        added, removed = added[:num_pairs], removed[:num_pairs]
        num_promising = int((gain_N[added] > gain_N[removed]).sum())
        for trials_RN in (joint_swaps(mask_N, added[:num_promising], removed[:num_promising]), singles_RN):
            if trials_RN.shape[0] == 0:
                continue
            value_R = torch.cat([values(chunk_RN) for chunk_RN in torch.split(trials_RN, MASKS_AT_ONCE)])
            winner = int(value_R.argmax())
            if float(value_R[winner]) > best_value:
                mask_N, best_value = trials_RN[winner], float(value_R[winner])
                break
        else:
            break
    return mask_N, best_value


def first_largest(values_N: Tensor, count: int) -> Tensor:
    """Positions of the largest values, largest first, equal ones as they come: as a stable sort, without sorting all.

    Args:
        values_N: float (N,), finite.
        count: how many, all if there are fewer.

    Returns:
        int64 (at most `count`,).

    Example:
        >>> first_largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 3)
        tensor([1, 3, 2])
    """
    if values_N.numel() <= count:
        return values_N.argsort(descending=True, stable=True)
    threshold = values_N.kthvalue(values_N.numel() - count + 1).values
    candidates = (values_N >= threshold).nonzero().squeeze(1)
    return candidates[values_N[candidates].argsort(descending=True, stable=True)[:count]]


def candidates(mask_N: Tensor, gain_N: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Left-out samples of largest gain, and kept ones of smallest, both int64, best first, ties by row order."""
    outside, inside = (~mask_N).nonzero().squeeze(1), mask_N.nonzero().squeeze(1)
    added = outside[first_largest(gain_N[outside], num_candidates)]
    return added, inside[first_largest(-gain_N[inside], num_candidates)]


def _polish_known(
    mask_N: Tensor,
    best_value: float,
    values: Callable[[Tensor], Tensor],
    gains: Callable[[Tensor], Tensor],
    interactions: Callable[[Tensor], Interactions],
    max_rounds: int,
) -> tuple[Tensor, float]:
    """`polish` where interactions are known."""
    most_gained = 0.0
    for _ in range(max_rounds):
        if bool(mask_N.all()):
            break
        gain_N = gains(mask_N)
        rows_P = torch.cat(candidates(mask_N, gain_N, NUM_POOLED))
        trial_N = mask_N.clone()
        trial_N[rows_P], is_exhausted = _exchange_pooled(mask_N[rows_P], gain_N[rows_P], interactions(rows_P))
        if torch.equal(trial_N, mask_N):
            break
        value = float(values(trial_N[None])[0])
        if value <= best_value:
            break
        gained = value - best_value
        mask_N, best_value, most_gained = trial_N, value, max(most_gained, gained)
        if is_exhausted or gained * LEAST_SHARE_GAINED < most_gained:
            break
    return mask_N, best_value


def _exchange_pooled(start_P: Tensor, start_gain_P: Tensor, interactions: Interactions) -> tuple[Tensor, bool]:
    """Exchanges between candidates of the pool until hardly any is better. Both sides have a sample.

    What was exchanged changes the gains of the whole pool, which says who the next candidates are. A pool that yields
    little is left; if no exchange is better nothing is changed.

    Args:
        start_P: bool (P,), the kept ones.
        start_gain_P: float64 (P,), with up to NUM_POOLED samples on either side those with the gains next to another's.
        interactions: between places of the pool.

    Returns:
        bool (P,), the kept ones; and whether another pool would have the same last candidates, of which no exchange is
        better, as long as no gain outside of the pool changed by more than all gains inside.
    """
    is_kept_P, gain_P = start_P.clone(), start_gain_P.clone()
    most_moved = 0
    num_candidates = max(NUM_KNOWN_CANDIDATES // 2, 1)
    for _ in range(MAX_POOL_ROUNDS):
        added, removed = candidates(is_kept_P, gain_P, num_candidates)
        chosen = torch.cat([added, removed])
        before_C = is_kept_P[chosen].cpu().numpy()
        is_moved_C = before_C != _exchange_candidates(added, removed, gain_P, interactions)
        num_moved = int(is_moved_C.sum())
        if num_moved == 0 and num_candidates < NUM_KNOWN_CANDIDATES:
            num_candidates = NUM_KNOWN_CANDIDATES  # few are quicker, more find more
            continue
        change = (gain_P - start_gain_P).abs().max()
        sides = (start_gain_P[~start_P], gain_P[added]), (-start_gain_P[start_P], -gain_P[removed])
        misses_some = any(_may_miss(pooled, last, change) for pooled, last in sides)
        if num_moved == 0:
            return is_kept_P, not misses_some
        moved = chosen[torch.from_numpy(is_moved_C).to(chosen.device)]
        is_kept_P[moved] = ~is_kept_P[moved]
        signs_M = is_kept_P[moved].double() * 2 - 1
        # of the same shape on every rank, for each has the whole pool
        for start in range(0, gain_P.numel(), POOL_CHUNK):
            places = slice(start, min(start + POOL_CHUNK, gain_P.numel()))
            gain_P[places] += interactions(places, moved).double() @ signs_M
        most_moved = max(most_moved, num_moved)
        if misses_some and num_moved * LEAST_SHARE_MOVED < most_moved:
            break
    return is_kept_P, False


def _may_miss(pooled_gain: Tensor, last_gain: Tensor, change: Tensor) -> bool:
    """Whether a sample that was not pooled, for its gain was lower, can now be above the last candidate."""
    return pooled_gain.numel() >= NUM_POOLED and bool(pooled_gain.min() + change >= last_gain.min())


def _exchange_candidates(
    added: Tensor, removed: Tensor, gain_P: Tensor, interactions: Interactions
) -> NDArray[np.bool_]:
    """`exchange` of left-out candidates and kept ones, in this order: bool (C,), the kept ones.

    A last look multiplies one side by the other, and nothing else.
    """
    num_added, chosen = added.numel(), torch.cat([added, removed])
    is_kept_C, gain_C = np.arange(chosen.numel()) >= num_added, gain_P[chosen].cpu().numpy()
    between_OI = interactions(added, removed)
    if _worth(gain_C[:num_added], gain_C[num_added:], between_OI.cpu().numpy()).max() <= _least_worth(gain_C):
        return is_kept_C
    interaction_CC = between_OI.new_empty(chosen.numel(), chosen.numel())
    interaction_CC[:num_added, num_added:] = between_OI
    interaction_CC[num_added:, :num_added] = between_OI.T
    interaction_CC[:num_added, :num_added] = interactions(added, added)
    interaction_CC[num_added:, num_added:] = interactions(removed, removed)
    return exchange(is_kept_C, gain_C, interaction_CC.cpu().numpy())


def exchange(
    is_kept_C: NDArray[np.bool_], gain_C: NDArray[np.float64], interaction_CC: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """Exchanges candidates one for one, each time about the best exchange, until none is better.

    Adding a and removing r is worth gain_a - gain_r - interaction_ar, and changes every gain by its interaction with a
    less that with r. A sweep looks at all exchanges at once, and makes those that are still worth half of the best one
    when their turn comes.

    Args:
        is_kept_C: bool (C,), which of the candidates are kept, neither all nor none.
        gain_C: float64 (C,), what keeping each adds.
        interaction_CC: float (C, C), symmetric, 0 on the diagonal.

    Returns:
        bool (C,), with as many kept.

    Example:
        >>> exchange(np.array([True, False, False]), np.array([1.0, 2.0, 3.0]), np.zeros((3, 3))).tolist()
        [False, False, True]
    """
    gain_C = gain_C.copy()
    inside, outside = np.flatnonzero(is_kept_C), np.flatnonzero(~is_kept_C)
    rounding = _least_worth(gain_C)
    between_OI = interaction_CC[np.ix_(outside, inside)]
    for _ in range(10 * is_kept_C.size):
        worth_O = _worth(gain_C[outside], gain_C[inside], between_OI)
        least = max(rounding, worth_O.max() / 2)
        is_settled = True
        for at in np.argsort(-worth_O, kind="stable")[: np.count_nonzero(worth_O > least)]:
            loss_I = gain_C[inside] + between_OI[at]
            place = loss_I.argmin()
            if gain_C[outside[at]] - loss_I[place] <= least:
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
    exchanged_C = np.zeros_like(is_kept_C)
    exchanged_C[inside] = True
    return exchanged_C


def _least_worth(gain_C: NDArray[np.float64]) -> float:
    # of most of them: a few outliers must not hide what the others differ by
    return float(RELATIVE_ROUNDING * np.median(np.abs(gain_C)))


def _worth(
    gain_O: NDArray[np.float64], gain_I: NDArray[np.float64], between_OI: NDArray[np.floating]
) -> NDArray[np.float64]:
    """What the best exchange of each left-out candidate is worth."""
    least_O: NDArray[np.floating] = (between_OI + gain_I.astype(between_OI.dtype)).min(1)
    return gain_O - least_O


def spread_out(rows: Tensor, features_CD: Tensor) -> Tensor:
    """Leaves out every row that is similar to an earlier one that stays.

    Args:
        rows: int64 (C,), best first.
        features_CD: float (C, D), their features, of any length.

    Returns:
        int64 (at most C,), in the same order; any two have a cosine of at most MAX_COSINE.
    """
    unit_CD = torch.nn.functional.normalize(features_CD.float(), dim=1)
    is_similar_CC = ((unit_CD @ unit_CD.T) > MAX_COSINE).cpu().numpy()
    is_blocked_C = np.zeros(rows.numel(), dtype=bool)
    kept = []
    for index in range(rows.numel()):
        if not is_blocked_C[index]:
            kept.append(index)
            is_blocked_C |= is_similar_CC[index]
    return rows[torch.tensor(kept, dtype=torch.int64, device=rows.device)]


def _best_of_all(mask_N: Tensor, best_value: float, values: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
    """The best of all masks with as many samples as the given one, which wins ties."""
    rows_RK = torch.tensor(list(combinations(range(mask_N.numel()), int(mask_N.sum()))), device=mask_N.device)
    masks_RN = mask_N.new_zeros(rows_RK.shape[0], mask_N.numel()).scatter_(1, rows_RK, True)
    value_R = torch.cat([values(chunk_RN) for chunk_RN in torch.split(masks_RN, 64 * MASKS_AT_ONCE)])
    winner = int(value_R.argmax())
    if float(value_R[winner]) > best_value:
        return masks_RN[winner], float(value_R[winner])
    return mask_N, best_value


def halves(count: int) -> list[int]:
    """All, half of them, a quarter, ... and one.

    Example:
        >>> halves(5), halves(0)
        ([5, 2, 1], [])
    """
    return [count >> shift for shift in range(count.bit_length())]


def joint_swaps(mask_N: Tensor, added: Tensor, removed: Tensor) -> Tensor:
    """Masks with all pairs exchanged, half of them, a quarter, ... and one: bool (R, N)."""
    counts = halves(added.numel())
    trials_RN = mask_N.repeat(len(counts), 1)
    for trial_N, count in zip(trials_RN, counts, strict=True):
        trial_N[added[:count]] = True
        trial_N[removed[:count]] = False
    return trials_RN


def single_swaps(mask_N: Tensor, added: Tensor, removed: Tensor) -> Tensor:
    """Masks with one exchange each, every pair of the two lists: bool (R, N)."""
    trials_RN = mask_N.repeat(added.numel() * removed.numel(), 1)
    rows = torch.arange(trials_RN.shape[0], device=mask_N.device)
    trials_RN[rows, added.repeat_interleave(removed.numel())] = True
    trials_RN[rows, removed.repeat(added.numel())] = False
    return trials_RN
