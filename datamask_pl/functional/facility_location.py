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

# Samples whose lists are walked at once: 60 x 8192 float32 stays in a core's second-level cache.
LIST_ROWS = 8192
# Lists are walked this far before those that have ended are set aside.
COMPACT_EVERY = 12


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
    gain_TV = torch.empty_like(similarity_TV)
    from_here_V = torch.zeros_like(similarity_TV[0])
    # unbound once: taking a row costs as much as computing with it
    lists = [matrix.unbind(0)[::-1] for matrix in (similarity_TV, gain_TV, covered_TV, left_TV)]
    for similarity_V, gain_V, covered_V, left_V in zip(*lists, strict=True):
        torch.sub(similarity_V, from_here_V, out=gain_V)
        from_here_V = torch.addcmul(covered_V, left_V, from_here_V)
    gain_TV *= none_before_TV
    left_out_V = similarity_TV[-1] * none_before_TV[-1] * left_TV[-1]
    return ExpectedCoverage(from_here_V, gain_TV, left_out_V)


def nearest_kept_similarity(similarity_TV: Tensor, neighbor_TV: Tensor, masks_NR: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity of each sample to its nearest kept neighbour, as far as the lists reach.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        neighbor_TV: int32 (T, V), rows of the neighbours.
        masks_NR: bool (N, R), masks as columns, so that one look-up serves all masks.

    Returns:
        nearest_VR: (V, R), float32 or the wider type of the similarities, 0 where no neighbour in the list is kept.
        is_open_VR: bool (V, R), True where no neighbour in the list is kept.
    """
    num_neighbors, num_samples = neighbor_TV.shape
    device = masks_NR.device
    # bytes until the end: how far each walk went, and whether it goes on
    depth_VR = torch.zeros(
        num_samples, masks_NR.shape[1], dtype=torch.uint8 if num_neighbors < 256 else torch.int32, device=device
    )
    is_open_VR = torch.ones(num_samples, masks_NR.shape[1], dtype=torch.uint8, device=device)
    kept_NR = masks_NR.view(torch.uint8)
    rows, walked_VR, open_VR = torch.arange(num_samples, device=device), depth_VR.clone(), is_open_VR.clone()
    for t in range(num_neighbors):
        if t and t % COMPACT_EVERY == 0:  # most lists end early: go on with the others alone
            depth_VR.index_copy_(0, rows, walked_VR)
            is_open_VR.index_copy_(0, rows, open_VR)
            left = open_VR.any(1).nonzero().squeeze(1)
            rows, walked_VR, open_VR = (matrix.index_select(0, left) for matrix in (rows, walked_VR, open_VR))
            if rows.numel() == 0:
                break
        neighbor_V = neighbor_TV[t].index_select(0, rows)
        open_VR.bitwise_and_(kept_NR.index_select(0, neighbor_V).bitwise_not_())
        walked_VR.add_(open_VR)
    depth_VR.index_copy_(0, rows, walked_VR)
    is_open_VR.index_copy_(0, rows, open_VR)
    is_open = is_open_VR.view(torch.bool)
    similarity_VT = similarity_TV.T.to(torch.promote_types(similarity_TV.dtype, torch.float32))
    nearest_VR = similarity_VT.gather(1, depth_VR.clamp_(max=num_neighbors - 1).long())
    return nearest_VR.masked_fill_(is_open, 0.0), is_open


def highest_similarity(queries_VD: Tensor, kept_KD: Tensor) -> Tensor:
    """max(0, highest cosine to a kept sample) by brute force, 2 V K D flops: float32 (V,)."""
    best_V = queries_VD.new_zeros(queries_VD.shape[0])
    for start in range(0, kept_KD.shape[0], LIST_ROWS):
        best_V = torch.maximum(best_V, (queries_VD @ kept_KD[start : start + LIST_ROWS].T).amax(1))
    return best_V
