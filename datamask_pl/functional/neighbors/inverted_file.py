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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.neighbors.exact import (
    PANEL_ROWS,
    GrowingLists,
    Lists,
    Seeds,
    finished_lists,
    rows_of,
    search_all,
    split_panels,
)
from datamask_pl.functional.neighbors.kmeans import spherical_kmeans
from datamask_pl.functional.neighbors.pairs import Features, Rows, SimilarPairs
from datamask_pl.functional.threads import one_thread_each

# Samples of a cluster, on average.
CLUSTER_ROWS = 512
# Queries at a time, which share the reading of what they look at. Of a bunch of samples most may be above the bounds of
# each other, which makes the entries of more queries a matter of memory.
MAX_QUERIES = 1024
SAMPLES_PER_CLUSTER = 48
NUM_ITERATIONS = 6
# Queries whose true neighbours are found by brute force: those that choose how much is looked at, those that judge it,
# and how many at a time.
NUM_CHOOSERS, NUM_JUDGES, QUERY_ROWS = 768, 256, 256
# The recall of the choosers is to be above what is wanted by so many of its standard errors.
MARGIN = 2.0
# Of the random choice of samples.
SEED = 31


@dataclass(frozen=True)
class InvertedFile:
    """The samples by cluster, and what each cluster looks at.

    Attributes:
        order_N: int64 (N,), all rows, cluster by cluster.
        clusters: each cluster's part of `order_N`.
        looked_at_CM: int32 (C, M), the clusters that each cluster's queries look at, nearest first, itself first.
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
    return spherical_kmeans(
        features, sample_S, num_clusters=num_clusters, num_iterations=NUM_ITERATIONS, bound=num_samples
    )


def build_inverted_file(
    features: Features, centers_CD: Tensor, label_N: Tensor, *, num_neighbors: int, wanted_recall: float
) -> InvertedFile:
    """Sorts samples by cluster, and finds out how many clusters must be looked at.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        centers_CD: from `cluster_centers`.
        label_N: int64 (N,), the cluster of each sample.
        num_neighbors: T, of the lists whose recall is wanted.
        wanted_recall: share of true neighbours to be found, in (0, 1].
    """
    num_samples, num_clusters = label_N.numel(), centers_CD.shape[0]
    edges = [0, *torch.bincount(label_N, minlength=num_clusters).cumsum(0).tolist()]
    by_nearness_CC = _by_nearness(centers_CD)
    queries_Q = torch.randperm(num_samples, generator=torch.Generator().manual_seed(SEED + 1))
    queries_Q = queries_Q[: NUM_CHOOSERS + NUM_JUDGES].to(label_N.device)
    panels = split_panels([slice(0, num_samples)], rows_at_once(PANEL_ROWS, label_N.device))
    seeds, pairs = Seeds.choose(features, num_samples, num_neighbors), SimilarPairs.among(features, panels)

    def lists_of(rows_P: Tensor) -> Lists:
        bound_P = seeds.bounds(pairs, features(rows_P))
        return _lists_among(pairs, features, bound_P, rows_P, panels, num_neighbors)

    with one_thread_each(label_N.device) as start:
        parts = [start(lists_of, rows_Q) for rows_Q in torch.split(queries_Q, QUERY_ROWS)]
        neighbor_QT = torch.cat([wait()[1] for wait in parts])
    place_QT = by_nearness_CC[label_N[queries_Q]].argsort(dim=1).gather(1, label_N[neighbor_QT])
    num_looked_at = _num_needed(place_QT[:NUM_CHOOSERS], num_clusters, wanted_recall)
    judges_QT = place_QT[NUM_CHOOSERS:] if len(place_QT) > NUM_CHOOSERS else place_QT
    return InvertedFile(
        order_N=label_N.argsort(stable=True),
        clusters=[slice(*pair) for pair in itertools.pairwise(edges)],
        looked_at_CM=by_nearness_CC[:, :num_looked_at].clone(),
        recall=float((judges_QT < num_looked_at).double().mean()),
    )


def _by_nearness(centers_CD: Tensor) -> Tensor:
    """For each cluster all clusters, nearest first, itself first: int32 (C, C)."""
    num_clusters = len(centers_CD)
    by_nearness_CC = torch.empty(num_clusters, num_clusters, dtype=torch.int32, device=centers_CD.device)
    for rows in torch.split(torch.arange(num_clusters, device=centers_CD.device), QUERY_ROWS):
        nearness_PC = centers_CD[rows] @ centers_CD.T
        nearness_PC.scatter_(1, rows[:, None], torch.inf)
        by_nearness_CC[rows] = nearness_PC.argsort(dim=1, descending=True, stable=True).int()
    return by_nearness_CC


def _num_needed(place_QT: Tensor, num_clusters: int, wanted_recall: float) -> int:
    """How many clusters must be looked at, where the t-th neighbour of a query is in the place_QT-th of them."""
    looked_at_QC = torch.arange(num_clusters, device=place_QT.device).expand(len(place_QT), -1).contiguous()
    recall_QC = torch.searchsorted(place_QT.sort(dim=1).values, looked_at_QC, right=True).double() / place_QT.shape[1]
    error_C = recall_QC.std(dim=0, correction=0) / len(place_QT) ** 0.5
    # all clusters find all, without error
    return int((recall_QC.mean(0) - MARGIN * error_C < wanted_recall).sum()) + 1


def _lists_among(
    pairs: SimilarPairs,
    features: Features,
    bound_P: Tensor,
    rows_P: Tensor,
    others: Sequence[Rows],
    num_neighbors: int,
) -> Lists:
    """Finished lists of the best among others; bounds that are too high only cost time."""
    own_PD = features(rows_P)
    lists = GrowingLists(bound_P, rows_P, num_neighbors)
    for other in others:
        row_E, column_E, similarity_E = pairs.at_least(own_PD, features(other), lists.bound_P, None)
        lists.offer(row_E, rows_of(other, rows_P.device)[column_E], similarity_E)
    keys_PT, is_full_P = lists.best()
    missed = (~is_full_P).nonzero().squeeze(1)
    if missed.numel():
        keys_PT[missed] = search_all(pairs, features, others, rows_P[missed], num_neighbors)
    return finished_lists(features, rows_P, keys_PT)


def nearest_by_cluster(
    features: Features, inverted: InvertedFile, own: slice, *, num_neighbors: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Finds neighbours of the samples of some clusters. The lists have the same bits whichever clusters they are.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        inverted: the samples by cluster.
        own: whole clusters' part of `inverted.order_N`.
        num_neighbors: T, at most the number of samples.

    Yields:
        where in `inverted.order_N` they are, then similarity_PT and neighbor_PT as `finished_lists` returns them.
        A list that is not filled ends with the sample itself at similarity 0.
    """
    device = inverted.order_N.device
    num_samples = inverted.order_N.numel()
    pairs = SimilarPairs.among(features, split_panels([slice(0, num_samples)], rows_at_once(PANEL_ROWS, device)))

    def lists_of(panel: slice, cluster: int) -> tuple[slice, Tensor, Tensor]:
        others = [inverted.order_N[inverted.clusters[other]] for other in inverted.looked_at_CM[cluster].tolist()]
        others_P = torch.split(torch.cat(others), rows_at_once(PANEL_ROWS, device))
        rows_P = inverted.order_N[panel]
        bound_P = torch.full((len(rows_P),), -torch.inf, device=device)
        if len(others_P[0]) > num_neighbors:
            # most neighbours are in the nearest clusters: these leave little for the bounds to let through
            bound_P = pairs.bounds(features(rows_P), [features(others_P[0])], num_neighbors)
        return panel, *_lists_among(pairs, features, bound_P, rows_P, others_P, num_neighbors)

    with one_thread_each(device) as start:
        waiting: deque[Callable[[], tuple[slice, Tensor, Tensor]]] = deque()
        for cluster, members in enumerate(inverted.clusters):
            if own.start <= members.start < members.stop <= own.stop:
                for panel in split_panels([members], rows_at_once(MAX_QUERIES, device)):
                    waiting.append(start(lists_of, panel, cluster))
                    # finished lists do not pile up
                    if len(waiting) > 2 * torch.get_num_threads():
                        yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
