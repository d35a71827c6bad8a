"""One entry to the search for nearest neighbours: exact, or by clusters for a recall.

Shapes: N samples, V samples whose lists are wanted, P samples of a panel, C clusters, T neighbours, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from datamask_pl.functional.neighbors import inverted_file
from datamask_pl.functional.neighbors.exact import nearest_neighbors
from datamask_pl.functional.neighbors.kmeans import nearest_center
from datamask_pl.functional.neighbors.pairs import Features
from datamask_pl.functional.threads import give_back_memory

# Freed memory of the search is given back after so many panels, while the lists fill.
PANELS_PER_TRIM = 16


class NeighborLists(NamedTuple):
    """Nearest neighbours of some samples.

    Attributes:
        similarity_TV: (T, V), max(0, cosine), not increasing along T; float16 where the search was approximate.
        neighbor_TV: int32 (T, V), rows of the neighbours, the sample itself first.
        rows_V: int64 (V,), the samples.
        recall: share of true neighbours that are in the lists; 1 where the search was exact.
        edges: where the order of all samples may be cut into shares; a sample's list does not depend on the share.
    """

    similarity_TV: Tensor
    neighbor_TV: Tensor
    rows_V: Tensor
    recall: float
    edges: list[int]


def neighbors(
    features: Features,
    slices: Sequence[slice],
    *,
    num_neighbors: int,
    recall: float | None = None,
    own: Callable[[list[int]], slice] = lambda edges: slice(0, edges[-1]),
    label: Callable[[Tensor], Tensor] | None = None,
    share_rows: int = 1,
) -> NeighborLists:
    """Finds the nearest neighbours of a share of the samples among all.

    Args:
        features: returns unit rows of a slice of samples, or of some samples: float32 or float64 (C, D).
        slices: all samples, cut into contiguous parts.
        num_neighbors: T, in [1, N].
        recall: share of the true neighbours to be found, in (0, 1]; None for an exact search.
        own: edges of shares, in the order of the lists -> whose lists are wanted, from one edge to another.
        label: centres (C, D) -> the nearest one of each sample, int64 (N,), where ranks share this; None does it here.
        share_rows: samples of the smallest share of an approximate search.

    Example:
        >>> x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
        >>> lists = neighbors(lambda rows: x[rows], [slice(0, 3)], num_neighbors=2)
        >>> lists.neighbor_TV[0].tolist(), lists.neighbor_TV[1, 0].item()
        ([0, 1, 2], 1)
    """
    if recall is None:
        edges = [0, *(rows.stop for rows in slices)]
        part = own(edges)
        found = nearest_neighbors(features, slices, range(part.start, part.stop), num_neighbors=num_neighbors)
        return NeighborLists(*found, torch.arange(part.start, part.stop, device=found[0].device), 1.0, edges)
    centers_CD = inverted_file.cluster_centers(features, slices[-1].stop)
    if label is None:
        label_N = torch.cat([nearest_center(features(rows), centers_CD) for rows in slices])
    else:
        label_N = label(centers_CD)
    inverted = inverted_file.build_inverted_file(
        features, centers_CD, label_N, num_neighbors=num_neighbors, wanted_recall=recall
    )
    edges = _edges_of_shares(inverted.clusters, share_rows)
    part = own(edges)
    shape = num_neighbors, part.stop - part.start
    # float32 would be as much memory as the rows' numbers; what float16 rounds averages out in f
    similarity_TV = torch.empty(shape, dtype=torch.float16, device=centers_CD.device)
    neighbor_TV = torch.empty(shape, dtype=torch.int32, device=centers_CD.device)
    panels = inverted_file.nearest_by_cluster(features, inverted, part, num_neighbors=num_neighbors)
    for number, (panel, similarity_PT, neighbor_PT) in enumerate(panels):
        if number % PANELS_PER_TRIM == 0:
            give_back_memory()
        held = slice(panel.start - part.start, panel.stop - part.start)
        similarity_TV[:, held], neighbor_TV[:, held] = similarity_PT.T, neighbor_PT.T
    return NeighborLists(similarity_TV, neighbor_TV, inverted.order_N[part], inverted.recall, edges)


def _edges_of_shares(clusters: Sequence[slice], num_rows: int) -> list[int]:
    """Edges of runs of whole clusters of at least `num_rows` samples."""
    edges = [0]
    for cluster in clusters:
        if cluster.stop - edges[-1] >= num_rows:
            edges.append(cluster.stop)
    return edges if edges[-1] == clusters[-1].stop else [*edges, clusters[-1].stop]
