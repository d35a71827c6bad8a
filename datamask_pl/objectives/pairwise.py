"""Pairwise similarity: the kept samples are not similar to each other.

Shapes: R masks, N samples, C and O some of them, D features.
"""

from __future__ import annotations

from torch import Tensor

from datamask_pl.functional.bound import Plane
from datamask_pl.functional.terms import pairwise
from datamask_pl.functional.terms.quality import weigh_masks
from datamask_pl.objectives import feature_sums
from datamask_pl.objectives.base import ClosedFormObjective, Expectation
from datamask_pl.objectives.bound_support import SupportsTangents
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.swap_support import SupportsInteractions


class PairwiseSimilarity(ClosedFormObjective, SupportsInteractions, SupportsTangents):
    """Minus the mean cosine between the members of the set. Exact in every estimator."""

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        squared_norms_R = weigh_masks(masks_RN, self._squared_norm(ground))
        return pairwise.pairwise_value(
            feature_sums.of_masks(masks_RN, ground), squared_norms_R, num_selected=ground.num_selected
        )

    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.value_and_gradient`."""
        k = ground.num_selected
        sum_D = feature_sums.of_probabilities(p_N, ground)
        norm_N = self._squared_norm(ground)
        gradient_N = ground.shares.map_over_slices(
            lambda rows: pairwise.pairwise_gradient(
                ground.features(rows), p_N[rows], norm_N[rows], sum_D, num_selected=k
            )
        )
        squared_norm = ground.shares.stack_over_slices(lambda rows: (p_N[rows].square() * norm_N[rows]).sum()).sum()
        return Expectation(pairwise.pairwise_value(sum_D[None], squared_norm[None], num_selected=k)[0], gradient_N)

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `SupportsInteractions.interactions`."""
        return pairwise.pairwise_interactions(
            ground.features(rows), ground.features(others), num_selected=ground.num_selected
        )

    def tangent(self, p_N: Tensor, ground: GroundSet, *, sizes: tuple[int, int]) -> Plane:
        """See `SupportsTangents.tangent`; the concave function is sum m |x|^2 - |sum m x|^2, per pair."""
        sum_D = feature_sums.of_probabilities(p_N, ground)
        norm_N = self._squared_norm(ground)
        slope_N = ground.shares.map_over_slices(
            lambda rows: pairwise.concave_gradient(ground.features(rows), norm_N[rows], sum_D, sizes=sizes)
        )
        # -|s|^2 has the tangent |s|^2 - 2 s . sum m x
        return Plane(sum_D.square().sum() / pairwise.num_pairs(sizes[1]), slope_N)

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `ClosedFormObjective.size_slope`."""
        return -found.value * pairwise.relative_pairs_slope(ground.num_selected)

    @staticmethod
    def _squared_norm(ground: GroundSet) -> Tensor:
        return ground.shares.cached(
            "squared_norm", lambda: ground.shares.map_over_slices(lambda rows: ground.features(rows).square().sum(1))
        )
