"""Sums of the features that masks keep, which the ranks of a ground set share.

In a large ground set a pass over all features for every mask costs more than finding out in what masks differ: a mask
close to the one seen last is reached by its differences. Features are then rounded to a grid on which all sums are
exact, so that a sum has the same bits however it was reached.

Shapes: R masks, N samples, C samples that changed, D features.
"""

from __future__ import annotations

from torch import Tensor

from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.terms.pairwise import mask_sums
from datamask_pl.objectives.ground_set import GroundSet

MIN_SAMPLES_OF_DIFFERENCES = 65_536
# Masks that differ in more than one sample in so many are not close.
SAMPLES_PER_CHANGE = 128


def of_probabilities(p_N: Tensor, ground: GroundSet) -> Tensor:
    """Sum of p_i x_i: float64 (D,). Collective over `ground.shares.ranks`.

    Args:
        p_N: float64 (N,), inclusion probabilities, or a mask as 0 and 1.
        ground: the samples.
    """
    if _knows_differences(ground) and bool(((p_N == 0) | (p_N == 1)).all()):
        return of_masks((p_N == 1)[None], ground)[0]
    return _in_one_pass(p_N[None], ground)[0]


def of_masks(masks_RN: Tensor, ground: GroundSet) -> Tensor:
    """Sum of the features that each mask keeps: float64 (R, D). Collective over `ground.shares.ranks`.

    Args:
        masks_RN: bool (R, N).
        ground: the samples; the mask seen last, and its sum, are kept with it.
    """
    if not _knows_differences(ground):
        return _in_one_pass(masks_RN, ground)
    last: list[tuple[Tensor, Tensor]] = ground.shares.cached("last_mask_and_sum", list)
    max_changed = ground.num_samples // SAMPLES_PER_CHANGE
    if not last or int((masks_RN[0] ^ last[0][0]).sum()) > max_changed:
        last[:] = [(masks_RN[0].clone(), _exact(masks_RN[:1], ground)[0])]
    last_N, last_D = last[0]
    changed = [(mask_N ^ last_N).nonzero().squeeze(1) for mask_N in masks_RN]
    far = [index for index, rows in enumerate(changed) if rows.numel() > max_changed]
    sums_RD = last_D.repeat(len(masks_RN), 1)
    for index, rows in enumerate(changed):
        if rows.numel() <= max_changed:
            # so few rows that every rank takes them all
            signs_C = masks_RN[index, rows].double() - last_N[rows].double()
            sums_RD[index] += signs_C @ round_to_grid(ground.features(rows), bound=ground.num_samples)
    if far:
        sums_RD[far] = _exact(masks_RN[far], ground)
    last[:] = [(masks_RN[0].clone(), sums_RD[0].clone())]
    return sums_RD


def _knows_differences(ground: GroundSet) -> bool:
    return ground.num_samples >= MIN_SAMPLES_OF_DIFFERENCES


def _exact(masks_RN: Tensor, ground: GroundSet) -> Tensor:
    bound = ground.num_samples
    return ground.shares.sum_over_slices(
        lambda rows: masks_RN[:, rows].double() @ round_to_grid(ground.features(rows), bound=bound), bound=bound
    )


def _in_one_pass(weights_RN: Tensor, ground: GroundSet) -> Tensor:
    return ground.shares.sum_over_slices(
        lambda rows: mask_sums(ground.features(rows), weights_RN[:, rows]), bound=ground.num_samples
    )
