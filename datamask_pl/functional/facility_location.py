"""Facility location: how similar, on average, every sample of the block is to the most similar kept one.

Both the value and the multilinear extension read a table of each sample's nearest neighbours. The most similar kept
sample of v is the first kept one in v's list, so a value needs no n x k maxima, and with independent inclusion the
chance that it is the t-th is p_(t) times the chance that none before it is kept.

Shapes: N samples, V samples whose lists are held, T neighbours, R masks, K kept samples, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.device import unpack_bits

# Samples whose lists are walked at once: 60 x 8192 float32 stays in a core's second-level cache.
LIST_ROWS = 8192
# Lists are walked this far before those that have ended are set aside.
COMPACT_EVERY = 16


@dataclass(frozen=True)
class ExpectedCoverage:
    """The expectation's parts over the samples V whose lists are held.

    Attributes:
        value_V: (V,), E of the similarity to the nearest kept neighbour in the list, 0 if none is kept.
        gain_TV: (T, V), derivative of value_V with respect to the inclusion probability of each neighbour.
        left_out_V: (V,), upper bound on what samples behind the end of the list could add to value_V.
    """

    value_V: Tensor
    gain_TV: Tensor
    left_out_V: Tensor


def expected_coverage(similarity_TV: Tensor, p_TV: Tensor) -> ExpectedCoverage:
    """E of the nearest kept neighbour's similarity, and its derivatives, for lists walked from the near end.

    With B_t the expectation over the list from t on, B_t = p_t s_t + (1 - p_t) B_{t+1} and
    dB_1 / dp_t = prod_{u < t} (1 - p_u) (s_t - B_{t+1}). No division: p may be exactly 0 or 1.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        p_TV: float (T, V), inclusion probability of each neighbour.

    Returns:
        The value, its derivatives, and the bound on the truncation.

    Source: Calinescu et al. 2011 for the extension; the recursion is ours.

    Example:
        >>> coverage = expected_coverage(torch.tensor([[1.0], [0.5]]), torch.tensor([[0.5], [0.5]]))
        >>> coverage.value_V, coverage.gain_TV.flatten(), coverage.left_out_V
        (tensor([0.6250]), tensor([0.7500, 0.2500]), tensor([0.1250]))
    """
    left_TV = 1 - p_TV
    none_before_TV = torch.ones_like(p_TV)
    torch.cumprod(left_TV[:-1], dim=0, out=none_before_TV[1:])
    covered_TV = p_TV * similarity_TV
    # B_{t+1}; one operation a row, since its start takes longer than itself, and so does taking a row
    after_TV = torch.empty_like(similarity_TV)
    after_TV[-1] = 0.0
    lists = [matrix.unbind(0)[::-1] for matrix in (covered_TV, left_TV, after_TV)]
    for covered_V, left_V, after_V, before_V in zip(*(rows[:-1] for rows in lists), lists[2][1:], strict=True):
        torch.addcmul(covered_V, left_V, after_V, out=before_V)
    value_V = torch.addcmul(covered_TV[0], left_TV[0], after_TV[0])
    gain_TV = torch.sub(similarity_TV, after_TV, out=after_TV).mul_(none_before_TV)
    left_out_V = similarity_TV[-1] * none_before_TV[-1] * left_TV[-1]
    return ExpectedCoverage(value_V, gain_TV, left_out_V)


def nearest_kept_similarity(
    similarity_TV: Tensor, neighbor_TV: Tensor, packed_NB: Tensor, num_masks: int
) -> tuple[Tensor, Tensor]:
    """Similarity of each sample to its nearest kept neighbour, as far as the lists reach.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        neighbor_TV: int32 (T, V), rows of the neighbours.
        packed_NB: from `pack_bits`, masks as columns, so that one look-up serves all masks.
        num_masks: R.

    Returns:
        nearest_VR: (V, R), float32 or the wider type of the similarities, 0 where no neighbour in the list is kept.
        is_open_VR: bool (V, R), True where no neighbour in the list is kept.
    """
    num_neighbors, num_samples = neighbor_TV.shape
    # the first kept neighbour is the t-th: T - t, and 0 where there is none
    small = torch.uint8 if num_neighbors < 2**8 else torch.int32
    height_VR = torch.zeros(num_samples, num_masks, dtype=small, device=packed_NB.device)
    rows, walked_VR = None, height_VR
    for t in range(num_neighbors):
        if t and t % COMPACT_EVERY == 0:  # many lists end early: go on with the others alone
            if rows is not None:
                height_VR[rows] = walked_VR
            rows = (height_VR == 0).any(1).nonzero().squeeze(1)
            walked_VR = height_VR[rows]
            if rows.numel() == 0:
                break
        places = neighbor_TV[t] if rows is None else neighbor_TV[t, rows]
        is_kept_VR = unpack_bits(packed_NB.index_select(0, places), num_masks)
        torch.maximum(walked_VR, is_kept_VR.to(small).mul_(num_neighbors - t), out=walked_VR)
    if rows is not None:
        height_VR[rows] = walked_VR
    dtype = torch.promote_types(similarity_TV.dtype, torch.float32)
    none_1V = similarity_TV.new_zeros(1, num_samples)
    nearest_RV = torch.cat([similarity_TV, none_1V]).to(dtype).gather(0, num_neighbors - height_VR.T.long())
    return nearest_RV.T, height_VR == 0
