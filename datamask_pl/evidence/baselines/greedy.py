"""Random, top-quality and greedy masks of a block.

The greedy masks maximise the raw, uncalibrated f(S) = quality_weight * Q(S) + (1 - quality_weight) * D(S). Each adds,
num_selected times, the sample with the largest gain, ties by row order. Q, D and their gains are normalised by the
final size of the set from the first sample on, except where a function says that another choice ends higher.

Shape suffixes: N samples, D features, B samples of a batch.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from datamask_pl.errors import ConfigError
from datamask_pl.evidence.baselines.inputs import check_budget, check_finite, check_inputs, mask_of

# Gains that are refreshed together: one gather of B rows costs little more than a gather of one, yet most of a larger
# batch would be thrown away.
_BATCH_SIZE = 8


def random_mask(num_samples: int, num_selected: int, *, generator: torch.Generator) -> Tensor:
    """A mask drawn uniformly from all masks of its size.

    Args:
        num_samples: size of the block.
        num_selected: samples to keep, in [1, num_samples].
        generator: source of the randomness; its device is the mask's.

    Returns:
        bool (N,), True = kept.

    Raises:
        BudgetError: If num_selected is outside [1, num_samples].

    Example:
        >>> int(random_mask(5, 2, generator=torch.Generator().manual_seed(0)).sum())
        2
    """
    check_budget(num_samples, num_selected)
    rows_N = torch.randperm(num_samples, generator=generator, device=generator.device)
    return mask_of(rows_N[:num_selected], num_samples)


def top_quality_mask(quality_N: Tensor, num_selected: int) -> Tensor:
    """The samples of highest quality, ties by row order.

    Args:
        quality_N: float (N,), higher is better.
        num_selected: samples to keep, in [1, N].

    Returns:
        bool (N,), True = kept.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a quality is not finite.

    Example:
        >>> top_quality_mask(torch.tensor([0.5, 0.9, 0.5]), 2)
        tensor([ True,  True, False])
    """
    check_budget(quality_N.shape[0], num_selected)
    check_finite("quality_N", quality_N)
    # A stable sort and not topk, whose choice among ties differs between devices.
    rows_N = torch.sort(quality_N, descending=True, stable=True).indices
    return mask_of(rows_N[:num_selected], quality_N.shape[0])


def lazy_greedy_facility_location(
    features_ND: Tensor,
    quality_N: Tensor,
    *,
    num_selected: int,
    quality_weight: float,
    max_similarity_bytes: int = 4_000_000_000,
) -> Tensor:
    """Greedy mask for quality and facility location, exact: it omits no neighbour.

    D(S) = (1/N) sum_v max_{i in S} max(0, x_v . x_i). A gain never grows while S does, so an old gain bounds the
    present one, and only the samples with the largest bounds are evaluated again.
    Source: Minoux 1978, accelerated greedy; here a few bounds are refreshed at once.

    Args:
        features_ND: float (N, D), rows of unit L2 norm. The similarities are kept in this dtype.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, in [1, N].
        quality_weight: lambda in [0, 1]; 1 is pure quality.
        max_similarity_bytes: largest N x N similarity matrix to allocate.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree, quality_weight is outside [0, 1], or the similarities would need more
            than max_similarity_bytes.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> lazy_greedy_facility_location(x, torch.zeros(3), num_selected=1, quality_weight=0.0)
        tensor([False,  True, False])
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, quality_weight)
    num_bytes = num_samples * num_samples * features_ND.element_size()
    if num_bytes > max_similarity_bytes:
        raise ConfigError(
            f"max_similarity_bytes allows {max_similarity_bytes:,} bytes of memory, but the similarities of "
            f"{num_samples:,} samples need {num_bytes:,}; raise it to that if the memory is there, or pass a smaller "
            "block."
        )
    similarity_NN = _similarities(features_ND)
    best_N = torch.zeros_like(similarity_NN[0])
    scale = (1.0 - quality_weight) / num_samples
    modular_N = quality_weight / num_selected * quality_N.double()
    modular = modular_N.tolist()

    gains = (modular_N + scale * similarity_NN.sum(dim=1).double()).tolist()
    # Entries are (-gain, row): the smallest is the largest gain, and of equal gains the first row.
    heap = [(-gain, row) for row, gain in enumerate(gains)]
    heapify(heap)
    size_at_evaluation = [0] * num_samples
    rows: list[int] = []
    while len(rows) < num_selected:
        if size_at_evaluation[heap[0][1]] == len(rows):
            row = heappop(heap)[1]
            rows.append(row)
            torch.maximum(best_N, similarity_NN[row], out=best_N)
            continue
        batch = _pop_stale(heap, size_at_evaluation, len(rows))
        gain_BN = similarity_NN[batch].sub_(best_N).clamp_(min=0.0)
        for row, coverage in zip(batch, gain_BN.sum(dim=1).tolist(), strict=True):
            size_at_evaluation[row] = len(rows)
            heappush(heap, (-(modular[row] + scale * coverage), row))
    return mask_of(torch.tensor(rows, device=features_ND.device), num_samples)


