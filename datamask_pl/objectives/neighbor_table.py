"""The table of every sample's nearest neighbours, which the ranks of a ground set build and hold in shares.

Shapes: N samples, V samples whose lists a rank holds, P samples of a panel, C samples of a slice, T neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.neighbors import inverted_file
from datamask_pl.functional.neighbors.duplicates import Surplus, find_surplus
from datamask_pl.functional.neighbors.exact import nearest_neighbors
from datamask_pl.functional.neighbors.pairs import Features
from datamask_pl.functional.terms import facility_location
from datamask_pl.functional.threads import give_back_memory
from datamask_pl.objectives.ground_set import GroundSet

NeighborSearch = Literal["auto", "exact", "approximate"]

# `auto` is exact up to this many samples.
MAX_EXACT_SAMPLES = 200_000
# Lists that know fewer of the neighbours are warned of.
LOW_RECALL = 0.9
# Freed memory of the search is given back after so many panels, while the table fills.
PANELS_PER_TRIM = 16


@dataclass(frozen=True)
class NeighborTable:
    """Nearest neighbours of the samples a rank holds.

    Attributes:
        similarity_TV: (T, V), max(0, cosine), not increasing along T; float16 where the search was approximate.
        neighbor_TV: int32 (T, V), rows of the neighbours, the sample itself first.
        rows_V: int64 (V,), the samples.
        chunks: parts of V that are walked at once; what is found of a sample does not depend on its chunk.
        recall: share of true neighbours that are in the lists; 1 where the search was exact.
    """

    similarity_TV: Tensor
    neighbor_TV: Tensor
    rows_V: Tensor
    chunks: list[slice]
    recall: float


def is_approximate(search: NeighborSearch, num_samples: int) -> bool:
    """Whether a ground set of this size is searched approximately."""
    return search == "approximate" or (search == "auto" and num_samples > MAX_EXACT_SAMPLES)


def build_table(
    ground: GroundSet, *, num_neighbors: int, search: NeighborSearch, wanted_recall: float
) -> NeighborTable:
    """Builds this rank's share of the table; the whole table where the ground set has helpers. Collective over both.

    Args:
        ground: the samples.
        num_neighbors: T, at most N.
        search: how.
        wanted_recall: of an approximate search, in (0, 1].
    """
    sharers = ground.ranks if ground.helpers.size == 1 else ground.helpers
    first_N = ground.first_copies()
    surplus = None if first_N is None else find_surplus(first_N, num_neighbors)
    if is_approximate(search, ground.num_samples):
        table, edges = _approximate_share(ground, surplus, sharers, num_neighbors, wanted_recall)
    else:
        table, edges = _exact_share(ground, surplus, sharers, num_neighbors)
    if ground.helpers.size > 1:
        table = _whole(table, edges, sharers)
    return table if surplus is None else _with_surplus(table, surplus)


def _exact_share(
    ground: GroundSet, surplus: Surplus | None, sharers: RankGroup, num_neighbors: int
) -> tuple[NeighborTable, list[int]]:
    edges = [0, *(rows.stop for rows in ground.slices_of(RankGroup()))]
    if surplus is not None:
        edges = sorted({*torch.searchsorted(surplus.kept_U, torch.tensor(edges, device=ground.device)).tolist()})
    own = _own_part(edges, sharers)
    similarity_TV, neighbor_TV = nearest_neighbors(
        _searched(ground, surplus),
        [slice(*pair) for pair in itertools.pairwise(edges)],
        range(own.start, own.stop),
        num_neighbors=num_neighbors,
    )
    rows_V = torch.arange(own.start, own.stop, device=ground.device)
    return NeighborTable(similarity_TV, neighbor_TV, rows_V, _chunks(len(rows_V), ground.device), 1.0), edges


def _approximate_share(
    ground: GroundSet, surplus: Surplus | None, sharers: RankGroup, num_neighbors: int, wanted_recall: float
) -> tuple[NeighborTable, list[int]]:
    features = _searched(ground, surplus)
    num_samples = ground.num_samples if surplus is None else len(surplus.kept_U)
    centers_CD = inverted_file.cluster_centers(features, num_samples)
    label_N = ground.map_over_slices(lambda rows: inverted_file.nearest_center(ground.features(rows), centers_CD))
    label_U = (label_N if surplus is None else label_N[surplus.kept_U]).long()
    inverted = inverted_file.invert(
        features, centers_CD, label_U, num_neighbors=num_neighbors, wanted_recall=wanted_recall
    )
    if inverted.recall < LOW_RECALL:
        rank_zero_warn(
            f"approximate neighbour lists: a recall of {inverted.recall:.2f} is below {LOW_RECALL}, and masks are "
            "judged by what the lists know; raise `recall`, or use `neighbors: exact`."
        )
    edges = _edges_of_groups(inverted.clusters, rows_at_once(facility_location.LIST_ROWS, ground.device))
    own = _own_part(edges, sharers)
    shape = num_neighbors, own.stop - own.start
    # float32 would be as much memory as the rows' numbers; what float16 rounds averages out in f
    similarity_TV = torch.empty(shape, dtype=torch.float16, device=ground.device)
    neighbor_TV = torch.empty(shape, dtype=torch.int32, device=ground.device)
    found = inverted_file.search(features, inverted, own, num_neighbors=num_neighbors)
    for number, (part, similarity_PT, neighbor_PT) in enumerate(found):
        if number % PANELS_PER_TRIM == 0:
            give_back_memory()
        held = slice(part.start - own.start, part.stop - own.start)
        similarity_TV[:, held], neighbor_TV[:, held] = similarity_PT.T, neighbor_PT.T
    rows_V = inverted.order_N[own]
    chunks = _chunks(len(rows_V), ground.device)
    return NeighborTable(similarity_TV, neighbor_TV, rows_V, chunks, inverted.recall), edges


def _searched(ground: GroundSet, surplus: Surplus | None) -> Features:
    """The features of the samples that are searched, by their number among them."""
    return ground.features if surplus is None else lambda rows: ground.features(surplus.kept_U[rows])


def _with_surplus(table: NeighborTable, surplus: Surplus) -> NeighborTable:
    """The table of all samples: every copy that was left out has the list of its model, with itself first."""
    place_U = torch.full_like(surplus.kept_U, -1)
    place_U[table.rows_V] = torch.arange(len(table.rows_V), device=place_U.device)
    place_S = place_U[surplus.model_S]
    is_held_S = place_S >= 0
    place_S, rows_S = place_S[is_held_S], surplus.rows_S[is_held_S]
    neighbor_TV = surplus.kept_U.int()[table.neighbor_TV.long()]
    neighbor_TS = neighbor_TV[:, place_S]
    neighbor_TS[0] = rows_S
    rows_V = torch.cat([surplus.kept_U[table.rows_V], rows_S])
    return NeighborTable(
        torch.cat([table.similarity_TV, table.similarity_TV[:, place_S]], dim=1),
        torch.cat([neighbor_TV, neighbor_TS], dim=1),
        rows_V,
        _chunks(len(rows_V), rows_V.device),
        table.recall,
    )


def _edges_of_groups(clusters: list[slice], num_rows: int) -> list[int]:
    """Edges of runs of whole clusters of at least `num_rows` samples: what ranks share."""
    edges = [0]
    for cluster in clusters:
        if cluster.stop - edges[-1] >= num_rows:
            edges.append(cluster.stop)
    if edges[-1] < clusters[-1].stop:
        edges.append(clusters[-1].stop)
    return edges


def _own_part(edges: list[int], sharers: RankGroup) -> slice:
    share = sharers.share(len(edges) - 1)
    return slice(edges[share.start], edges[share.stop])


def _chunks(num_samples: int, device: torch.device) -> list[slice]:
    """The parts of a table of so many samples."""
    num_rows = rows_at_once(facility_location.LIST_ROWS, device)
    return [slice(start, min(start + num_rows, num_samples)) for start in range(0, num_samples, num_rows)]


def _whole(table: NeighborTable, edges: list[int], sharers: RankGroup) -> NeighborTable:
    """Puts the shares of all ranks together, on every rank. Collective."""
    own = _own_part(edges, sharers)

    def gathered(own_TV: Tensor) -> Tensor:
        # gloo does not add float16
        whole_TN = torch.zeros(*own_TV.shape[:-1], edges[-1], dtype=_summable(own_TV.dtype), device=own_TV.device)
        whole_TN[..., own] = own_TV
        return sharers.sum_(whole_TN).to(own_TV.dtype)

    return NeighborTable(
        gathered(table.similarity_TV),
        gathered(table.neighbor_TV),
        gathered(table.rows_V),
        _chunks(edges[-1], table.rows_V.device),
        table.recall,
    )


def _summable(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype
