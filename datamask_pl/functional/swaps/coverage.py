"""Swaps where a sample is covered by the most similar kept one, as in facility location.

A local search over swaps of one for one, as for k-medoids, but many at a time. Adding a and removing r gains

    gain_a - loss_r + sum over samples v whose nearest kept one is r of max(0, min(s_va, first_v) - second_v),

with first_v and second_v the similarities to the nearest and second nearest kept one: what a covers of what r leaves.

Shapes: N samples, P candidates, E entries, V samples with entries, B swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.swaps import constrained, search

# Candidates on either side of the threshold: at least so many, and so many of all samples.
MIN_CANDIDATES, CANDIDATE_SHARE = 1024, 1 / 64
# A round that raises the value by less than this share of what the best one did is the last.
LEAST_SHARE_GAINED = 1 / 64
# Swaps that gain less than this share of the median removal loss, or of the largest number, are rounding.
RELATIVE_ROUNDING, LARGEST_ROUNDING = 1e-6, 1e-13


class CandidateCoverage(NamedTuple):
    """Which samples candidates cover better than the kept samples that are no candidates do.

    Attributes:
        sample_E: int64 (E,), a number of the covered sample; entries of one sample are next to each other.
        candidate_E: int64 (E,), the candidate.
        gain_E: float64 (E,), positive, what the sample adds if this candidate is its nearest; not increasing among the
            entries of a sample.
        own_gain_P: float64 (P,), what keeping a candidate adds whatever else is kept.
    """

    sample_E: NDArray[np.int64]
    candidate_E: NDArray[np.int64]
    gain_E: NDArray[np.float64]
    own_gain_P: NDArray[np.float64]


class Kinds(NamedTuple):
    """Which candidates may be swapped for which.

    Attributes:
        group_P: int64 (P,); only candidates of one group are.
        cost_P: float64 (P,); none comes in for one that costs less.
    """

    group_P: NDArray[np.int64]
    cost_P: NDArray[np.float64]


class _Nearest(NamedTuple):
    """The two nearest kept candidates of every sample; gain 0 and candidate -1 where there is none."""

    first_V: NDArray[np.float64]
    second_V: NDArray[np.float64]
    first_candidate_V: NDArray[np.int64]
    second_candidate_V: NDArray[np.int64]


class _Swaps(NamedTuple):
    """Swaps, of the largest gain first; no candidate is added twice."""

    added_B: NDArray[np.int64]
    removed_B: NDArray[np.int64]


def propose_by_coverage(
    mask_N: Tensor,
    *,
    gains: Callable[[Tensor], Tensor],
    coverage: Callable[[Tensor, Tensor], CandidateCoverage],
    constraint: Constrained | None,
) -> Iterator[Iterable[Tensor]]:
    """Proposes the mask after all swaps among the candidates next to the threshold, or none where no swap gains.

    Args:
        mask_N: bool (N,), allowed.
        gains: mask bool (N,) -> float64 (N,), f(S + i) - f(S - i) of each sample.
        coverage: mask bool (N,) and rows int64 (P,) -> what these candidates cover beyond the mask's other samples.
        constraint: which masks are allowed; None for those that keep as many. Samples are swapped within groups, for
            those that cost no less.
    """
    count = max(MIN_CANDIDATES, int(CANDIDATE_SHARE * mask_N.numel()))
    kinds = None
    if constraint is None:
        rows_P = torch.cat(search.candidates(gains(mask_N), ~mask_N, mask_N, count))
    else:
        net_gain_N = constrained.net_gains(gains(mask_N), constraint)
        rows_P = torch.cat(constrained.candidates(mask_N, constraint, net_gain_N, count))
        kinds = Kinds(*constrained.groups_and_costs(rows_P, constraint))
    swapped_P = swap_covered(mask_N[rows_P].cpu().numpy(), coverage(mask_N, rows_P), kinds=kinds)
    trial_N = mask_N.clone()
    trial_N[rows_P] = torch.from_numpy(swapped_P).to(mask_N.device)
    if not torch.equal(trial_N, mask_N):
        yield [trial_N[None]]


def swap_covered(
    is_kept_P: NDArray[np.bool_], coverage: CandidateCoverage, *, kinds: Kinds | None = None, max_rounds: int = 1000
) -> NDArray[np.bool_]:
    """Swaps candidates one for one until no swap of two gains.

    A round finds the best swap of every candidate outside, and makes those that together gain at least the sum of what
    each does: no two cover more of the same sample, and no two remove its nearest or second nearest one.

    Args:
        is_kept_P: bool (P,), which of the candidates are kept.
        coverage: of the candidates.
        kinds: which may be swapped for which; None if all may. Where costs differ some swaps may be missed.
        max_rounds: rounds at most.

    Returns:
        bool (P,), with as many kept.

    Source: the gain of a swap is computed as in FastPAM (Schubert and Rousseeuw 2019), here for lists; that many are
    made at once is ours.

    Example:
        >>> coverage = CandidateCoverage(np.array([0, 0]), np.array([1, 0]), np.array([0.9, 0.4]), np.zeros(2))
        >>> swap_covered(np.array([True, False]), coverage).tolist()
        [False, True]
    """
    is_kept_P = is_kept_P.copy()
    is_start_E = np.diff(coverage.sample_E, prepend=-1) != 0
    coverage = coverage._replace(sample_E=np.cumsum(is_start_E) - 1)
    start_V = np.flatnonzero(is_start_E)
    if kinds is None:
        kinds = Kinds(np.zeros(is_kept_P.size, dtype=np.int64), np.ones(is_kept_P.size))
    for _ in range(max_rounds):
        nearest = _nearest(is_kept_P, coverage, start_V.size)
        swaps = _best_swaps(is_kept_P, coverage, nearest, kinds)
        if swaps.added_B.size == 0:
            break
        made_B = _compatible(swaps, is_kept_P.size, coverage, nearest, start_V)
        is_kept_P[swaps.added_B[made_B]] = True
        is_kept_P[swaps.removed_B[made_B]] = False
    return is_kept_P


def _nearest(is_kept_P: NDArray[np.bool_], coverage: CandidateCoverage, num_samples: int) -> _Nearest:
    kept = np.flatnonzero(is_kept_P[coverage.candidate_E])
    sample = coverage.sample_E[kept]
    is_first = np.diff(sample, prepend=-1) != 0
    is_second = ~is_first & np.concatenate([[False], is_first[:-1]])
    gain_2V, candidate_2V = np.zeros((2, num_samples)), np.full((2, num_samples), -1, dtype=np.int64)
    for place, is_it in enumerate((is_first, is_second)):
        gain_2V[place, sample[is_it]] = coverage.gain_E[kept[is_it]]
        candidate_2V[place, sample[is_it]] = coverage.candidate_E[kept[is_it]]
    return _Nearest(*gain_2V, *candidate_2V)


def _best_swaps(is_kept_P: NDArray[np.bool_], coverage: CandidateCoverage, nearest: _Nearest, kinds: Kinds) -> _Swaps:
    """The best swap of each candidate outside, as far as it gains; the gains are those of FastPAM.

    It is with the kept one of least removal loss, or with one whose samples the candidate covers. As all would choose
    the same one of least loss, the best candidate is matched with that, the second best with the next, and so on.
    """
    num_candidates = is_kept_P.size
    # 1. entries that can count: of candidates outside, better than the second nearest kept one
    is_entry_E = ~is_kept_P[coverage.candidate_E] & (coverage.gain_E > nearest.second_V[coverage.sample_E])
    sample, candidate = coverage.sample_E[is_entry_E], coverage.candidate_E[is_entry_E]
    covered, first, second = coverage.gain_E[is_entry_E], nearest.first_V[sample], nearest.second_V[sample]
    holder = nearest.first_candidate_V[sample]

    # 2. what adding a candidate gains, and what removing one loses, each by itself
    more_P = np.bincount(candidate, weights=np.maximum(covered - first, 0.0), minlength=num_candidates)
    # the first place is for samples that no candidate holds
    less_P = np.bincount(
        nearest.first_candidate_V + 1, weights=nearest.first_V - nearest.second_V, minlength=num_candidates + 1
    )[1:]
    gain_P, loss_P = coverage.own_gain_P + more_P, coverage.own_gain_P + less_P

    # 3. of both together: what the one covers of the samples that the other leaves
    is_held = holder >= 0
    pairs, pair = np.unique(candidate[is_held] * num_candidates + holder[is_held], return_inverse=True)
    saved = np.bincount(pair, weights=(np.minimum(covered, first) - second)[is_held], minlength=pairs.size)
    matched, partners = _match(is_kept_P, gain_P, loss_P, kinds.group_P)
    added = np.concatenate([matched, pairs // num_candidates])
    removed = np.concatenate([partners, pairs % num_candidates])
    gain = gain_P[added] - loss_P[removed] + np.concatenate([np.zeros(matched.size), saved])

    # 4. the best allowed swap of each candidate
    is_allowed = kinds.group_P[added] == kinds.group_P[removed]
    is_allowed &= (kinds.cost_P[added] <= kinds.cost_P[removed]) & (gain > _rounding(is_kept_P, gain_P, loss_P))
    added, removed, gain = added[is_allowed], removed[is_allowed], gain[is_allowed]
    order = np.lexsort((-gain, added))
    best = order[np.diff(added[order], prepend=-1) != 0]
    best = best[np.argsort(-gain[best], kind="stable")]
    return _Swaps(added[best], removed[best])


def _rounding(is_kept_P: NDArray[np.bool_], gain_P: NDArray[np.float64], loss_P: NDArray[np.float64]) -> float:
    typical = float(np.median(np.abs(loss_P[is_kept_P]))) if is_kept_P.any() else 0.0
    largest = float(max(np.abs(gain_P).max(initial=0.0), np.abs(loss_P).max(initial=0.0)))
    return max(RELATIVE_ROUNDING * typical, LARGEST_ROUNDING * largest)


def _match(
    is_kept_P: NDArray[np.bool_],
    gain_P: NDArray[np.float64],
    loss_P: NDArray[np.float64],
    group_P: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The candidate of a group that gains most and the one that loses least, the second and the second, and so on."""
    sides = []
    for candidates, order_P in ((np.flatnonzero(~is_kept_P), -gain_P), (np.flatnonzero(is_kept_P), loss_P)):
        ordered = candidates[np.lexsort((order_P[candidates], group_P[candidates]))]
        group = group_P[ordered]
        sides.append((ordered, group, np.arange(ordered.size) - np.searchsorted(group, group)))
    (added, group, place), (removed, group_of_removed, _) = sides
    partner = np.searchsorted(group_of_removed, group) + place
    has_partner = partner < np.searchsorted(group_of_removed, group, side="right")
    return added[has_partner], removed[partner[has_partner]]


