"""The nearest neighbours of every sample by cosine, most of them, in a small share of all products.

The samples are clustered. The queries of a cluster look among the members of the clusters that are nearest to it, and
find what is best there without error: a neighbour is missed if and only if its cluster was not looked at. So many
clusters are looked at as a sample of queries needs, whose true neighbours are known by brute force, for the recall that
is wanted.

Shapes: N samples, C clusters, M clusters looked at, Q queries, P samples of a panel, S samples of the clustering,
T neighbours, D features.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.device import one_thread_each, rows_at_once
from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.neighbors import (
    PANEL_ROWS,
    Features,
    GrowingLists,
    Seeds,
    cut,
    finished_lists,
    search_all,
)

# Samples of a cluster, on average: enough rows for a fast product.
CLUSTER_ROWS = 512
SAMPLES_PER_CLUSTER = 48
NUM_ITERATIONS = 6
# Queries whose true neighbours are found by brute force.
NUM_PROBE_QUERIES = 512
# Of the random choice of samples.
SEED = 31


@dataclass(frozen=True)
class InvertedFile:
    """The samples by cluster, and what each cluster looks at.

    Attributes:
        order_N: int64 (N,), all rows, cluster by cluster.
        clusters: each cluster's part of `order_N`.
        looked_at_CM: int64 (C, M), the clusters that each cluster's queries look at, nearest first, itself first.
        recall: share of the true neighbours that is found, of queries that had no part in choosing M.
    """

    order_N: Tensor
    clusters: list[slice]
    looked_at_CM: Tensor
    recall: float


def cluster_centers(features: Features, num_samples: int) -> Tensor:
    """Spherical k-means on a random sample of the rows, the same on every rank: (C, D), unit rows."""
    generator = torch.Generator().manual_seed(SEED)
    device = features(slice(0, 0)).device
    num_clusters = max(1, math.ceil(num_samples / CLUSTER_ROWS))
    sample_S = torch.randperm(num_samples, generator=generator)[: num_clusters * SAMPLES_PER_CLUSTER].to(device)
    centers_CD = features(sample_S[:num_clusters])
    for _ in range(NUM_ITERATIONS):
        sums_CD = torch.zeros(centers_CD.shape, dtype=torch.float64, device=device)
        for rows in torch.split(sample_S, rows_at_once(PANEL_ROWS, device)):
            features_PD = features(rows)
            # exact sums: on a GPU the order of additions is another each time
            sums_CD.index_add_(
                0, nearest_center(features_PD, centers_CD), round_to_grid(features_PD, bound=num_samples)
            )
        norm_C1 = sums_CD.norm(dim=1, keepdim=True)
        # a cluster without members stays where it is
        centers_CD = torch.where(norm_C1 > 0, sums_CD / norm_C1.clamp(min=1e-30), centers_CD).to(centers_CD.dtype)
    return centers_CD


def nearest_center(features_PD: Tensor, centers_CD: Tensor) -> Tensor:
    """The cluster of each sample: int64 (P,).

    Example:
        >>> nearest_center(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.eye(2))
        tensor([0, 1])
    """
    parts = torch.split(features_PD, rows_at_once(PANEL_ROWS, features_PD.device))
    return torch.cat([(part_PD @ centers_CD.T).argmax(1) for part_PD in parts])


def invert(
    features: Features, centers_CD: Tensor, label_N: Tensor, *, num_neighbors: int, wanted_recall: float
) -> InvertedFile:
    """Sorts samples by cluster, and finds out how many clusters must be looked at.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        centers_CD: from `cluster_centers`.
        label_N: int64 (N,), the cluster of each sample.
        num_neighbors: T, of the lists whose recall is wanted.
        wanted_recall: share of true neighbours that half of the brute-force queries must find, in (0, 1].
    """
    num_samples, num_clusters = label_N.numel(), centers_CD.shape[0]
    edges = [0, *torch.bincount(label_N, minlength=num_clusters).cumsum(0).tolist()]
    nearness_CC = centers_CD @ centers_CD.T
    nearness_CC.fill_diagonal_(torch.inf)
    by_nearness_CC = nearness_CC.argsort(dim=1, descending=True, stable=True)
    place_CC = by_nearness_CC.argsort(dim=1)
    queries_Q = torch.randperm(num_samples, generator=torch.Generator().manual_seed(SEED + 1))[:NUM_PROBE_QUERIES]
    queries_Q = queries_Q.to(label_N.device)
    keys_QT = search_all(features, cut([slice(0, num_samples)], PANEL_ROWS), queries_Q, num_neighbors)
    _, neighbor_QT = finished_lists(features, queries_Q, keys_QT)
    place_QT = place_CC[label_N[queries_Q, None], label_N[neighbor_QT]]
    # every second query chooses, the others judge
    found_C = torch.bincount(place_QT[::2].flatten(), minlength=num_clusters).cumsum(0)
    wanted = math.ceil(wanted_recall * place_QT[::2].numel())
    num_looked_at = int((found_C < wanted).sum()) + 1
    judges_QT = place_QT[1::2] if len(place_QT) > 1 else place_QT
    return InvertedFile(
        order_N=label_N.argsort(stable=True),
        clusters=[slice(*pair) for pair in itertools.pairwise(edges)],
        looked_at_CM=by_nearness_CC[:, :num_looked_at],
        recall=float((judges_QT < num_looked_at).double().mean()),
    )


def search(
    features: Features, inverted: InvertedFile, own: slice, *, num_neighbors: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Finds neighbours of the samples of some clusters. The lists have the same bits whichever clusters they are.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        inverted: the samples by cluster.
        own: whole clusters' part of `inverted.order_N`.
        num_neighbors: T, at most the number of samples.

    Yields:
        where in `inverted.order_N` the samples are, then similarity_PT and neighbor_PT as `finished_lists` gives them.
        A list that is not filled ends with the sample itself at similarity 0.
    """
    device = inverted.order_N.device
    seeds = Seeds.choose(features, inverted.order_N.numel(), num_neighbors)

    def lists_of(panel: slice, cluster: int) -> tuple[slice, Tensor, Tensor]:
        rows_P = inverted.order_N[panel]
        own_PD = features(rows_P)
        others = [inverted.order_N[inverted.clusters[other]] for other in inverted.looked_at_CM[cluster].tolist()]
        others_P = torch.split(torch.cat(others), rows_at_once(PANEL_ROWS, device))
        lists = GrowingLists(seeds.bounds(own_PD), num_neighbors)
        for rows in others_P:
            products = own_PD @ features(rows).T
            products.masked_fill_(rows_P[:, None] == rows, torch.inf)  # a sample is first in its own list
            lists.offer(products, rows)
        keys_PT, is_full_P = lists.best()
        missed = (~is_full_P).nonzero().squeeze(1)
        if missed.numel():
            keys_PT[missed] = search_all(features, others_P, rows_P[missed], num_neighbors)
        return panel, *finished_lists(features, rows_P, keys_PT)

    with one_thread_each(device) as start:
        waiting: deque[Callable[[], tuple[slice, Tensor, Tensor]]] = deque()
        for cluster, members in enumerate(inverted.clusters):
            if own.start <= members.start < members.stop <= own.stop:
                for panel in cut([members], rows_at_once(PANEL_ROWS, device)):
                    waiting.append(start(lists_of, panel, cluster))
                    # finished lists do not pile up
                    if len(waiting) > 2 * torch.get_num_threads():
                        yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
