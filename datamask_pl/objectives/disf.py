"""The term DiSF of the objective.

Shapes: R masks, N samples, C samples of a slice, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.bound import Plane
from datamask_pl.functional.terms import disf, pairwise
from datamask_pl.objectives.base import ClosedFormObjective, Expectation
from datamask_pl.objectives.bound_support import SupportsTangents
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.swap_support import SupportsInteractions

# Ground sets up to this many samples keep their squared Gram matrix: 64 MiB.
MAX_GRAM_SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class _WithSizeSlope(Expectation):
    """An expectation that knows its derivative by the size of the mask, a float64 scalar."""

    size_slope: Tensor


class DiSF(ClosedFormObjective, SupportsInteractions, SupportsTangents):
    """Minus the squared Frobenius norm of the set's covariance: no direction of the features may dominate.

    Args:
        standardize: divide by the standard deviation of each dimension over the selected set, and drop the
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

    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """See `ClosedFormObjective.value_and_gradient`."""
        return self._closed_form_standardized(p_N, ground) if self.standardize else self._closed_form_plain(p_N, ground)

    @property
    def has_interactions(self) -> bool:
        """See `SupportsInteractions.has_interactions`."""
        return not self.standardize

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """See `SupportsInteractions.interactions`."""
        return disf.disf_interactions(ground.centered(rows), ground.centered(others), num_selected=ground.num_selected)

    @property
    def has_tangents(self) -> bool:
        """See `SupportsTangents.has_tangents`."""
        return not self.standardize

    def tangent(self, p_N: Tensor, ground: GroundSet, *, sizes: tuple[int, int]) -> Plane:
        """See `SupportsTangents.tangent`: -|M(m)|^2 is concave."""
        moment_DD = self._moment(p_N, ground)
        forms_N = self._by_pieces(lambda rows: disf.quadratic_forms(ground.centered(rows), moment_DD), ground)
        factor = 1.0 / sizes[1] ** 2
        return Plane(moment_DD.square().sum() * factor, -2.0 * factor * forms_N)

    def _closed_form_plain(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        k = ground.num_selected
        is_mask = bool(((p_N == 0) | (p_N == 1)).all())
        # gains of a mask choose the swaps, and are as exact as its value
        is_quick = ground.multiplies_bfloat16 and not is_mask
        if is_mask:
            moment_DD = self._moment_of_mask(p_N == 1, ground)
        else:
            moment_DD = self._moment(p_N, ground, multiply=disf.quick_moment if is_quick else disf.weighted_moment)
        fourth_power_N = ground.shares.cached(
            "fourth_power",
            lambda: self._by_pieces(lambda rows: ground.centered(rows).square().sum(1).double().square(), ground),
        )
        squared_norm_N = fourth_power_N.sqrt()

        def forms(rows: slice) -> Tensor:
            centered_CD = ground.centered(rows)
            if is_quick:
                return disf.quick_quadratic_forms(centered_CD, moment_DD, squared_norm_N[rows])
            return disf.quadratic_forms(centered_CD, moment_DD)

        forms_N = self._by_pieces(forms, ground)
        gradient_N = -(2 * forms_N + (1 - 2 * p_N) * fourth_power_N) / k**2
        return Expectation(disf.disf_expectation(moment_DD, p_N, fourth_power_N, num_selected=k), gradient_N)

    def _closed_form_standardized(self, p_N: Tensor, ground: GroundSet) -> Expectation:
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

        return _WithSizeSlope(value.detach(), ground.shares.map_over_slices(marginal_gains), size_slope=size_slope)

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """See `ClosedFormObjective.size_slope`."""
        return found.size_slope if isinstance(found, _WithSizeSlope) else -2.0 * found.value / ground.num_selected

    @staticmethod
    def _by_pieces(part: Callable[[slice], Tensor], ground: GroundSet) -> Tensor:
        """One value a row, of pieces that stay in the caches: float64 (N,). Collective."""
        return ground.shares.map_over_slices(
            lambda rows: torch.cat([part(piece) for piece in disf.pieces(rows, ground.device)])
        )

    @classmethod
    def _moment_of_mask(cls, mask_N: Tensor, ground: GroundSet) -> Tensor:
        """The moment of a mask; the last one is kept, since a mask's gains are asked for after its value."""
        last: list[tuple[Tensor, Tensor]] = ground.shares.cached("last_mask_and_moment", list)
        if not last or not torch.equal(last[0][0], mask_N):
            last[:] = [(mask_N.clone(), cls._moment(mask_N, ground))]
        return last[0][1]

    @classmethod
    def _moments(cls, masks_RN: Tensor, ground: GroundSet, *, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """The moment of each mask; for a mask close to the one before, only the difference is added."""
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
        return ground.shares.sum_over_slices(part, bound=4.0 * ground.num_samples)

    @staticmethod
    def _sum(weights_N: Tensor, ground: GroundSet) -> Tensor:
        ground.mean()
        return ground.shares.sum_over_slices(
            lambda rows: pairwise.mask_sums(ground.centered(rows).double(), weights_N[None, rows])[0],
            bound=2.0 * ground.num_samples,
        )

    @staticmethod
    def _squared_gram(ground: GroundSet) -> list[Tensor]:
        return ground.shares.cached("squared_gram", lambda: disf.squared_gram(ground.centered(slice(None))))
