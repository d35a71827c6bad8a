"""Local search by swaps: masks are proposed, valued, and kept if they are better, until none is.

Shapes: N samples, R masks, C candidates, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from datamask_pl.functional.kernels import first_largest

# Samples looked at on either side of the threshold in a round.
NUM_CANDIDATES = 512
# Where no set of swaps is better, every swap between this many on either side is tried.
NUM_SINGLES = 4
# Masks that are valued in one call.
MASKS_AT_ONCE = 16
# Two candidates of one side with a higher cosine than this are not swapped together.
MAX_COSINE = 0.4


# What a round may turn a mask bool (N,) into: sets of masks, the most promising set first. A set comes in parts,
# bool (R, N), that are valued in one call each.
Propose = Callable[[Tensor], Iterable[Iterable[Tensor]]]


def swap_search(
    mask_N: Tensor,
    propose: Propose,
    *,
    values: Callable[[Tensor], Tensor],
    least_share_gained: float = 0.0,
    max_rounds: int = 100,
) -> tuple[Tensor, float]:
    """Improves a mask as long as the proposed ones contain a better one. The value never falls.

    Args:
        mask_N: bool (N,), where to start; it is not changed.
        propose: proposes masks that are allowed. The first set with a better one ends the round.
        values: masks bool (R, N) -> float64 (R,), the objective.
        least_share_gained: a round that gains less than this share of what the best one did is the last.
        max_rounds: rounds at most.

    Returns:
        The mask, bool (N,), and its value.
    """
    value, most_gained = float(values(mask_N[None])[0]), 0.0
    for _ in range(max_rounds):
        before = value
        for trials in propose(mask_N):
            for trials_RN in trials:
                value_R = values(trials_RN)
                winner = int(value_R.argmax())
                if float(value_R[winner]) > value:
                    mask_N, value = trials_RN[winner], float(value_R[winner])
            if value > before:
                break
        gained = value - before
        most_gained = max(most_gained, gained)
        if not gained > 0 or gained < least_share_gained * most_gained:
            break
    return mask_N, value


def candidates(score_N: Tensor, is_outside_N: Tensor, is_inside_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Samples to add, of the highest score, and to remove, of the lowest: both int64, best first, ties by row.

    Args:
        score_N: float (N,), finite.
        is_outside_N: bool (N,), which may be added.
        is_inside_N: bool (N,), which may be removed.
        count: of either side, at most.
    """
    outside, inside = is_outside_N.nonzero().squeeze(1), is_inside_N.nonzero().squeeze(1)
    added = outside[first_largest(score_N[outside], count)]
    return added, inside[first_largest(-score_N[inside], count)]


def spread_out(rows: Tensor, features_CD: Tensor) -> Tensor:
    """Drops every row that is similar to an earlier one that stays.

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


def halves(count: int) -> list[int]:
    """All, half of them, a quarter, ... and one.

    Example:
        >>> halves(5), halves(0)
        ([5, 2, 1], [])
    """
    return [count >> shift for shift in range(count.bit_length())]


def joint_swaps(mask_N: Tensor, added: Tensor, removed: Tensor) -> Tensor:
    """Masks with all pairs swapped, half of them, a quarter, ... and one: bool (R, N).

    Args:
        mask_N: bool (N,).
        added: int64, as many as are removed, or none.
        removed: int64.
    """
    counts = halves(removed.numel())
    trials_RN = mask_N.repeat(len(counts), 1)
    for trial_N, count in zip(trials_RN, counts, strict=True):
        trial_N[added[:count]] = True
        trial_N[removed[:count]] = False
    return trials_RN


def single_swaps(mask_N: Tensor, added: Tensor, removed: Tensor) -> Tensor:
    """Masks with one swap each, every pair of the two lists: bool (R, N)."""
    trials_RN = mask_N.repeat(added.numel() * removed.numel(), 1)
    rows = torch.arange(trials_RN.shape[0], device=mask_N.device)
    trials_RN[rows, added.repeat_interleave(removed.numel())] = True
    trials_RN[rows, removed.repeat(added.numel())] = False
    return trials_RN


def in_parts(masks_RN: Tensor) -> Iterable[Tensor]:
    """Masks as `values` takes them, a few at once; none if there are none."""
    return torch.split(masks_RN, MASKS_AT_ONCE) if len(masks_RN) else ()