def greedy_pairwise(features_ND: Tensor, quality_N: Tensor, *, num_selected: int, quality_weight: float) -> Tensor:
    """Greedy mask for quality and pairwise similarity, in O(N D) a sample.

    D(S) = -(|sum x|^2 - sum |x|^2) / (K (K - 1)) over the kept samples; a subset of one sample has D = 0.

    A step adds the sample that gives the largest f with the present size in K's place, which is the sample i with the
    largest quality_weight q_i - (1 - quality_weight) 2 x_i . s / m, s being the sum of the m rows that are kept. With
    the final K from the start, the similarity to a few rows hardly counts, quality alone decides the early choices, and
    f ends lower (text embeddings, a tenth kept, quality_weight 0.05: -0.00255 against -0.00249).

    Args:
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, K, in [1, N].
        quality_weight: lambda in [0, 1]; 1 is pure quality.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree or quality_weight is outside [0, 1].

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> greedy_pairwise(x, torch.zeros(3), num_selected=2, quality_weight=0.0)
        tensor([ True, False,  True])
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, quality_weight)
    score_N = quality_weight * quality_N.double()
    # float64: thousands of float32 products are added one by one.
    similarity_N = torch.zeros_like(score_N)
    rows: list[int] = []
    for size in range(num_selected):
        scale = 2.0 * (1.0 - quality_weight) / max(1, size)
        row = int(torch.sub(score_N, similarity_N, alpha=scale).argmax())
        rows.append(row)
        similarity_N += features_ND @ features_ND[row]
        score_N[row] = -torch.inf
    return mask_of(torch.tensor(rows, device=features_ND.device), num_samples)


def greedy_disf(features_ND: Tensor, quality_N: Tensor, *, num_selected: int, quality_weight: float) -> Tensor:
    """Greedy mask for quality and the plain (not standardised) DiSF term, in O(N D) a sample.

    D(S) = -|C|_F^2, C = (1/K) sum z z^T over the kept samples, z = x - mean of the block. Adding sample i changes f by
    quality_weight q_i / K - (1 - quality_weight) (|z_i|^4 + 2 sum_{j in S} (z_i . z_j)^2) / K^2.

    Unlike for the pairwise term, the final K from the start ends no lower than the present size, on the same data.

    Args:
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, K, in [1, N].
        quality_weight: lambda in [0, 1]; 1 is pure quality.

    Returns:
        bool (N,), True = kept, on the features' device.

    Raises:
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
        ConfigError: If the shapes disagree or quality_weight is outside [0, 1].

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> greedy_disf(x, torch.zeros(4), num_selected=1, quality_weight=0.0)
        tensor([False, False, False,  True])
    """
    num_samples = check_inputs(features_ND, quality_N, num_selected, quality_weight)
    z_ND = features_ND - features_ND.mean(dim=0)
    scale = (1.0 - quality_weight) / num_selected**2
    gain_N = quality_weight / num_selected * quality_N.double()
    gain_N.sub_(z_ND.square().sum(dim=1).square(), alpha=scale)
    rows: list[int] = []
    for _ in range(num_selected):
        row = int(gain_N.argmax())
        rows.append(row)
        gain_N.sub_((z_ND @ z_ND[row]).square_(), alpha=2.0 * scale)
        gain_N[row] = -torch.inf
    return mask_of(torch.tensor(rows, device=features_ND.device), num_samples)


def _similarities(features_ND: Tensor) -> Tensor:
    """max(0, x_v . x_i), (N, N), written block by block so that nothing else of that size is allocated."""
    similarity_NN = features_ND.new_empty(len(features_ND), len(features_ND))
    for rows_BN, features_BD in zip(torch.split(similarity_NN, 1024), torch.split(features_ND, 1024), strict=True):
        torch.mm(features_BD, features_ND.T, out=rows_BN).clamp_(min=0.0)
    return similarity_NN


def _pop_stale(heap: list[tuple[float, int]], size_at_evaluation: list[int], size: int) -> list[int]:
    """Takes off the heap up to _BATCH_SIZE rows whose gain is old, until a fresh one is met."""
    batch: list[int] = []
    while heap and len(batch) < _BATCH_SIZE and size_at_evaluation[heap[0][1]] != size:
        batch.append(heappop(heap)[1])
    return batch
