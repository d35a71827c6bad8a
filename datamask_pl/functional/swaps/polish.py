"""The swap search that fits what is known of an objective and its budget.

Shapes: N samples, R masks, P candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.swaps import constrained, coverage, pooled
from datamask_pl.functional.swaps.search import Propose, swap_search


def polish(
    mask_N: Tensor,
    *,
    values: Callable[[Tensor], Tensor],
    gains: Callable[[Tensor], Tensor],
    features: Callable[[Tensor], Tensor] | None = None,
    interactions: Callable[[Tensor], pooled.Interactions] | None = None,
    covered: Callable[[Tensor, Tensor], coverage.CandidateCoverage] | None = None,
    constraint: Constrained | None = None,
    max_rounds: int = 100,
) -> tuple[Tensor, float]:
    """Improves a mask by swaps within its budget; of a handful of samples every mask is tried.

    The value never falls, except where the start leaves room in a budget of costs, which is filled first.

    Args:
        mask_N: bool (N,), where to start, allowed.
        values: masks bool (R, N) -> float64 (R,), the objective.
        gains: mask bool (N,) -> float64 (N,), f(S + i) - f(S - i) of each sample, or a proxy of it.
        features: rows int64 (C,) -> float (C, D), which tell similar candidates; None for no such test.
        interactions: see `PooledSwaps`; only where the gains are exact.
        covered: see `propose_by_coverage`; only where the gains are exact.
        constraint: which masks are allowed; None for those that keep as many samples.
        max_rounds: rounds of a search at most.

    Returns:
        The mask, bool (N,), allowed, and its value.
    """
    search = partial(swap_search, values=values, max_rounds=max_rounds)
    propose: Propose
    if covered is not None and mask_N.numel() > pooled.MAX_ENUMERATED_SAMPLES:
        propose = partial(coverage.propose_by_coverage, gains=gains, coverage=covered, constraint=constraint)
        mask_N, value = search(mask_N, propose, least_share_gained=coverage.LEAST_SHARE_GAINED)
        # no swap costs more than before: with costs there may be room left
        if constraint is None or not constraint.has_costs:
            return mask_N, value
    if constraint is not None:
        mask_N = constrained.fill_up(mask_N, constraint, gains)
        if constraint.rows_F.numel() <= constrained.MAX_ENUMERATED_SAMPLES:
            return swap_search(mask_N, lambda _: [constrained.allowed_masks(constraint)], values=values, max_rounds=1)
        return search(mask_N, constrained.ConstrainedSwaps(constraint, gains, features))
    if mask_N.numel() <= pooled.MAX_ENUMERATED_SAMPLES:
        return swap_search(mask_N, lambda _: [pooled.same_size_masks(mask_N)], values=values, max_rounds=1)
    if interactions is not None:
        propose = pooled.PooledSwaps(gains, interactions)
        return search(mask_N, propose, least_share_gained=pooled.LEAST_SHARE_GAINED)
    return search(mask_N, partial(pooled.propose_by_gains, gains=gains, features=features))
