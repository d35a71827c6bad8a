"""Facility location: every sample of the block has a similar one among the kept.

Shapes: R masks, N samples, C samples of a slice, D features, T neighbours, V samples whose lists a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, get_args

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.errors import ConfigError, check_choice
from datamask_pl.functional.bound import ServiceDual
from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.exact_sum import grid_scale, round_to_grid
from datamask_pl.functional.kernels import pack_bits
from datamask_pl.functional.neighbors.exact import PANEL_ROWS, rows_of, split_panels
from datamask_pl.functional.neighbors.pairs import SimilarPairs
from datamask_pl.functional.terms import facility_location
from datamask_pl.functional.threads import one_thread_each
from datamask_pl.objectives.base import ClosedFormObjective, Expectation
from datamask_pl.objectives.bound_support import SupportsService
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.neighbor_table import NeighborSearch, NeighborTable, build_table, is_approximate
from datamask_pl.objectives.swap_support import SupportsCoverage

# Bounds on the default length of a neighbour list.
MIN_NEIGHBORS, MAX_NEIGHBORS = 60, 512
# Samples whose nearest kept one is searched for by one thread at a time.
OPEN_ROWS = 1024
# Samples that are compared with all others, to estimate what approximate lists miss.
MISSED_ROWS = 2000
QUANTILE_99 = 2.3264
# Samples by masks that are looked up at once.
MAX_LOOKED_UP = 2**17


class FacilityLocation(ClosedFormObjective, SupportsCoverage, SupportsService):
    """Mean over all samples of the block of the similarity to the most similar kept one.

    `expectation` walks the lists of the nearest neighbours; what lies behind their end is left out, and bounded in the
    log as `truncation_bound`. `value` looks behind their end by brute force, and is exact where the lists are. Where
    they are approximate, a missed neighbour may have been the nearest kept one: `value` is then a lower bound, of every
    mask by the same lists, and `recall` is logged.

    Args:
        num_neighbors: length of each sample's list, itself included; by default 6 / select_ratio, from 60 to 512, so
            that with random inclusion a list without a kept sample is rarer than 1 in 400.
        neighbors: how the lists are found. `exact`: all pairs. `approximate`: among the samples of near clusters.
            `auto`: exact for up to 200,000 samples.
        recall: share of the true neighbours that an approximate search is to find, in (0, 1].

    Raises:
        ConfigError: If an option is out of range.
    """

    holds_lists: ClassVar[bool] = True

    def __init__(
        self, *, num_neighbors: int | None = None, neighbors: NeighborSearch = "auto", recall: float = 0.95
    ) -> None:
        if num_neighbors is not None and num_neighbors < 1:
            raise ConfigError(f"num_neighbors must be at least 1, got {num_neighbors}.")
        check_choice("neighbors", neighbors, get_args(NeighborSearch))
        if not 0.0 < recall <= 1.0:
            raise ConfigError(f"recall must be above 0 and at most 1, got {recall}.")
        self.num_neighbors = num_neighbors
        self.neighbors = neighbors
        self.recall = recall

    def prepare(self, ground: GroundSet, *, num_masks: int) -> None:
        """See `Objective.prepare`. Collective over `ground.shares.ranks` and `ground.shares.helpers`."""
        # exact lists are N^2 D products, brute force R K N D; approximate lists are found where they are asked for, so
        # that all masks are judged by them
        is_cheaper = num_masks * ground.num_selected >= ground.num_samples
        if is_cheaper or is_approximate(self.neighbors, ground.num_samples):
            self._table(ground)

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        self.prepare(ground, num_masks=masks_RN.shape[0])
        if not ground.shares.is_cached(self._key(ground)):
            return torch.stack([self._brute_force(mask_N, ground) for mask_N in masks_RN])
        table, n = self._table(ground), ground.num_samples
        packed_NB = pack_bits(masks_RN.T.contiguous())
        total_R = torch.zeros(masks_RN.shape[0], dtype=torch.float64, device=ground.device)
        open_rows: list[list[Tensor]] = [[] for _ in masks_RN]
        # so short that what is looked up for all masks stays in a CPU's caches
        num_rows = max(rows_at_once(MAX_LOOKED_UP // max(len(masks_RN), 1), ground.device), 1)
        for chunk in split_panels(table.chunks, num_rows):
            nearest_CR, is_open_CR = facility_location.nearest_kept_similarity(
                table.similarity_TV[:, chunk], table.neighbor_TV[:, chunk], packed_NB, len(masks_RN)
            )
            total_R += round_to_grid(nearest_CR, bound=2.0 * n).sum(0)
            for index in is_open_CR.any(0).nonzero().squeeze(1).tolist():
                open_rows[index].append(table.rows_V[chunk][is_open_CR[:, index]])
        if is_open := [index for index, parts in enumerate(open_rows) if parts]:
            nearest = self._nearest_kept([torch.cat(open_rows[index]) for index in is_open], masks_RN[is_open], ground)
            for index, nearest_V in zip(is_open, nearest, strict=True):
                total_R[index] += round_to_grid(nearest_V, bound=2.0 * n).sum()
        return ground.shares.ranks.sum_(total_R) / n

    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.value_and_gradient`."""
        n, table = ground.num_samples, self._table(ground)
        p_table_N = p_N.to(torch.float64 if table.similarity_TV.dtype == torch.float64 else torch.float32)
        scale = grid_scale(2.0 * n)
        # one row of sums: the gradient, then the value and the bound on the truncation
        totals = torch.zeros(n + 2, dtype=torch.float64, device=ground.device)
        buffers = self._buffers(ground, p_table_N.dtype)
        for chunk in table.chunks:
            matrices = buffers.of_size(chunk.stop - chunk.start)
            neighbors = matrices.neighbor_TV.copy_(table.neighbor_TV[:, chunk]).view(-1)
            torch.index_select(p_table_N, 0, neighbors, out=matrices.p_TV.view(-1))
            coverage = facility_location.expected_coverage(
                table.similarity_TV[:, chunk], matrices.p_TV, scale=scale, matrices=matrices
            )
            gains = matrices.addend_TV.copy_(coverage.gain_TV.round_())
            totals.index_add_(0, neighbors, gains.view(-1))
            totals[n] += (coverage.value_V.double() * scale).round_().sum()
            totals[n + 1] += coverage.left_out_V.double().round_().sum()
        ground.shares.ranks.sum_(totals).mul_(1 / scale).div_(n)
        diagnostics = {"truncation_bound": totals[n + 1]}
        if is_approximate(self.neighbors, n):
            diagnostics["recall"] = torch.tensor(table.recall, dtype=torch.float64, device=ground.device)
        return Expectation(totals[n], totals[:n], diagnostics)

    def coverage(self, mask_N: Tensor, rows_P: Tensor, ground: GroundSet) -> tuple[Tensor, Tensor, Tensor]:
        """See `SupportsCoverage.coverage`."""
        table = self._table(ground)
        candidate_N = torch.where(mask_N, facility_location.OTHER_KEPT, facility_location.OTHER).int()
        candidate_N[rows_P] = torch.arange(rows_P.numel(), dtype=torch.int32, device=rows_P.device)
        parts = []
        for chunk in table.chunks:
            neighbor_TC = table.neighbor_TV[:, chunk]
            candidate_TC = candidate_N.index_select(0, neighbor_TC.reshape(-1)).view(neighbor_TC.shape)
            sample_E, candidate_E, more_E = facility_location.candidate_entries(
                table.similarity_TV[:, chunk], candidate_TC
            )
            parts.append(torch.stack([table.rows_V[chunk][sample_E].double(), candidate_E.double(), more_E]))
        own = torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.float64, device=ground.device)
        sample_E, candidate_E, more_E = ground.shares.ranks.concatenate(own)
        return sample_E.long(), candidate_E.long(), more_E / ground.num_samples

    def service(self, p_N: Tensor, ground: GroundSet) -> ServiceDual:
        """See `SupportsService.service`."""
        table = self._table(ground)
        return ServiceDual(
            table.similarity_TV,
            table.neighbor_TV,
            is_whole=len(table.neighbor_TV) == ground.num_samples,
            p_N=p_N,
            sum_over_ranks=ground.shares.ranks.sum_,
        )

    def missed_service(self, v_V: Tensor, ground: GroundSet, *, seed: int) -> float | None:
        """See `SupportsService.missed_service`."""
        if not is_approximate(self.neighbors, ground.num_samples):
            return None
        table, n = self._table(ground), ground.num_samples
        generator = torch.Generator().manual_seed(seed)
        looked_at = torch.randint(n, (min(n, MISSED_ROWS),), generator=generator).to(ground.device)
        times_N = torch.bincount(looked_at, minlength=n)
        place_Q = times_N[table.rows_V].nonzero().squeeze(1)
        sums = torch.zeros(2, dtype=torch.float64, device=ground.device)
        for place_P in torch.split(place_Q, OPEN_ROWS) if len(place_Q) else ():
            more_P = self._above_lists(place_P, v_V, table, ground)
            times_P = times_N[table.rows_V[place_P]]
            sums += torch.stack([round_to_grid(more_P**power, bound=2.0 * n) @ times_P.double() for power in (1, 2)])
        mean, square = (ground.shares.ranks.sum_(sums) / len(looked_at)).tolist()
        deviation = max(square - mean**2, 0.0) ** 0.5
        return float(mean + QUANTILE_99 * deviation / len(looked_at) ** 0.5)

    @staticmethod
    def _above_lists(place_P: Tensor, v_V: Tensor, table: NeighborTable, ground: GroundSet) -> Tensor:
        """By how much the most similar sample exceeds the multiplier and its number in the list: float64 (P,)."""
        rows_P, v_P = table.rows_V[place_P], v_V[place_P]
        known_PN = v_P.float()[:, None].repeat(1, ground.num_samples)
        similarity_PT = table.similarity_TV[:, place_P].T.float()
        known_PN.scatter_(1, table.neighbor_TV[:, place_P].T.long(), torch.maximum(similarity_PT, v_P.float()[:, None]))
        own_PD, more_P = ground.features(rows_P), torch.zeros_like(v_P)
        for rows in ground.shares.slices_of(RankGroup()):
            excess_P = (own_PD @ ground.features(rows).T - known_PN[:, rows]).amax(1)
            more_P = torch.maximum(more_P, excess_P.double())
        return more_P

    def _key(self, ground: GroundSet) -> tuple[str, int, str, float]:
        wanted = self.num_neighbors or min(
            MAX_NEIGHBORS, max(MIN_NEIGHBORS, -(-6 * ground.num_samples // ground.budget.typical_size))
        )
        return "neighbors", min(wanted, ground.num_samples), self.neighbors, self.recall

    def _table(self, ground: GroundSet) -> NeighborTable:
        key = self._key(ground)
        return ground.shares.cached(
            key,
            lambda: build_table(ground, num_neighbors=key[1], search=self.neighbors, wanted_recall=self.recall),
        )

    def _buffers(self, ground: GroundSet, dtype: torch.dtype) -> facility_location.WalkBuffers:
        table = self._table(ground)
        longest = max((chunk.stop - chunk.start for chunk in table.chunks), default=0)
        return ground.shares.cached(
            ("walk_buffers", self._key(ground), dtype),
            lambda: facility_location.WalkBuffers(len(table.neighbor_TV), longest, dtype=dtype, device=ground.device),
        )

    @staticmethod
    def _nearest_kept(rows: Sequence[slice | Tensor], masks_RN: Tensor, ground: GroundSet) -> list[Tensor]:
        """Similarity of some rows to the nearest kept sample of each mask, by brute force: float (V,) for each mask.

        2 V K D operations a mask, most of them quick; bits do not depend on what else is asked for.
        """
        pairs: SimilarPairs = ground.shares.cached(
            "similar_pairs", lambda: SimilarPairs.among(ground.features, list(ground.shares.slices_of(RankGroup())))
        )
        num_rows, num_kept = (rows_at_once(count, ground.device) for count in (OPEN_ROWS, PANEL_ROWS))
        first_N = ground.first_copies()

        def distinct(rows_V: Tensor) -> tuple[Tensor, Tensor | None]:
            """The samples without copies, and where each has gone."""
            return (rows_V, None) if first_N is None else torch.unique(first_N[rows_V], return_inverse=True)

        def nearest(rows_P: Tensor, kept_K: Tensor) -> Tensor:
            kept = (ground.features(kept_P) for kept_P in torch.split(kept_K, num_kept))
            return pairs.highest(ground.features(rows_P), kept)

        with one_thread_each(ground.device) as start:
            waiting = []
            for rows_V, mask_N in zip(rows, masks_RN, strict=True):
                kept_K, _ = distinct(mask_N.nonzero().squeeze(1))
                open_V, place_V = distinct(rows_of(rows_V, ground.device))
                parts = torch.split(open_V, num_rows)
                waiting.append((place_V, [start(nearest, part_P, kept_K) for part_P in parts]))
            found = [(place_V, torch.cat([wait() for wait in of_mask])) for place_V, of_mask in waiting]
            return [nearest_V if place_V is None else nearest_V[place_V] for place_V, nearest_V in found]

    @classmethod
    def _brute_force(cls, mask_N: Tensor, ground: GroundSet) -> Tensor:
        total = ground.shares.sum_over_slices(
            lambda rows: cls._nearest_kept([rows], mask_N[None], ground)[0].double().sum(),
            bound=2.0 * ground.num_samples,
        )
        return total / ground.num_samples
