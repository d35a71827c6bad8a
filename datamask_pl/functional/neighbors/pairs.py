"""The pairs of samples that are similar: found by quick products, then multiplied one by one.

The similarity of two samples is one inner product in the features' own type, whose bits depend on nothing but the two.
Whole matrices of products only tell which pairs to multiply. They may therefore be of bfloat16, several times as fast
where the hardware multiplies it: what rounding can do to them is known, and no pair is lost to it.

Shapes: N samples, P and C samples of two panels, E pairs, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.device import multiplies_bfloat16
from datamask_pl.functional.kernels import (
    highest_above_zero,
    kth_largest,
    multiply_bfloat16,
    pair_products,
    positions,
    positions_from,
)

Rows = slice | Tensor
Features = Callable[[Rows], Tensor]

# Where quick products leave more pairs of a row with its highest, products of the rows' own type are quicker.
MAX_PAIRS = 128
# Up to so many pairs are multiplied one by one: sooner done than looking for those that may be the highest.
FEW_PAIRS = 2**13


@dataclass(frozen=True)
class SimilarPairs:
    """Finds pairs whose similarity is not below a bound.

    Attributes:
        slack: an upper bound on how far a quick product, before it is rounded, is from the pair's similarity.
        is_quick: whether quick products are of bfloat16.
    """

    slack: float
    is_quick: bool

    @classmethod
    def among(cls, features: Features, parts: Iterable[Rows]) -> SimilarPairs:
        """Finds out what rounding does to the samples.

        |<x, y> - <x', y'>| is at most |x - x'| |y| + |x'| |y - y'|, where x' and y' are the rounded rows. To that comes
        what the additions round: D 2^-24 for each of the two products, in whichever order, and as much in reserve.

        Args:
            features: returns unit rows of a slice of samples, or of some samples.
            parts: all samples, in parts.
        """
        empty = features(slice(0, 0))
        slack = _slack_of_sums(empty)
        if empty.dtype != torch.float32 or not multiplies_bfloat16(empty.device):
            return cls(slack, is_quick=False)
        error = empty.new_zeros(())
        for rows in parts:
            features_PD = features(rows)
            errors_P = (features_PD - features_PD.bfloat16()).norm(dim=1)
            error = torch.maximum(error, errors_P.max()) if len(errors_P) else error
        # a hundredth more for |x'| above 1, and for norms that are not 1 to the last bit
        return cls(slack + 2.02 * float(error), is_quick=True)

    def bounds(self, own_PD: Tensor, others: Sequence[Tensor], rank: int) -> Tensor:
        """A lower bound on the `rank`-th largest similarity of each row to the others: float32 (P,).

        Args:
            own_PD: unit rows.
            others: unit rows (C, D), in parts, at least `rank` in all.
            rank: from 1.
        """
        return self._below(kth_largest(torch.cat([self._products(own_PD, other) for other in others], dim=1), rank))

    def at_least(
        self, left_PD: Tensor, right_CD: Tensor, bound_P: Tensor | None, bound_C: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs whose similarity is at least one of two bounds, and a few more.

        Args:
            left_PD: unit rows.
            right_CD: unit rows.
            bound_P: float32 (P,), None for no bounds on this side.
            bound_C: float32 (C,), likewise; one of the two is not None.

        Returns:
            row_E: int64, ascending.
            column_E: int64, ascending within a row.
            similarity_E: float32.
        """
        products = self._products(left_PD, right_CD)
        # rounding keeps order: a product that was not below the bound is not below the rounded bound
        low_P, low_C = (
            None if bound is None else (bound - self.slack).to(products.dtype) for bound in (bound_P, bound_C)
        )
        row_E, column_E = _places(positions_from(products, low_P, low_C), len(right_CD))
        return row_E, column_E, pair_products(left_PD, right_CD, row_E, column_E).float()

    def highest(self, own_PD: Tensor, others: Iterable[Tensor]) -> Tensor:
        """max(0, highest similarity to the others) of each row, whose bits depend on nothing but them: (P,).

        Args:
            own_PD: unit rows.
            others: unit rows (C, D), in parts.

        Returns:
            in the rows' type.
        """
        best_P, pairs = own_PD.new_zeros(len(own_PD)), self
        for other_CD in others:
            pairs = pairs._with_higher_bound(best_P, own_PD, other_CD)
        return best_P

    def _with_higher_bound(self, best_P: Tensor, own_PD: Tensor, other_CD: Tensor) -> SimilarPairs:
        """Raises `best_P` to the similarities above it; returns the pairs to continue with."""
        num_pairs = len(own_PD) * len(other_CD)
        if num_pairs == 0:
            return self
        if num_pairs <= FEW_PAIRS:
            places = _places(torch.arange(num_pairs, device=own_PD.device), len(other_CD))
            products_PC = pair_products(own_PD, other_CD, *places).view(len(own_PD), len(other_CD))
            best_P.copy_(torch.maximum(best_P, products_PC.amax(1)))
            return self
        # 1. quick products say which rows may have a higher similarity here, and with which columns
        products = self._products(own_PD, other_CD)
        top_P = highest_above_zero(products)
        low_P = torch.maximum(best_P.float(), self._below(top_P)) - self.slack
        # the highest of most rows is in a part that was seen before
        rows = positions(top_P >= low_P.to(top_P.dtype))
        position_E = positions_from(products[rows], low_P[rows].to(products.dtype), None)
        # 2. rows too alike for quick products: repeat, and continue, with products of the rows' own type
        if self.is_quick and len(position_E) > MAX_PAIRS * len(rows):
            return SimilarPairs(_slack_of_sums(own_PD), is_quick=False)._with_higher_bound(best_P, own_PD, other_CD)
        # 3. the remaining pairs are multiplied one by one, which decides
        row_E, column_E = _places(position_E, len(other_CD))
        best_P.scatter_reduce_(0, rows[row_E], pair_products(own_PD[rows], other_CD, row_E, column_E), "amax")
        return self

    def _below(self, quick_P: Tensor) -> Tensor:
        """Lower bounds on similarities whose quick products these are: float32 (P,)."""
        quick_P = quick_P.float()
        # of bfloat16, a result is rounded too
        return quick_P - self.slack - quick_P.abs() * 2.0**-8 if self.is_quick else quick_P - self.slack

    def _products(self, left_PD: Tensor, right_CD: Tensor) -> Tensor:
        if self.is_quick:
            return multiply_bfloat16(left_PD, right_CD)
        return left_PD @ right_CD.T


def _slack_of_sums(rows_PD: Tensor) -> float:
    """The slack of products in the rows' own type."""
    return rows_PD.shape[1] * 2.0**-22


def _places(position_E: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of positions in a matrix."""
    row_E = position_E.div(num_columns, rounding_mode="floor")
    return row_E, position_E - row_E * num_columns
