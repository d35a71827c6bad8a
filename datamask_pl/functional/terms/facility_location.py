"""Facility location: how similar, on average, every sample of the block is to the most similar kept one.

Both the value and the multilinear extension read a table of each sample's nearest neighbours. The most similar kept
sample of v is the first kept one in v's list, so a value needs no n x k maxima, and with independent inclusion the
chance that it is the t-th is p_(t) times the chance that none before it is kept.

Shapes: N samples, V samples whose lists are held, T neighbours, R masks, K kept samples, D features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.kernels import unpack_bits

# Samples whose lists are walked at once: a row of them takes longer than its operation's start, a matrix 2 MiB.
LIST_ROWS = 8192
# Lists are walked this far before those that have ended are set aside.
COMPACT_EVERY = 16
# Chances below this count nothing, and are looked for after so many neighbours: smaller ones would become subnormal.
NEGLIGIBLE_CHANCE, LOOK_EVERY = 2.0**-60, 4


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


class WalkBuffers:
    """Memory that walks along lists use again and again; fresh pages would take as long as the walk.

    Args:
        num_neighbors: T.
        num_samples: V, the longest chunk.
        dtype: float, of the probabilities.
        device: where.
    """

    def __init__(self, num_neighbors: int, num_samples: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._num_neighbors = num_neighbors
        size = num_neighbors * num_samples
        # one by one: where a process's memory is limited, small pieces are found more easily
        self._floats = [torch.empty(size, dtype=dtype, device=device) for _ in range(4)]
        self._neighbor = torch.empty(size, dtype=torch.int32, device=device)
        self._addend = torch.empty(size, dtype=torch.float64, device=device)
        self._of_size: dict[int, WalkMatrices] = {}

    def of_size(self, num_samples: int) -> WalkMatrices:
        """The same memory as matrices for V samples, V at most the longest."""
        if num_samples not in self._of_size:
            shape = self._num_neighbors, num_samples
            flat = (*self._floats, self._neighbor, self._addend)
            self._of_size[num_samples] = WalkMatrices(*(values[: math.prod(shape)].view(shape) for values in flat))
        return self._of_size[num_samples]


class WalkMatrices:
    """Matrices (T, V) to write into, and their rows, since taking a row takes half as long as adding to it.

    Args:
        p_TV: float, for probabilities, which become what they cover.
        left_TV: float.
        none_before_TV: float.
        after_TV: float, which becomes the gains.
        neighbor_TV: int32, for the rows of the neighbours.
        addend_TV: float64, for numbers that are added up.
    """

    def __init__(
        self,
        p_TV: Tensor,
        left_TV: Tensor,
        none_before_TV: Tensor,
        after_TV: Tensor,
        neighbor_TV: Tensor,
        addend_TV: Tensor,
    ) -> None:
        self.p_TV, self.left_TV, self.none_before_TV, self.after_TV = p_TV, left_TV, none_before_TV, after_TV
        self.neighbor_TV, self.addend_TV = neighbor_TV, addend_TV
        self.covered_rows, self.left_rows, self.none_before_rows, self.after_rows = (
            matrix.unbind(0) for matrix in (p_TV, left_TV, none_before_TV, after_TV)
        )


def expected_coverage(
    similarity_TV: Tensor, p_TV: Tensor, *, scale: float = 1.0, matrices: WalkMatrices | None = None
) -> ExpectedCoverage:
    """E of the nearest kept neighbour's similarity, and its derivatives, for lists walked from the near end.

    With B_t the expectation over the list from t on, B_t = p_t s_t + (1 - p_t) B_{t+1} and
    dB_1 / dp_t = prod_{u < t} (1 - p_u) (s_t - B_{t+1}). No division: p may be exactly 0 or 1. Every operation is
    rounded by itself, so that a sample's numbers are the same in any chunk.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        p_TV: float (T, V), inclusion probability of each neighbour.
        scale: a power of two, by which the derivatives and the bound are multiplied.
        matrices: memory for the work and the result, new if None; `p_TV` may be part of it, and is then lost.

    Returns:
        The value, its derivatives, and the bound on the truncation.

    Source: Calinescu et al. 2011 for the extension; the recursion is ours.

    Example:
        >>> coverage = expected_coverage(torch.tensor([[1.0], [0.5]]), torch.tensor([[0.5], [0.5]]))
        >>> coverage.value_V, coverage.gain_TV.flatten(), coverage.left_out_V
        (tensor([0.6250]), tensor([0.7500, 0.2500]), tensor([0.1250]))
    """
    num_neighbors, num_samples = p_TV.shape
    if matrices is None:
        buffers = WalkBuffers(num_neighbors, num_samples, dtype=p_TV.dtype, device=p_TV.device)
        matrices = buffers.of_size(num_samples)
    similarity_TV = similarity_TV.to(p_TV.dtype)
    # 1 - p_t, then p_t s_t: p_TV may be the same memory as the latter, and is not read again
    torch.neg(p_TV, out=matrices.left_TV).add_(1.0)
    torch.mul(p_TV, similarity_TV, out=matrices.p_TV)
    covered, left = matrices.covered_rows, matrices.left_rows
    # prod_{u < t} (1 - p_u), row by row: no operation along the first dimension is as fast
    none_before = matrices.none_before_rows
    none_before[0].fill_(scale)
    for t in range(1, num_neighbors):
        torch.mul(none_before[t - 1], left[t - 1], out=none_before[t])
        if t % LOOK_EVERY == 0:
            torch.threshold_(none_before[t], NEGLIGIBLE_CHANCE * scale, 0.0)
    # B_{t+1}, from the far end
    after = matrices.after_rows
    after[-1].zero_()
    for t in range(num_neighbors - 1, 0, -1):
        torch.mul(left[t], after[t], out=after[t - 1]).add_(covered[t])
    value_V = (left[0] * after[0]).add_(covered[0])
    # the derivatives take the place of B_{t+1}
    gain_TV = torch.sub(similarity_TV, matrices.after_TV, out=matrices.after_TV).mul_(matrices.none_before_TV)
    left_out_V = similarity_TV[-1] * none_before[-1] * left[-1]
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


# The number of a row that is not a candidate, for `candidate_entries`.
OTHER_KEPT, OTHER = -1, -2


def candidate_entries(similarity_TV: Tensor, candidate_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where candidates are more similar to a sample than all kept samples that are no candidates.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        candidate_TV: int32 (T, V), which candidate each neighbour is, or OTHER_KEPT, or OTHER.

    Returns:
        sample_E: int64 (E,), not decreasing.
        candidate_E: int64 (E,), the nearest first for each sample.
        more_E: float64 (E,), by how much it is more similar, positive; in all where no other is kept.
    """
    is_other_TV = candidate_TV == OTHER_KEPT
    has_other_V, first_V = is_other_TV.byte().max(0)
    other_V = similarity_TV.gather(0, first_V[None])[0].masked_fill_(has_other_V == 0, 0.0)
    is_entry_TV = (candidate_TV >= 0) & (similarity_TV > other_V)
    sample_E, place_E = is_entry_TV.T.nonzero(as_tuple=True)
    more_E = similarity_TV[place_E, sample_E].double() - other_V[sample_E].double()
    return sample_E, candidate_TV[place_E, sample_E].long(), more_E
