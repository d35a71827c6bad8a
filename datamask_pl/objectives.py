"""The terms of the objective, one class each, configurable from YAML by name or class path.

Shapes: R masks, N samples, C samples of a slice, D features, T neighbours, V samples whose lists a rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from datamask_pl import feature_sums
from datamask_pl.errors import ConfigError
from datamask_pl.functional import disf, facility_location, pairwise
from datamask_pl.functional.device import pack_bits, take_rows
from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.quality import quality_value, weigh_masks
from datamask_pl.ground_set import GroundSet
from datamask_pl.neighbor_table import NeighborSearch, NeighborTable, build_table, is_approximate
from datamask_pl.objective import ClosedFormObjective, Expectation, Objective

__all__ = [
    "ClosedFormObjective",
    "DiSF",
    "DiversityName",
    "Expectation",
    "FacilityLocation",
    "Objective",
    "PairwiseSimilarity",
    "Quality",
]

DiversityName = Literal["facility_location", "pairwise", "disf"]

# Bounds on the default length of a neighbour list.
MIN_NEIGHBORS, MAX_NEIGHBORS = 16, 512
# Ground sets up to this many samples keep their squared Gram matrix for DiSF: 64 MiB.
MAX_GRAM_SAMPLES = 4096


class Quality(ClosedFormObjective):
    """Mean scaled quality of the set. Exact in every estimator."""

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.interactions`."""
        num_rows = take_rows(ground.quality_N, rows).numel()
        return torch.zeros((), device=others.device).expand(num_rows, others.numel())

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        return quality_value(masks_RN, ground.quality_N, num_selected=ground.num_selected)

    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.linearize`."""

        def build() -> Tensor:
            return ground.quality_N.double() / ground.num_selected

        # where sizes are free, num_selected is of this p alone
        gradient_N = build() if ground.has_free_size else ground.cached("quality_gradient", build)
        return Expectation(p_N @ gradient_N, gradient_N)

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `Objective.size_slope`."""
        return -found.value / ground.num_selected


class PairwiseSimilarity(ClosedFormObjective):
    """Minus the mean cosine between the members of the set. Exact in every estimator."""

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        squared_norms_R = weigh_masks(masks_RN, self._squared_norm(ground))
        return pairwise.pairwise_value(
            feature_sums.of_masks(masks_RN, ground), squared_norms_R, num_selected=ground.num_selected
        )

    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.linearize`."""
        k = ground.num_selected
        sum_D = feature_sums.of_probabilities(p_N, ground)
        norm_N = self._squared_norm(ground)
        gradient_N = ground.map_over_slices(
            lambda rows: pairwise.pairwise_gradient(
                ground.features(rows), p_N[rows], norm_N[rows], sum_D, num_selected=k
            )
        )
        squared_norm = ground.stack_over_slices(lambda rows: (p_N[rows].square() * norm_N[rows]).sum()).sum()
        return Expectation(pairwise.pairwise_value(sum_D[None], squared_norm[None], num_selected=k)[0], gradient_N)

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.interactions`."""
        return pairwise.pairwise_interactions(
            ground.features(rows), ground.features(others), num_selected=ground.num_selected
        )

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `Objective.size_slope`."""
        return -found.value * pairwise.relative_pairs_slope(ground.num_selected)

    @staticmethod
    def _squared_norm(ground: GroundSet) -> Tensor:
        return ground.cached(
            "squared_norm", lambda: ground.map_over_slices(lambda rows: ground.features(rows).square().sum(1))
        )


@dataclass(frozen=True, kw_only=True)
class _WithSizeSlope(Expectation):
    """An expectation that knows its derivative by the size of the mask, a float64 scalar."""

    size_slope: Tensor


class DiSF(ClosedFormObjective):
    """Minus the squared Frobenius norm of the set's covariance: no direction of the features may dominate.

    Args:
        standardize: divide by the standard deviation of each dimension over the selected set, and leave out the
            diagonal, as DiSF's own code does. The expectation is then taken at the expected moments: a first-order
            approximation, exact where the probabilities are 0 and 1.
    """

    def __init__(self, *, standardize: bool = False) -> None:
        self.standardize = standardize

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        k = ground.num_selected
        if self.standardize:
            moments = self._moments(masks_RN, ground, dtype=torch.float64)
            sums = (self._sum(mask_N, ground) for mask_N in masks_RN)
            values = [disf.standardized_value(*both, num_selected=k) for both in zip(sums, moments, strict=True)]
            return torch.stack(values)
        if ground.num_samples <= MAX_GRAM_SAMPLES:
            return disf.disf_values_from_gram(masks_RN, self._squared_gram(ground), num_selected=k)
        if len(masks_RN) == 1:
            return disf.disf_value(self._moment_of_mask(masks_RN[0], ground), num_selected=k)[None]
        return torch.stack([disf.disf_value(moment, num_selected=k) for moment in self._moments(masks_RN, ground)])

    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.linearize`."""
        return self._linearize_standardized(p_N, ground) if self.standardize else self._linearize_plain(p_N, ground)

    @property
    def has_interactions(self) -> bool:
        """See `Objective.has_interactions`."""
        return not self.standardize

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.interactions`."""
        return disf.disf_interactions(ground.centered(rows), ground.centered(others), num_selected=ground.num_selected)

    def _linearize_plain(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        k = ground.num_selected
        if bool(((p_N == 0) | (p_N == 1)).all()):
            moment_DD = self._moment_of_mask(p_N == 1, ground)
        else:
            quick = disf.quick_moment if ground.multiplies_bfloat16 else disf.weighted_moment
            moment_DD = self._moment(p_N, ground, multiply=quick)
        fourth_power_N = ground.cached(
            "fourth_power",
            lambda: self._by_pieces(lambda rows: ground.centered(rows).square().sum(1).double().square(), ground),
        )
        squared_norm_N = fourth_power_N.sqrt()

        def forms(rows: slice) -> Tensor:
            centered_CD = ground.centered(rows)
            if ground.multiplies_bfloat16:
                return disf.quick_quadratic_forms(centered_CD, moment_DD, squared_norm_N[rows])
            return disf.quadratic_forms(centered_CD, moment_DD)

        forms_N = self._by_pieces(forms, ground)
        gradient_N = -(2 * forms_N + (1 - 2 * p_N) * fourth_power_N) / k**2
        return Expectation(disf.disf_expectation(moment_DD, p_N, fourth_power_N, num_selected=k), gradient_N)

    def _linearize_standardized(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        k = ground.num_selected
        with torch.enable_grad():
            sum_D = self._sum(p_N, ground).requires_grad_()
            moment_DD = self._moment(p_N, ground, dtype=torch.float64).requires_grad_()
            size = torch.tensor(float(k), dtype=torch.float64, device=p_N.device, requires_grad=True)
            value = disf.standardized_value(sum_D, moment_DD, num_selected=size)
            slope_D, slope_DD, size_slope = torch.autograd.grad(value, (sum_D, moment_DD, size))

        def marginal_gains(rows: slice) -> Tensor:
            centered_CD = ground.centered(rows).double()
            return disf.quadratic_forms(centered_CD, slope_DD) + centered_CD @ slope_D

        return _WithSizeSlope(value.detach(), ground.map_over_slices(marginal_gains), size_slope=size_slope)

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `Objective.size_slope`."""
        return found.size_slope if isinstance(found, _WithSizeSlope) else -2.0 * found.value / ground.num_selected

    @staticmethod
    def _by_pieces(part: Callable[[slice], Tensor], ground: GroundSet) -> Tensor:
        """One value a row, of pieces that stay in the caches: float64 (N,). Collective."""
        return ground.map_over_slices(
            lambda rows: torch.cat([part(piece) for piece in disf.pieces(rows, ground.device)])
        )

    @classmethod
    def _moment_of_mask(cls, mask_N: Tensor, ground: GroundSet) -> Tensor:
        """The moment of a mask; that of the last one is kept, for after its value its gains are asked for."""
        last: list[tuple[Tensor, Tensor]] = ground.cached("last_mask_and_moment", list)
        if not last or not torch.equal(last[0][0], mask_N):
            last[:] = [(mask_N.clone(), cls._moment(mask_N, ground))]
        return last[0][1]

    @classmethod
    def _moments(cls, masks_RN: Tensor, ground: GroundSet, *, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """The moment of each mask; a mask close to the one before is reached by what differs."""
        before_N, moment_DD = torch.zeros_like(masks_RN[0]), None
        for mask_N in masks_RN:
            if moment_DD is not None and int((mask_N ^ before_N).sum()) < ground.num_selected:
                difference_N = mask_N.double() - before_N.double()
                moment_DD = moment_DD + cls._moment(difference_N, ground, dtype=dtype)
            else:
                moment_DD = cls._moment(mask_N, ground, dtype=dtype)
            before_N = mask_N
            yield moment_DD

    @staticmethod
    def _moment(
        weights_N: Tensor,
        ground: GroundSet,
        *,
        dtype: torch.dtype | None = None,
        multiply: Callable[[Tensor, Tensor], Tensor] = disf.weighted_moment,
    ) -> Tensor:
        """Sum of w z z^T, multiplied in `dtype`: in float32 a constant dimension keeps a variance that is all noise."""
        ground.mean()  # collective when first asked for: never from within a rank's own slices

        def centered(rows: slice | Tensor) -> Tensor:
            centered_CD = ground.centered(rows)
            return centered_CD if dtype is None else centered_CD.to(dtype)

        def part(rows: slice) -> Tensor:
            weights_C = weights_N[rows]
            kept = weights_C.nonzero().squeeze(1)
            # a mask keeps a tenth of the rows, and a settled p not many more
            if kept.numel() < weights_C.numel() // 2:
                return multiply(centered(kept + rows.start), weights_C[kept])
            moments = (multiply(centered(piece), weights_N[piece]) for piece in disf.pieces(rows, ground.device))
            return functools.reduce(torch.Tensor.add_, moments)

        # |z_a z_b| <= |x|^2 + 3 <= 4
        return ground.sum_over_slices(part, bound=4.0 * ground.num_samples)

    @staticmethod
    def _sum(weights_N: Tensor, ground: GroundSet) -> Tensor:
        ground.mean()
        return ground.sum_over_slices(
            lambda rows: pairwise.mask_sums(ground.centered(rows).double(), weights_N[None, rows])[0],
            bound=2.0 * ground.num_samples,
        )

    @staticmethod
    def _squared_gram(ground: GroundSet) -> list[Tensor]:
        return ground.cached("squared_gram", lambda: disf.squared_gram(ground.centered(slice(None))))


class FacilityLocation(ClosedFormObjective):
    """Mean over all samples of the block of the similarity to the most similar kept one.

    `expectation` walks the lists of the nearest neighbours; what lies behind their end is left out, and bounded in the
    log as `truncation_bound`. `value` looks behind their end by brute force, and is exact where the lists are. Where
    they are approximate, a missed neighbour may have been the nearest kept one: `value` is then a lower bound, of every
    mask by the same lists, and `recall` is logged.

    Args:
        num_neighbors: length of each sample's list, itself included; by default 6 / select_ratio, from 16 to 512, so
            that with random inclusion a list without a kept sample is rarer than 1 in 400.
        neighbors: how the lists are found. `exact`: all pairs. `approximate`: among the samples of near clusters.
            `auto`: exact for up to 200,000 samples.
        recall: share of the true neighbours that an approximate search is to find, in (0, 1].

    Raises:
        ConfigError: If an option is out of range.
    """

    def __init__(
        self, *, num_neighbors: int | None = None, neighbors: NeighborSearch = "auto", recall: float = 0.95
    ) -> None:
        if num_neighbors is not None and num_neighbors < 1:
            raise ConfigError(f"num_neighbors must be at least 1, got {num_neighbors}.")
        if neighbors not in get_args(NeighborSearch):
            raise ConfigError(f"neighbors must be one of {', '.join(get_args(NeighborSearch))}, got {neighbors!r}.")
        if not 0.0 < recall <= 1.0:
            raise ConfigError(f"recall must be above 0 and at most 1, got {recall}.")
        self.num_neighbors = num_neighbors
        self.neighbors = neighbors
        self.recall = recall

    def prepare(self, ground: GroundSet, *, num_masks: int) -> None:
        """See `Objective.prepare`. Collective over `ground.ranks` and `ground.helpers`."""
        # exact lists are N^2 D products, brute force R K N D; approximate lists are found where they are asked for, so
        # that all masks are judged by them
        is_cheaper = num_masks * ground.num_selected >= ground.num_samples
        if is_cheaper or is_approximate(self.neighbors, ground.num_samples):
            self._table(ground)

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        self.prepare(ground, num_masks=masks_RN.shape[0])
        if not ground.is_cached(self._key(ground)):
            return torch.stack([self._brute_force(mask_N, ground) for mask_N in masks_RN])
        table, n = self._table(ground), ground.num_samples
        packed_NB = pack_bits(masks_RN.T.contiguous())
        total_R = torch.zeros(masks_RN.shape[0], dtype=torch.float64, device=ground.device)
        open_rows: list[list[Tensor]] = [[] for _ in masks_RN]
        for chunk in table.chunks:
            nearest_CR, is_open_CR = facility_location.nearest_kept_similarity(
                table.similarity_TV[:, chunk], table.neighbor_TV[:, chunk], packed_NB, len(masks_RN)
            )
            total_R += round_to_grid(nearest_CR, bound=2.0 * n).sum(0)
            for index in is_open_CR.any(0).nonzero().squeeze(1).tolist():
                open_rows[index].append(table.rows_V[chunk][is_open_CR[:, index]])
        for index, parts in enumerate(open_rows):
            if not parts:
                continue
            for nearest_C in self._nearest_kept(parts, masks_RN[index], ground):
                total_R[index] += round_to_grid(nearest_C, bound=2.0 * n).sum()
        return ground.ranks.sum_(total_R) / n

    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.linearize`."""
        n, table = ground.num_samples, self._table(ground)
        num_neighbors = table.neighbor_TV.shape[0]
        p_table_N = p_N.to(torch.float64 if table.similarity_TV.dtype == torch.float64 else torch.float32)
        # one row of sums: the gradient, then the value and the bound on the truncation
        totals = torch.zeros(n + 2, dtype=torch.float64, device=ground.device)
        for chunk in table.chunks:
            neighbors = table.neighbor_TV[:, chunk].reshape(-1)
            p_TC = p_table_N.index_select(0, neighbors).view(num_neighbors, -1)
            coverage = facility_location.expected_coverage(table.similarity_TV[:, chunk].to(p_TC.dtype), p_TC)
            totals.index_add_(0, neighbors, round_to_grid(coverage.gain_TV, bound=2.0 * n).view(-1))
            totals[n] += round_to_grid(coverage.value_V, bound=2.0 * n).sum()
            totals[n + 1] += round_to_grid(coverage.left_out_V, bound=2.0 * n).sum()
        ground.ranks.sum_(totals).div_(n)
        diagnostics = {"truncation_bound": totals[n + 1]}
        if is_approximate(self.neighbors, n):
            diagnostics["recall"] = torch.tensor(table.recall, dtype=torch.float64, device=ground.device)
        return Expectation(totals[n], totals[:n], diagnostics)

    def _key(self, ground: GroundSet) -> tuple[str, int, str, float]:
        wanted = self.num_neighbors or min(
            MAX_NEIGHBORS, max(MIN_NEIGHBORS, -(-6 * ground.num_samples // ground.typical_size))
        )
        return "neighbors", min(wanted, ground.num_samples), self.neighbors, self.recall

    def _table(self, ground: GroundSet) -> NeighborTable:
        key = self._key(ground)
        return ground.cached(
            key,
            lambda: build_table(ground, num_neighbors=key[1], search=self.neighbors, wanted_recall=self.recall),
        )

    @staticmethod
    def _nearest_kept(parts: list[Tensor], mask_N: Tensor, ground: GroundSet) -> list[Tensor]:
        """Similarity to the nearest kept sample, by brute force, of some rows in parts: float (C,) each."""
        best = [ground.features(rows[:0]).new_zeros(len(rows)) for rows in parts]
        for kept in torch.split(mask_N.nonzero().squeeze(1), facility_location.LIST_ROWS):
            kept_KD = ground.features(kept)
            for best_C, rows in zip(best, parts, strict=True):
                nearest_C = facility_location.highest_similarity(ground.features(rows), kept_KD)
                torch.maximum(best_C, nearest_C, out=best_C)
        return best

    @staticmethod
    def _brute_force(mask_N: Tensor, ground: GroundSet) -> Tensor:
        kept_KD = ground.features(mask_N)
        total = ground.sum_over_slices(
            lambda rows: facility_location.highest_similarity(ground.features(rows), kept_KD).double().sum(),
            bound=2.0 * ground.num_samples,
        )
        return total / ground.num_samples
