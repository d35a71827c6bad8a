"""The nearest neighbours of every sample by cosine, exact, without an N x N matrix.

Every pair is multiplied once, quickly, and again exactly where the two may be neighbours; then it is offered to the
lists of both. A bound, estimated for each sample from a few others, lets through little more than its neighbours; a
sample for which it proves too high is searched again without one. The lists do not depend on the bounds.

Shapes: N samples, V samples whose neighbours are wanted, P samples of a panel, S samples that give the bounds,
E entries, W width of a list that is being filled, T neighbours, D features.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.kernels import positions, stable_order
from datamask_pl.functional.neighbors.keys import EMPTY_KEY, index_of, largest_keys, make_keys, similarity_of
from datamask_pl.functional.neighbors.pairs import Features, Rows, SimilarPairs
from datamask_pl.functional.threads import Start, one_thread_each

Lists = tuple[Tensor, Tensor]

# A tile of 2048 x 2048 float32 products is 16 MiB, which a CPU's last cache holds while it is searched.
PANEL_ROWS = 2048
# More samples for the bounds let through fewer pairs that are not neighbours: so many cost as much as they save.
SAMPLES_PER_SEED = 12
MIN_SEEDS, MAX_SEEDS = 512, 4096
# Up to this many samples are searched without bounds.
MAX_UNBOUNDED = 2048
# Products that such a search holds at a time.
UNBOUNDED_PRODUCTS = 2**22


def nearest_neighbors(features: Features, slices: Sequence[slice], own_rows: range, *, num_neighbors: int) -> Lists:
    """Finds the most similar samples of each queried sample, itself included, most similar first.

    Samples of equal similarity come in row order. N^2 D flops for all samples, 2 V N D - V^2 D for V of them, and a few
    per cent for the bounds. Memory is the table, lists of two to three times its size, and a tile of products a thread.
    A sample's list has the same bits whoever else's are wanted, on any number of threads, and whether or not quick
    products are of bfloat16.

    Args:
        features: returns unit rows of a slice of samples, or of some samples: float32 or float64 (C, D).
        slices: all samples, cut into contiguous parts.
        own_rows: rows whose neighbours are wanted: whole slices, contiguous.
        num_neighbors: T, in [1, N].

    Returns:
        similarity_TV: (T, V) of the features' type, max(0, cosine), not increasing along T.
        neighbor_TV: int32 (T, V), rows of the neighbours.

    Example:
        >>> x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
        >>> _, neighbor_TV = nearest_neighbors(lambda rows: x[rows], [slice(0, 3)], range(3), num_neighbors=2)
        >>> neighbor_TV[0].tolist(), neighbor_TV[1, 0].item()
        ([0, 1, 2], 1)
    """
    empty = features(slice(0, 0))
    similarity_TV = empty.new_empty(num_neighbors, len(own_rows))
    neighbor_TV = torch.empty(num_neighbors, len(own_rows), dtype=torch.int32, device=empty.device)
    panels = split_panels(slices, rows_at_once(PANEL_ROWS, empty.device))
    own = [index for index, panel in enumerate(panels) if own_rows.start <= panel.start < own_rows.stop]
    search = _Search(features, panels, num_neighbors)
    with one_thread_each(empty.device) as start:
        for index, lists in search.run(own, start):
            rows = slice(panels[index].start - own_rows.start, panels[index].stop - own_rows.start)
            similarity_TV[:, rows], neighbor_TV[:, rows] = (of_panel.T for of_panel in lists)
    return similarity_TV, neighbor_TV


class _Search:
    """The search of all panels, task by task."""

    def __init__(self, features: Features, panels: Sequence[slice], num_neighbors: int) -> None:
        self.features = features
        self.panels = panels
        self.num_neighbors = num_neighbors
        self.lists: dict[int, GrowingLists] = {}

    def run(self, own: Sequence[int], start: Start) -> Iterator[tuple[int, Lists]]:
        """Yields the finished lists of the panels `own`, in order."""
        if not own:
            return
        self.pairs = SimilarPairs.among(self.features, self.panels)
        num_samples = self.panels[-1].stop
        if num_samples <= max(MAX_UNBOUNDED, 4 * self.num_neighbors):
            for index, task in [(index, start(self._complete, index)) for index in own]:
                yield index, task()
            return
        # 1. lists with a bound for every row; all panels make theirs side by side
        seeds = Seeds.choose(self.features, num_samples, self.num_neighbors)
        made = [start(self._make_lists, index, seeds) for index in own]
        self.lists = dict(zip(own, [task() for task in made], strict=True))
        # 2. every pair of panels once, with the earlier one; a tile serves the lists of both
        waiting: deque[tuple[int, list[Callable[[], None]]]] = deque()
        for index in range(own[-1] + 1):
            others = range(index, len(self.panels)) if index in self.lists else [it for it in own if it > index]
            waiting.append((index, [start(self._offer_tile, index, other) for other in others]))
            # 3. finish a panel while the next one's tiles are in the queue, so that no thread waits
            if len(waiting) > 1:
                yield from self._finish(*waiting.popleft(), start)
        yield from self._finish(*waiting.popleft(), start)

    def _finish(self, index: int, tasks: Sequence[Callable[[], None]], start: Start) -> Iterator[tuple[int, Lists]]:
        for wait in tasks:
            wait()
        if index in self.lists:
            yield index, start(self._complete, index)()
            # its later tiles are done, and the next panel's do not ask for it
            del self.lists[index]

    def _make_lists(self, index: int, seeds: Seeds) -> GrowingLists:
        own_PD = self.features(self.panels[index])
        return GrowingLists(
            seeds.bounds(self.pairs, own_PD),
            rows_of(self.panels[index], own_PD.device),
            self.num_neighbors,
        )

    def _offer_tile(self, index: int, other: int) -> None:
        """Offers the similar pairs of two panels to the lists of both."""
        left, right = self.lists.get(index), self.lists.get(other) if other != index else None
        left_PD, right_CD = self.features(self.panels[index]), self.features(self.panels[other])
        bounds = (lists.bound_P if lists else None for lists in (left, right))
        row_E, column_E, similarity_E = self.pairs.at_least(left_PD, right_CD, *bounds)
        if left:
            left.offer(row_E, column_E + self.panels[other].start, similarity_E)
        if right:
            right.offer(column_E, row_E + self.panels[index].start, similarity_E, is_ordered=False)

    def _complete(self, index: int) -> Lists:
        """The finished lists of a panel; rows whose bound was too high are searched again."""
        rows_P = rows_of(self.panels[index], self.features(slice(0, 0)).device)
        if index not in self.lists:
            keys_PT = search_all(self.pairs, self.features, self.panels, rows_P, self.num_neighbors)
            return finished_lists(self.features, self.panels[index], keys_PT)
        keys_PT, is_full_P = self.lists[index].best()
        missed = (~is_full_P).nonzero().squeeze(1)
        if missed.numel():
            keys_PT[missed] = search_all(self.pairs, self.features, self.panels, rows_P[missed], self.num_neighbors)
        return finished_lists(self.features, self.panels[index], keys_PT)


@dataclass(frozen=True)
class Seeds:
    """The samples that bounds are taken from.

    The bound is the r-th best of S samples. Of the T nearest of N, a Poisson number of mean T S / N is among them; the
    bound is too high for a row, which is then searched again, if that number is r or more: one row in some thousands.

    Attributes:
        features_SD: their features.
        rank: r.
    """

    features_SD: Tensor
    rank: int

    @classmethod
    def choose(cls, features: Features, num_samples: int, num_neighbors: int) -> Seeds:
        """Samples at equal distances."""
        num_seeds = min(num_samples, MAX_SEEDS, max(MIN_SEEDS, num_samples // SAMPLES_PER_SEED))
        mean = num_neighbors * num_seeds / num_samples
        rank = min(num_seeds, math.ceil(mean + 4 * math.sqrt(mean) + 1))
        seeds_S = torch.arange(num_seeds, device=features(slice(0, 0)).device) * num_samples // num_seeds
        return cls(features(seeds_S), rank)

    def bounds(self, pairs: SimilarPairs, own_PD: Tensor) -> Tensor:
        """A bound for each row, which hardly any row's list misses: float32 (P,)."""
        return pairs.bounds(own_PD, [self.features_SD], self.rank)


