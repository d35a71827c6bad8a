"""The budget of a fixed number of samples.

Shapes: N samples, C rollouts of a chunk, K samples kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from datamask_pl.functional import multilinear
from datamask_pl.functional.bound import LinearMaximum, largest_sum, nearest_by_group
from datamask_pl.functional.budget import OverSlices, in_one_slice, num_to_keep
from datamask_pl.functional.device import rows_at_once
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.functional.rollouts import control_variate, exponential_race, plackett_luce
from datamask_pl.functional.rollouts.advantages import normalized
from datamask_pl.functional.values import GroupBudget

# Numbers of float64 of which a few arrays fit the second-level cache of a CPU's core.
ELEMENTS_AT_ONCE = 2**17


@dataclass(frozen=True)
class FixedSize:
    """All masks of K of N samples.

    Attributes:
        num_samples: N.
        num_selected: K, in [1, N].
        select_ratio: share of a part that is kept; K / N by default.

    Example:
        >>> FixedSize(4, 1).fill(torch.tensor([0.0, 2.0, 1.0, 2.0]))
        tensor([False,  True, False, False])
    """

    num_samples: int
    num_selected: int
    select_ratio: float | None = None

    @property
    def typical_size(self) -> int:
        """See `Budget.typical_size`."""
        return self.num_selected

    @property
    def is_size_fixed(self) -> bool:
        """See `Budget.is_size_fixed`."""
        return True

    @property
    def can_keep_any(self) -> bool:
        """See `Budget.can_keep_any`."""
        return True

    @property
    def max_drawn(self) -> int:
        """See `Budget.max_drawn`."""
        return self.num_selected

    def expected_size(self, p_N: Tensor) -> int | Tensor:
        """See `Budget.expected_size`."""
        return self.num_selected

    def by_size(self, masks_RN: Tensor) -> list[tuple[slice | Tensor, int]]:
        """See `Budget.by_size`."""
        return [(slice(None), self.num_selected)]

    def probabilities(self, logits_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """See `Budget.probabilities`."""
        return multilinear.inclusion_probabilities(logits_N, self.num_selected, over_slices=over_slices)

    def rollout_probabilities(self, logits_N: Tensor) -> Tensor:
        """See `Budget.rollout_probabilities`."""
        return exponential_race.inclusion_probabilities(logits_N, self.num_selected)

    def ascent_direction(self, gradient_N: Tensor, p_N: Tensor, *, over_slices: OverSlices = in_one_slice) -> Tensor:
        """See `Budget.ascent_direction`."""
        return multilinear.ascent_direction(gradient_N, p_N, over_slices=over_slices)

    def controlled_direction(
        self, logits_N: Tensor, p_N: Tensor, slopes_N: Tensor, *, linear_N: Tensor, rest_N: Tensor
    ) -> Tensor:
        """See `Budget.controlled_direction`."""
        return normalized(control_variate.dual_direction(logits_N, linear_N, rest_N, num_selected=self.num_selected))

    def entropy_share(self, p_N: Tensor) -> Tensor:
        """See `Budget.entropy_share`."""
        return multilinear.entropy_share(p_N, self.num_selected)

    def fill(self, scores_N: Tensor) -> Tensor:
        """See `Budget.fill`."""
        return top_k_mask(scores_N, self.num_selected)

    def draw(self, logits_N: Tensor, *, generators: list[torch.Generator]) -> FixedSizeRollouts:
        """See `Budget.draw`."""
        return FixedSizeRollouts(logits_N, plackett_luce.draw_group(logits_N, self.num_selected, generators=generators))

    def uniform_masks(self, num_masks: int, *, generator: torch.Generator, device: torch.device) -> Tensor:
        """See `Budget.uniform_masks`."""
        masks_RN = torch.zeros(num_masks, self.num_samples, dtype=torch.bool)
        equal_N = torch.zeros(self.num_samples)
        draws = plackett_luce.draw_each(equal_N, self.num_selected, generators=repeat(generator, num_masks))
        for mask_N, (rows, _) in zip(masks_RN, draws, strict=True):
            mask_N[rows] = True
        return masks_RN.to(device)

    def allows(self, mask_N: Tensor) -> bool:
        """See `Budget.allows`."""
        return int(mask_N.sum()) == self.num_selected

    def linear_maximum(
        self, slope_N: Tensor, *, sizes: tuple[int, int] | None = None, near: float = 0.0
    ) -> LinearMaximum:
        """See `Budget.linear_maximum`."""
        return largest_sum(slope_N, self.num_selected)

    def size_range(self) -> tuple[int, int]:
        """See `Budget.size_range`."""
        return self.num_selected, self.num_selected

    def nearest(self, target_N: Tensor) -> Tensor:
        """See `Budget.nearest`."""
        room_G, length_G = target_N.new_tensor([self.num_selected]), torch.tensor([self.num_samples])
        return nearest_by_group(target_N, torch.ones_like(target_N), room_G, length_G.to(target_N.device))

    def part(self, rows: Tensor) -> FixedSize:
        """See `Budget.part`."""
        ratio = self.num_selected / self.num_samples if self.select_ratio is None else self.select_ratio
        return FixedSize(rows.numel(), num_to_keep(ratio, rows.numel()), ratio)

    def spent(self, mask_N: Tensor) -> list[GroupBudget]:
        """See `Budget.spent`."""
        return []


@dataclass(frozen=True)
class FixedSizeRollouts:
    """See `Rollouts`."""

    logits_N: Tensor
    draws: plackett_luce.Draws

    def masks(self) -> Tensor:
        """See `Rollouts.masks`."""
        return plackett_luce.masks_of(self.draws.draws_RK, self.logits_N.numel())

    def scores(self, slopes_N: Tensor | None, *, num_rollouts: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """See `Rollouts.scores`."""
        num_samples, (draws_CK, log_times_C) = self.logits_N.numel(), self.draws
        # so many that their scores are in a CPU's second-level cache together
        at_once = max(1, rows_at_once(ELEMENTS_AT_ONCE, self.logits_N.device) // num_samples)
        for part in torch.split(torch.arange(len(draws_CK)), at_once):
            linear_sum_N = None
            if slopes_N is not None:
                linear_sum_N = control_variate.linear_gradient_sum(
                    self.logits_N,
                    plackett_luce.masks_of(draws_CK[part], num_samples),
                    log_times_C[part],
                    slopes_N,
                    num_rollouts=num_rollouts,
                )
            yield part, plackett_luce.score(self.logits_N, draws_CK[part]), linear_sum_N
