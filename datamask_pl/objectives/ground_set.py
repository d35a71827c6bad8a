"""What an objective is evaluated on: the samples of a block, or of one step's part of it.

Shapes: N samples, C samples of a slice, D features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional import multilinear
from datamask_pl.functional.constraint import Constraint
from datamask_pl.functional.device import move, multiplies_bfloat16
from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.kernels import take_rows, top_k_mask
from datamask_pl.functional.neighbors import duplicates

T = TypeVar("T")

# Unit float32 features up to this size are kept beside the stored ones; above it each slice is converted when read.
FLOAT32_COPY_BYTES = 256 * 2**20
# Centred float32 features up to this size are kept, too: of 24,000 samples of 512 features, or of a pool of exchanges.
CENTERED_COPY_BYTES = 48 * 2**20
# At least this many slices where a block is large enough for it, so that up to as many ranks have work.
MIN_SLICES = 8
MIN_SLICE_ROWS = 1024


class GroundSet:
    """The samples among which a mask chooses, with what is derived from them kept for as long as it lives.

    The rows are cut into slices that do not depend on the number of ranks; every rank reads its share of the slices.
    With the default `ranks` all methods are local, and may be called by one rank alone.

    Args:
        features_ND: float16 or float32 (N, D), on `device`, or on the host where they do not fit there.
        quality_N: float32 (N,), scaled quality.
        num_selected: the budget, in [1, N]; with costs the number of samples that it is expected to pay for.
        inv_norm_N: float32 (N,), factors that give the features unit L2 norm; None if they have it.
        num_slice_rows: rows of a slice, at most.
        ranks: the ranks that share the slices. With more than one, reading methods are collective.
        helpers: the ranks that hold this same ground set, each for itself. What is derived from it may be made
            together, where all of them ask for it at the same time; reading methods stay local.
        device: where everything is computed, and where the other tensors are; that of the features if left out.
        constraint: which masks of the samples are allowed; None for all of `num_selected` samples.
    """

    def __init__(
        self,
        *,
        features_ND: Tensor,
        quality_N: Tensor,
        num_selected: int,
        inv_norm_N: Tensor | None = None,
        num_slice_rows: int = 16_384,
        ranks: RankGroup | None = None,
        helpers: RankGroup | None = None,
        device: torch.device | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.quality_N = quality_N
        self.num_selected = num_selected
        self.typical_size = num_selected
        self.constraint = constraint
        self.num_samples, self.num_features = features_ND.shape
        self.device = device or features_ND.device
        self.ranks = ranks or RankGroup()
        self.helpers = helpers or RankGroup()
        self._features_ND = features_ND
        self._inv_norm_N = inv_norm_N
        self._dtype = torch.float64 if features_ND.dtype == torch.float64 else torch.float32
        self._cache: dict[Hashable, object] = {}
        self._whole: GroundSet | None = None
        num_slices = max(
            math.ceil(self.num_samples / num_slice_rows), min(MIN_SLICES, self.num_samples // MIN_SLICE_ROWS), 1
        )
        self._edges = [index * self.num_samples // num_slices for index in range(num_slices + 1)]
        if features_ND.shape.numel() * 4 <= FLOAT32_COPY_BYTES and features_ND.dtype != torch.float64:
            self._features_ND = self.features(slice(None))
            self._inv_norm_N = None

    def features(self, rows: slice | Tensor) -> Tensor:
        """Unit features of some rows, on the device: float32 (C, D). Never computes in half precision."""
        is_resident = self._features_ND.device == self.device
        stored_rows = rows if is_resident or isinstance(rows, slice) else rows.to(self._features_ND.device)
        features_CD = move(take_rows(self._features_ND, stored_rows), self.device)
        is_copy = features_CD.dtype == torch.float16
        if is_copy:
            features_CD = features_CD.float()
        if self._inv_norm_N is None:
            return features_CD
        inv_norm_C1 = take_rows(self._inv_norm_N, rows)[:, None]
        return features_CD.mul_(inv_norm_C1) if is_copy else features_CD * inv_norm_C1

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if features are float32, and products of bfloat16 are much faster."""
        return self._dtype == torch.float32 and multiplies_bfloat16(self.device)

    @property
    def has_free_size(self) -> bool:
        """True if masks of different sizes are allowed, as they are where samples have costs."""
        return self.constraint is not None and self.constraint.has_costs

    def sized(self, num_selected: int | float | Tensor) -> GroundSet:
        """The same ground set, with what is derived from it, seen by a mask of this size or expected size."""
        other = copy.copy(self)
        other.num_selected = num_selected  # type: ignore[assignment]  # an expected size is no whole number
        return other

    def unshared(self, helpers: RankGroup) -> GroundSet:
        """The same ground set, evaluated by each of these ranks for itself."""
        other = copy.copy(self)
        other.ranks, other.helpers, other._cache = RankGroup(), helpers, {}
        return other

    def part(self, rows: Tensor) -> GroundSet:
        """Some of the samples, int64 (C,), by themselves, with the mean and the budget of all, for this rank alone."""
        other = copy.copy(self)
        other._features_ND, other._inv_norm_N, other._whole = self.features(rows), None, self
        other.quality_N, other.num_samples, other.constraint = self.quality_N[rows], rows.numel(), None
        other.ranks, other.helpers, other._cache = RankGroup(), RankGroup(), {}
        other._edges = [0, rows.numel()]
        return other

    def top_k(self, scores_N: Tensor) -> Tensor:
        """The mask of the highest scores that is allowed: bool (N,). Equal scores are taken in row order."""
        return top_k_mask(scores_N, self.num_selected) if self.constraint is None else self.constraint.fill(scores_N)

    def probabilities(self, logits_N: Tensor, *, is_shared: bool = False) -> Tensor:
        """Inclusion probabilities that meet the budget on average: float64 (N,). Collective if `is_shared`."""
        if self.constraint is not None:
            return self.constraint.probabilities(logits_N)
        over_slices = self.stack_over_slices if is_shared else multilinear.in_one_slice
        return multilinear.inclusion_probabilities(logits_N, self.num_selected, over_slices=over_slices)

    def ascent_direction(self, gradient_N: Tensor, p_N: Tensor) -> Tensor:
        """Direction in which the logits move, for a gradient in the probabilities: float64 (N,). Collective."""
        if self.constraint is not None:
            return self.constraint.ascent_direction(gradient_N, p_N)
        return multilinear.ascent_direction(gradient_N, p_N, over_slices=self.stack_over_slices)

    def undecided_share(self, p_N: Tensor) -> Tensor:
        """How much of the budget is still undecided, scalar in [0, 1]."""
        return multilinear.undecided_share(p_N, p_N.sum() if self.has_free_size else self.num_selected)

    def own_slices(self) -> Iterator[slice]:
        """This rank's slices, in row order."""
        return self.slices_of(self.ranks)

    def slices_of(self, ranks: RankGroup) -> Iterator[slice]:
        """The slices that fall to this rank where `ranks` share them, in row order."""
        for index in ranks.share(len(self._edges) - 1):
            yield slice(self._edges[index], self._edges[index + 1])

    def own_rows(self) -> range:
        """This rank's rows: its slices end to end."""
        return self._rows_of_ranks()[self.ranks.rank]

    def sum_over_slices(self, part: Callable[[slice], Tensor], *, bound: float) -> Tensor:
        """Sum over all slices of `part(rows)`, the same bits on any number of ranks. Collective.

        Args:
            part: a slice's part of the sum, float of any shape, the same for every slice.
            bound: upper bound on the sum over slices of the absolute value of any element, positive.

        Returns:
            float64, of the shape that `part` returns.
        """
        total: Tensor | None = None
        for rows in self.own_slices():
            addend = round_to_grid(part(rows), bound=bound)
            total = addend if total is None else total.add_(addend)
        if total is None:  # more ranks than slices: learn the shape from no rows
            total = part(slice(0, 0)).double().zero_()
        return self.ranks.sum_(total)

    def stack_over_slices(self, part: Callable[[slice], Tensor]) -> Tensor:
        """What `part(rows)` is of every slice, for sums of which no bound is known. Collective.

        Args:
            part: float of any shape, the same for every slice.

        Returns:
            float64 (number of slices, ...), the same bits on any number of ranks.
        """
        num_slices = len(self._edges) - 1
        own = [part(rows) for rows in self.own_slices()]
        shape = own[0].shape if own else part(slice(0, 0)).shape
        parts = torch.zeros(num_slices, *shape, dtype=torch.float64, device=self.device)
        for index, values in zip(self.ranks.share(num_slices), own, strict=True):
            parts[index] = values
        return self.ranks.sum_(parts)

    def map_over_slices(self, part: Callable[[slice], Tensor]) -> Tensor:
        """Puts together one value a row, each computed by one rank. Collective.

        Args:
            part: float (C,) for a slice's rows; in which type values travel between ranks.

        Returns:
            float64 (N,).
        """
        values_N: Tensor | None = None
        for rows in self.own_slices():
            values_C = part(rows)
            if values_N is None:
                values_N = values_C.new_empty(self.num_samples)
            values_N[rows] = values_C
        if values_N is None:  # more ranks than slices: learn the type from no rows
            values_N = part(slice(0, 0)).new_empty(self.num_samples)
        return self.ranks.complete_(values_N, self._rows_of_ranks()).double()

    def _rows_of_ranks(self) -> list[range]:
        shares = self.ranks.shares(len(self._edges) - 1)
        return [range(self._edges[share.start], self._edges[share.stop]) for share in shares]

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns what `build` made when the key was first asked for. Collective if `build` is."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]  # type: ignore[return-value]  # the key's owner knows its type

    def forget(self) -> None:
        """Drops what was derived from the samples; it is derived again where it is asked for."""
        self._cache.clear()

    def is_cached(self, key: Hashable) -> bool:
        """True if the key has been built."""
        return key in self._cache

    def first_copies(self) -> Tensor | None:
        """For each sample the first one of the same features, where there are many; see `first_of_duplicates`."""
        return self.cached(
            "first_copies", lambda: duplicates.first_of_duplicates(self.features, list(self.slices_of(RankGroup())))
        )

    def mean(self) -> Tensor:
        """Mean of the unit features over the whole ground set: float64 (D,). Collective when first called."""
        if self._whole is not None:
            return self._whole.mean()
        return self.cached(
            "mean",
            lambda: (
                self.sum_over_slices(lambda rows: self.features(rows).sum(0), bound=self.num_samples) / self.num_samples
            ),
        )

    def centered(self, rows: slice | Tensor) -> Tensor:
        """Unit features minus their mean: float32 (C, D), not to be changed."""
        mean_D = self.mean().to(self._dtype)
        if self.num_samples * self.num_features * 4 > CENTERED_COPY_BYTES:
            return self.features(rows) - mean_D
        return take_rows(self.cached("centered", lambda: self.features(slice(None)) - mean_D), rows)