def _compatible(
    swaps: _Swaps,
    num_candidates: int,
    coverage: CandidateCoverage,
    nearest: _Nearest,
    start_V: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Swaps that do not touch each other: bool (B,). A swap survives if it is the first at every sample it touches."""
    turn_B = np.arange(swaps.added_B.size)
    last = turn_B.size  # the turn of who does not take part; the last place is that of candidate -1
    added_turn_P, removed_turn_P = np.full((2, num_candidates + 1), last)
    added_turn_P[swaps.added_B] = turn_B
    # 1. several swaps may remove one candidate: the first does
    np.minimum.at(removed_turn_P, swaps.removed_B, turn_B)
    is_made_B: NDArray[np.bool_] = removed_turn_P[swaps.removed_B] == turn_B

    # 2. of several that would cover one sample better than it is now, only the first keeps what it gains there
    if start_V.size:
        gains_E = coverage.gain_E > nearest.first_V[coverage.sample_E]
        turn_E = np.where(gains_E, added_turn_P[coverage.candidate_E], last)
        first_turn_V = np.minimum.reduceat(turn_E, start_V)
        is_made_B[turn_E[(turn_E < last) & (turn_E > first_turn_V[coverage.sample_E])]] = False

    # 3. of two that remove a sample's nearest and second nearest one, the later would lose more than it counts
    turn_2V = removed_turn_P[np.stack([nearest.first_candidate_V, nearest.second_candidate_V])]
    is_made_B[turn_2V[(turn_2V < last) & (turn_2V > turn_2V.min(0))]] = False
    return is_made_B