class GrowingLists:
    """The best entries so far of some rows, which grow until they are full and are then cut to the best T.

    Threads may offer at the same time; the best T do not depend on the order. A sample is first in its own list.

    Args:
        bound_P: float32 (P,), only entries of at least that are taken.
        rows_P: int64 (P,), the samples.
        num_neighbors: T.
    """

    def __init__(self, bound_P: Tensor, rows_P: Tensor, num_neighbors: int) -> None:
        self.bound_P = bound_P
        self.rows_P = rows_P
        self.num_neighbors = num_neighbors
        self._width = num_neighbors + max(64, num_neighbors // 2)
        self._count_P = torch.ones_like(rows_P)
        self._keys_PW = torch.full((len(rows_P), self._width), EMPTY_KEY, device=rows_P.device)
        self._keys_PW[:, 0] = make_keys(torch.full_like(bound_P, torch.inf), rows_P)
        self._lock = Lock()

    def offer(self, own_E: Tensor, other_E: Tensor, similarity_E: Tensor, *, is_ordered: bool = True) -> None:
        """Takes the entries that reach the bounds.

        Args:
            own_E: int64, places in `rows_P`.
            other_E: int64, the other samples; a sample itself is not taken again.
            similarity_E: float32.
            is_ordered: whether `own_E` is ascending.
        """
        is_taken_E = (similarity_E >= self.bound_P[own_E]) & (other_E != self.rows_P[own_E])
        taken = positions(is_taken_E)
        if not is_ordered:
            taken = taken[stable_order(own_E[taken], len(self.rows_P))]
        self._add(own_E[taken], make_keys(similarity_E[taken], other_E[taken]))

    def best(self) -> tuple[Tensor, Tensor]:
        """The T largest keys of each row, and whether there were as many: int64 (P, T), bool (P,)."""
        return largest_keys(self._keys_PW, self.num_neighbors), self._count_P >= self.num_neighbors

    def _add(self, own_E: Tensor, keys_E: Tensor) -> None:
        """Appends entries that come ordered by row."""
        added_P = torch.bincount(own_E, minlength=len(self.bound_P))
        place_E = torch.arange(own_E.numel(), device=own_E.device) - (added_P.cumsum(0) - added_P)[own_E]
        with self._lock:
            if int((self._count_P + added_P).max()) > self._keys_PW.shape[1]:
                self._cut(int(added_P.max()))
            self._keys_PW[own_E, place_E + self._count_P[own_E]] = keys_E
            self._count_P += added_P
            if self._keys_PW.shape[1] > self._width:
                self._cut(0)

    def _cut(self, room: int) -> None:
        """Leaves the T best of each row, and room for more."""
        best_PT = largest_keys(self._keys_PW, self.num_neighbors)
        self._count_P.clamp_(max=self.num_neighbors)
        width = max(self._width, self.num_neighbors + room)
        self._keys_PW = torch.full((len(best_PT), width), EMPTY_KEY, device=best_PT.device)
        self._keys_PW[:, : self.num_neighbors] = best_PT
        is_full_P = self._count_P == self.num_neighbors
        last_P = similarity_of(best_PT[:, -1])
        self.bound_P = torch.where(is_full_P, torch.maximum(self.bound_P, last_P), self.bound_P)


def search_all(
    pairs: SimilarPairs, features: Features, others: Sequence[Rows], rows_P: Tensor, num_neighbors: int
) -> Tensor:
    """Keys of the nearest neighbours of some rows among others, without bounds: int64 (P, T), EMPTY_KEY at the end.

    Args:
        pairs: of the same samples.
        features: returns unit rows of a slice of samples, or of some samples.
        others: the samples to look among, in parts.
        rows_P: int64 (P,).
        num_neighbors: T.
    """
    others_C = [rows_of(other, rows_P.device) for other in others]
    num_others = sum(map(len, others_C))
    found = []
    for rows in torch.split(rows_P, max(1, UNBOUNDED_PRODUCTS // num_others)):
        own_PD = features(rows)
        bound_P = torch.full((len(rows),), -torch.inf, device=rows.device)
        if num_others > num_neighbors:
            bound_P = pairs.bounds(own_PD, [features(other) for other in others], num_neighbors)
        lists = GrowingLists(bound_P, rows, num_neighbors)
        for other, other_C in zip(others, others_C, strict=True):
            row_E, column_E, similarity_E = pairs.at_least(own_PD, features(other), bound_P, None)
            lists.offer(row_E, other_C[column_E], similarity_E)
        found.append(lists.best()[0])
    return torch.cat(found)


def finished_lists(features: Features, rows: Rows, keys_PT: Tensor) -> Lists:
    """Similarities and neighbours of ranked keys, each sample first in its own list.

    Args:
        features: returns unit rows of a slice of samples, or of some samples.
        rows: whose lists they are.
        keys_PT: int64 (P, T), largest first; a sample's key in its own list is that of an infinite similarity.

    Returns:
        similarity_PT: of the features' type, in [0, 1] but for rounding, not increasing.
        neighbor_PT: int64; where there is no key, the sample itself, with similarity 0.
    """
    own_PD = features(rows)
    is_empty_PT = keys_PT == EMPTY_KEY
    neighbor_PT = torch.where(is_empty_PT, rows_of(rows, keys_PT.device)[:, None], index_of(keys_PT))
    similarity_PT = similarity_of(keys_PT)
    if own_PD.dtype == torch.float64:  # keys hold float32
        similarity_PT = torch.einsum("pd,ptd->pt", own_PD, features(neighbor_PT.flatten()).view(*keys_PT.shape, -1))
        similarity_PT = similarity_PT.masked_fill(is_empty_PT, -torch.inf)
        similarity_PT[:, 0] = torch.inf
        similarity_PT, order_PT = similarity_PT.sort(dim=1, descending=True, stable=True)
        neighbor_PT = neighbor_PT.gather(1, order_PT)
    similarity_PT = similarity_PT.masked_fill(is_empty_PT, 0.0)
    similarity_PT[:, 0] = own_PD.square().sum(1)
    # a copy of the sample may round to more than the sample itself, and lists do not increase
    return torch.minimum(similarity_PT, similarity_PT[:, :1]).clamp_(min=0.0), neighbor_PT


def rows_of(rows: Rows, device: torch.device) -> Tensor:
    """The rows' numbers: int64 (P,)."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


def split_panels(slices: Sequence[slice], num_rows: int) -> list[slice]:
    """Cuts each slice into equal parts of at most `num_rows` rows.

    Example:
        >>> split_panels([slice(0, 5)], 3)
        [slice(0, 2, None), slice(2, 5, None)]
    """
    parts = []
    for rows in slices:
        length = rows.stop - rows.start
        count = max(1, math.ceil(length / num_rows))
        edges = [rows.start + index * length // count for index in range(count + 1)]
        parts += [slice(*pair) for pair in itertools.pairwise(edges)]
    return parts
