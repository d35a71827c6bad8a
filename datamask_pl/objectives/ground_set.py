"""The samples among which a mask chooses, the budget, and how ranks share the work.

Shapes: N samples, C samples of a slice, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.budget import Budget
from datamask_pl.functional.device import move, multiplies_bfloat16
from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.kernels import take_rows
from datamask_pl.functional.neighbors import duplicates

T = TypeVar("T")

# Unit float32 features up to this size are kept next to the stored ones; above it each slice is converted when read.
FLOAT32_COPY_BYTES = 256 * 2**20
# Centred float32 features up to this size are kept, too: of 24,000 samples of 512 features, or of a pool of swaps.
CENTERED_COPY_BYTES = 48 * 2**20
# At least this many slices where a block is large enough for it, so that up to as many ranks have work.
MIN_SLICES = 8
MIN_SLICE_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Samples:
    """Features and quality.

    Attributes:
        stored_ND: float16, float32 or float64 (N, D), on `device`, or on the host where they do not fit there.
        quality_N: float32 (N,), scaled quality.
        inv_norm_N: float32 (N,), factors that give the stored features unit L2 norm; None if they have it.
        device: where everything is computed, and where the other tensors are.
    """

    stored_ND: Tensor
    quality_N: Tensor
    inv_norm_N: Tensor | None
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of `features`."""
        return torch.float64 if self.stored_ND.dtype == torch.float64 else torch.float32

    def features(self, rows: slice | Tensor) -> Tensor:
        """Unit features of some rows, on the device: float32 (C, D). Never computes in half precision."""
        is_resident = self.stored_ND.device == self.device
        stored_rows = rows if is_resident or isinstance(rows, slice) else rows.to(self.stored_ND.device)
        features_CD = move(take_rows(self.stored_ND, stored_rows), self.device)
        is_copy = features_CD.dtype == torch.float16
        if is_copy:
            features_CD = features_CD.float()
        if self.inv_norm_N is None:
            return features_CD
        inv_norm_C1 = take_rows(self.inv_norm_N, rows)[:, None]
        return features_CD.mul_(inv_norm_C1) if is_copy else features_CD * inv_norm_C1

    def part(self, rows: slice | Tensor) -> Samples:
        """Some of the samples."""
        return Samples(self.features(rows), self.quality_N[rows], None, self.device)


@dataclass(frozen=True, eq=False)
class Shares:
    """The rows in slices that the ranks share, and a cache of values that are derived from the samples.

    The slices do not depend on the number of ranks; every rank reads its share of them. With one rank all methods are
    local.

    Attributes:
        edges: the slices end to end: of N samples from 0 to N.
        device: where values are computed.
        ranks: the ranks that share the slices. With more than one, reading methods are collective.
        helpers: the ranks that hold this same ground set, each for itself. Derived values may be made together, where
            all of them ask at the same time; reading methods stay local.
    """

    edges: list[int]
    device: torch.device
    ranks: RankGroup = field(default_factory=RankGroup)
    helpers: RankGroup = field(default_factory=RankGroup)
    _cache: dict[Hashable, object] = field(default_factory=dict)

    def own_slices(self) -> Iterator[slice]:
        """This rank's slices, in row order."""
        return self.slices_of(self.ranks)

    def slices_of(self, ranks: RankGroup) -> Iterator[slice]:
        """This rank's slices where `ranks` share them, in row order."""
        for index in ranks.share(len(self.edges) - 1):
            yield slice(self.edges[index], self.edges[index + 1])

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
        """`part(rows)` of every slice, for sums of which no bound is known. Collective.

        Args:
            part: float of any shape, the same for every slice.

        Returns:
            float64 (number of slices, ...), the same bits on any number of ranks.
        """
        num_slices = len(self.edges) - 1
        own = [part(rows) for rows in self.own_slices()]
        shape = own[0].shape if own else part(slice(0, 0)).shape
        parts = torch.zeros(num_slices, *shape, dtype=torch.float64, device=self.device)
        for index, values in zip(self.ranks.share(num_slices), own, strict=True):
            parts[index] = values
        return self.ranks.sum_(parts)

    def map_over_slices(self, part: Callable[[slice], Tensor]) -> Tensor:
        """Puts together one value per row, each computed by one rank. Collective.

        Args:
            part: float (C,) for a slice's rows, in the type in which values travel between ranks.

        Returns:
            float64 (N,).
        """
        values_N: Tensor | None = None
        for rows in self.own_slices():
            values_C = part(rows)
            if values_N is None:
                values_N = values_C.new_empty(self.edges[-1])
            values_N[rows] = values_C
        if values_N is None:  # more ranks than slices: learn the type from no rows
            values_N = part(slice(0, 0)).new_empty(self.edges[-1])
        return self.ranks.complete_(values_N, self._rows_of_ranks()).double()

    def _rows_of_ranks(self) -> list[range]:
        shares = self.ranks.shares(len(self.edges) - 1)
        return [range(self.edges[share.start], self.edges[share.stop]) for share in shares]

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """The result of `build` when the key was first asked for. Collective if `build` is."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]  # type: ignore[return-value]  # the key's owner knows its type

    def forget(self) -> None:
        """Empties the cache; values are derived again where they are asked for."""
        self._cache.clear()

    def is_cached(self, key: Hashable) -> bool:
        """True if the key has been built."""
        return key in self._cache


@dataclass(frozen=True, eq=False)
class GroundSet:
    """What an objective is evaluated on: the samples of a block, or of one step's part of it.

    Attributes:
        samples: features and quality.
        budget: which masks are allowed.
        shares: slices that the ranks share, and the cache.
        num_selected: samples of a mask; where sizes are free, the size or expected size of the mask that is looked at.
        whole: the ground set whose mean centres the features, if not this one.

    Example:
        >>> ground = GroundSet.of(torch.eye(3), torch.tensor([0.1, 0.9, 0.5]), 1)
        >>> ground.num_samples, ground.num_selected, ground.features(slice(0, 1)).tolist()
        (3, 1, [[1.0, 0.0, 0.0]])
    """

    samples: Samples
    budget: Budget
    shares: Shares
    num_selected: int
    whole: GroundSet | None = None

    @classmethod
    def of(
        cls,
        features_ND: Tensor,
        quality_N: Tensor,
        budget: int | Budget,
        *,
        inv_norm_N: Tensor | None = None,
        num_slice_rows: int = 16_384,
        ranks: RankGroup | None = None,
        helpers: RankGroup | None = None,
        device: torch.device | None = None,
    ) -> GroundSet:
        """A ground set of tensors.

        Args:
            features_ND: float16 or float32 (N, D), on `device`, or on the host where they do not fit there.
            quality_N: float32 (N,), scaled quality.
            budget: the budget, or a number of samples in [1, N].
            inv_norm_N: float32 (N,), factors that give the features unit L2 norm; None if they have it.
            num_slice_rows: rows of a slice, at most.
            ranks: see `Shares`.
            helpers: see `Shares`.
            device: where everything is computed; by default the device of the features.
        """
        num_samples = len(features_ND)
        samples = Samples(features_ND, quality_N, inv_norm_N, device or features_ND.device)
        if features_ND.shape.numel() * 4 <= FLOAT32_COPY_BYTES and features_ND.dtype != torch.float64:
            samples = replace(samples, stored_ND=samples.features(slice(None)), inv_norm_N=None)
        num_slices = max(math.ceil(num_samples / num_slice_rows), min(MIN_SLICES, num_samples // MIN_SLICE_ROWS), 1)
        edges = [index * num_samples // num_slices for index in range(num_slices + 1)]
        budget = FixedSize(num_samples, budget) if isinstance(budget, int) else budget
        shares = Shares(edges, samples.device, ranks or RankGroup(), helpers or RankGroup())
        return cls(samples, budget, shares, budget.typical_size)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.samples.stored_ND)

    @property
    def num_features(self) -> int:
        """D."""
        return self.samples.stored_ND.shape[1]

    @property
    def quality_N(self) -> Tensor:  # a shape, as everywhere
        """Scaled quality: float32 (N,)."""
        return self.samples.quality_N

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.samples.device

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if features are float32, and products of bfloat16 are much faster."""
        return self.samples.dtype == torch.float32 and multiplies_bfloat16(self.device)

    def features(self, rows: slice | Tensor) -> Tensor:
        """Unit features of some rows, on the device: float32 (C, D). Never computes in half precision."""
        return self.samples.features(rows)

    def sized(self, num_selected: int | float | Tensor) -> GroundSet:
        """The same ground set and cache, for a mask of this size or expected size."""
        # an expected size is not a whole number
        return self if num_selected is self.num_selected else replace(self, num_selected=num_selected)  # type: ignore[arg-type]

    def unshared(self, helpers: RankGroup) -> GroundSet:
        """The same ground set, evaluated by each of these ranks for itself."""
        return replace(self, shares=Shares(self.shares.edges, self.device, helpers=helpers))

    def part(self, rows: Tensor) -> GroundSet:
        """Some of the samples, int64 (C,), by themselves, with the mean and the size of all, for this rank alone."""
        shares = Shares([0, rows.numel()], self.device)
        return replace(self, samples=self.samples.part(rows), shares=shares, whole=self)

    def first_copies(self) -> Tensor | None:
        """For each sample the first one of the same features, where there are many, else None."""
        slices = list(self.shares.slices_of(RankGroup()))
        return self.shares.cached("first_copies", lambda: duplicates.first_of_duplicates(self.features, slices))

    def mean(self) -> Tensor:
        """Mean of the unit features over the whole ground set: float64 (D,). Collective when first called."""
        if self.whole is not None:
            return self.whole.mean()

        def build() -> Tensor:
            total_D = self.shares.sum_over_slices(lambda rows: self.features(rows).sum(0), bound=self.num_samples)
            return total_D / self.num_samples

        return self.shares.cached("mean", build)

    def centered(self, rows: slice | Tensor) -> Tensor:
        """Unit features minus their mean: float32 (C, D), not to be changed."""
        mean_D = self.mean().to(self.samples.dtype)
        if self.num_samples * self.num_features * 4 > CENTERED_COPY_BYTES:
            return self.features(rows) - mean_D
        return take_rows(self.shares.cached("centered", lambda: self.features(slice(None)) - mean_D), rows)
