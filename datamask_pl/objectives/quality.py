"""Mean quality of the kept samples.

Shapes: R masks, N samples, C and O some of them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from datamask_pl.functional.bound import Plane
from datamask_pl.functional.kernels import take_rows
from datamask_pl.functional.terms.quality import quality_value
from datamask_pl.objectives.base import ClosedFormObjective, Expectation
from datamask_pl.objectives.bound_support import SupportsTangents
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.swap_support import SupportsInteractions


class Quality(ClosedFormObjective, SupportsInteractions, SupportsTangents):
    """Mean scaled quality of the set. Exact in every estimator."""

    is_linear: ClassVar[bool] = True

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `SupportsInteractions.interactions`."""
        num_rows = take_rows(ground.quality_N, rows).numel()
        return torch.zeros((), device=others.device).expand(num_rows, others.numel())

    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.value`."""
        return quality_value(masks_RN, ground.quality_N, num_selected=ground.num_selected)

    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.value_and_gradient`."""

        def build() -> Tensor:
            return ground.quality_N.double() / ground.num_selected

        # where sizes are free, num_selected is of this p alone
        gradient_N = ground.shares.cached("quality_gradient", build) if ground.budget.is_size_fixed else build()
        return Expectation(p_N @ gradient_N, gradient_N)

    def tangent(self, p_N: Tensor, ground: GroundSet, *, sizes: tuple[int, int]) -> Plane:
        """See `SupportsTangents.tangent`."""
        quality_N = ground.quality_N.double()
        return Plane(quality_N.new_zeros(()), torch.maximum(quality_N / sizes[0], quality_N / sizes[1]))

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `ClosedFormObjective.size_slope`."""
        return -found.value / ground.num_selected
