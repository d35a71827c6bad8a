"""The table of every sample's nearest neighbours, which the ranks of a ground set build and hold in shares.

Shapes: N samples, V samples whose lists a rank holds, P samples of a panel, C samples of a slice, T neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.errors import warn
from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.neighbors.duplicates import Duplicates, find_duplicates
from datamask_pl.functional.neighbors.kmeans import nearest_center
from datamask_pl.functional.neighbors.search import NeighborLists, neighbors
from datamask_pl.functional.terms import facility_location
from datamask_pl.objectives.ground_set import GroundSet

NeighborSearch = Literal["auto", "exact", "approximate"]

# `auto` is exact up to this many samples.
MAX_EXACT_SAMPLES = 200_000
# Lists that know fewer of the neighbours are warned of.
LOW_RECALL = 0.9


@dataclass(frozen=True)
class NeighborTable:
    """Nearest neighbours of the samples a rank holds.

    Attributes:
        similarity_TV: (T, V), max(0, cosine), not increasing along T; float16 where the search was approximate.
        neighbor_TV: int32 (T, V), rows of the neighbours, the sample itself first.
        rows_V: int64 (V,), the samples.
        chunks: parts of V that are walked at once; the results of a sample do not depend on its chunk.
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
    sharers = ground.shares.ranks if ground.shares.helpers.size == 1 else ground.shares.helpers
    first_N = ground.first_copies()
    duplicates = None if first_N is None else find_duplicates(first_N, num_neighbors)
    features, slices = ground.features, list(ground.shares.slices_of(RankGroup()))
    if duplicates is not None:
        edges = torch.tensor([0, *(rows.stop for rows in slices)], device=ground.device)
        edges_U = sorted({*torch.searchsorted(duplicates.kept_U, edges).tolist()})
        features = lambda rows: ground.features(duplicates.kept_U[rows])  # noqa: E731
        slices = [slice(*pair) for pair in itertools.pairwise(edges_U)]

    def label(centers_CD: Tensor) -> Tensor:
        label_N = ground.shares.map_over_slices(lambda rows: nearest_center(ground.features(rows), centers_CD))
        return (label_N if duplicates is None else label_N[duplicates.kept_U]).long()

    lists = neighbors(
        features,
        slices,
        num_neighbors=num_neighbors,
        recall=wanted_recall if is_approximate(search, ground.num_samples) else None,
        own=lambda edges: _own_part(edges, sharers),
        label=label,
        share_rows=rows_at_once(facility_location.LIST_ROWS, ground.device),
    )
    if lists.recall < LOW_RECALL:
        warn(
            f"approximate neighbour lists reach a recall of only {lists.recall:.2f} (< {LOW_RECALL}); reported "
            "facility-location values are lower bounds; raise `recall`, or use `neighbors: exact`."
        )
    if ground.shares.helpers.size > 1:
        lists = _whole(lists, sharers)
    if duplicates is not None:
        lists = _with_duplicates(lists, duplicates)
    return NeighborTable(
        lists.similarity_TV, lists.neighbor_TV, lists.rows_V, _chunks(len(lists.rows_V), ground.device), lists.recall
    )


def _with_duplicates(lists: NeighborLists, duplicates: Duplicates) -> NeighborLists:
    """The lists of all samples: every duplicate that was not searched has the list of its model, with itself first."""
    place_U = torch.full_like(duplicates.kept_U, -1)
    place_U[lists.rows_V] = torch.arange(len(lists.rows_V), device=place_U.device)
    place_S = place_U[duplicates.model_S]
    is_held_S = place_S >= 0
    place_S, rows_S = place_S[is_held_S], duplicates.rows_S[is_held_S]
    neighbor_TV = duplicates.kept_U.int()[lists.neighbor_TV.long()]
    neighbor_TS = neighbor_TV[:, place_S]
    neighbor_TS[0] = rows_S
    return lists._replace(
        similarity_TV=torch.cat([lists.similarity_TV, lists.similarity_TV[:, place_S]], dim=1),
        neighbor_TV=torch.cat([neighbor_TV, neighbor_TS], dim=1),
        rows_V=torch.cat([duplicates.kept_U[lists.rows_V], rows_S]),
    )


def _own_part(edges: list[int], sharers: RankGroup) -> slice:
    share = sharers.share(len(edges) - 1)
    return slice(edges[share.start], edges[share.stop])


def _chunks(num_samples: int, device: torch.device) -> list[slice]:
    """The parts of a table of so many samples."""
    num_rows = rows_at_once(facility_location.LIST_ROWS, device)
    return [slice(start, min(start + num_rows, num_samples)) for start in range(0, num_samples, num_rows)]


def _whole(lists: NeighborLists, sharers: RankGroup) -> NeighborLists:
    """Puts the shares of all ranks together, on every rank. Collective."""
    own, num_samples = _own_part(lists.edges, sharers), lists.edges[-1]

    def gathered(own_TV: Tensor) -> Tensor:
        # gloo does not add float16
        whole_TN = torch.zeros(*own_TV.shape[:-1], num_samples, dtype=_summable(own_TV.dtype), device=own_TV.device)
        whole_TN[..., own] = own_TV
        return sharers.sum_(whole_TN).to(own_TV.dtype)

    return lists._replace(
        similarity_TV=gathered(lists.similarity_TV),
        neighbor_TV=gathered(lists.neighbor_TV),
        rows_V=gathered(lists.rows_V),
    )


def _summable(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype
