"""What a term of the objective is: how good is a set, and, if it can be said, how good on average is a random one.

A custom objective needs `value` alone, and is trained by the rollout estimators. One that also gives `expectation`,
differentiable, can be trained by `multilinear`.

Shapes: R masks, N samples, C samples of a slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from datamask_pl.objectives.ground_set import GroundSet


@dataclass(frozen=True)
class Expectation:
    """The multilinear extension of an objective at a point.

    Attributes:
        value: float64 scalar, E f(S) where every sample is kept independently with its probability.
        gradient_N: float64 (N,), its derivative in each probability: the expected marginal gain of the sample.
        diagnostics: float64 scalars by name, for the log.
    """

    value: Tensor
    gradient_N: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """A set function that is maximised. Subclass it and implement `value`; `expectation` is optional."""

    @abstractmethod
    def value(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """How good each mask is.

        Args:
            masks_RN: bool (R, N), each with `ground.num_selected` samples kept.
            ground: the samples; `ground.features(rows)` are unit rows, `ground.quality_N` is scaled quality.

        Returns:
            float (R,), finite, higher is better.
        """

    def prepare(self, ground: GroundSet, *, num_masks: int) -> None:  # noqa: B027  # optional
        """Told on every rank before `value` is asked for `num_masks` masks, over all its calls and all ranks.

        Here is the time to build what pays for so many; deciding it by the masks of one call would make values depend
        on how the masks are shared out. Does nothing by default.
        """

    def expectation(self, p_N: Tensor, ground: GroundSet) -> Tensor:
        """E value(S) where sample i is kept independently with probability p_i; equals `value` where p is a mask.

        Args:
            p_N: float64 (N,), inclusion probabilities that add up to `ground.num_selected`.
            ground: the samples.

        Returns:
            float scalar, differentiable in p_N.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expectation")

    @property
    def has_expectation(self) -> bool:
        """True if the class gives `expectation` or `linearize`."""
        kind = type(self)
        return kind.expectation is not Objective.expectation or kind.linearize is not Objective.linearize

    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """Value and gradient of `expectation`. Overridden where there is a closed form."""
        with torch.enable_grad():
            leaf_N = p_N.detach().double().requires_grad_()
            value = self.expectation(leaf_N, ground.sized(leaf_N.sum()) if ground.has_free_size else ground)
            (gradient_N,) = torch.autograd.grad(value, leaf_N)
        return Expectation(value.detach().double(), gradient_N.double())

    @property
    def has_interactions(self) -> bool:
        """True if the class gives `interactions`."""
        return type(self).interactions is not Objective.interactions

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """By how much keeping one sample changes what keeping another adds, where nothing else decides it. Local.

        Optional, beside `expectation`: with it exchanges after the last step take a fraction of the time.

        Args:
            rows: a slice, or int64 (C,); `ground.features` takes either.
            others: int64 (O,).
            ground: the samples, or some of them by themselves.

        Returns:
            float (C, O), the same with rows and others exchanged; what it says of a sample and itself does not count.
        """
        raise NotImplementedError(f"{type(self).__name__} has no interactions that are the same in every mask")

    @property
    def holds_lists(self) -> bool:
        """True if the class keeps more of a block than its features take; on a CPU the next is then not read ahead."""
        return False

    @property
    def has_coverage(self) -> bool:
        """True if the class gives `coverage`."""
        return type(self).coverage is not Objective.coverage

    def coverage(self, mask_N: Tensor, rows_P: Tensor, ground: GroundSet) -> tuple[Tensor, Tensor, Tensor]:
        """What some candidates cover, where the value is the sum over samples of what their nearest kept one is worth.

        Optional, beside `expectation`: with it exchanges after the last step find more in less time. Collective.

        Args:
            mask_N: bool (N,).
            rows_P: int64 (P,), the candidates, kept or not.
            ground: the samples.

        Returns:
            sample_E: int64 (E,), samples that would be worth more by one of the candidates than they are by kept ones
                that are no candidates; those of one sample are next to each other.
            candidate_E: int64 (E,), the index of the candidate.
            worth_E: float64 (E,), how much more, positive, and not increasing for one sample.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coverage")

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """What `linearize` leaves out where the size of a mask is free: the derivative by `ground.num_selected`.

        Args:
            p_N: float64 (N,), inclusion probabilities that add up to `ground.num_selected`.
            found: what `linearize` gave.
            ground: the samples.

        Returns:
            float64 scalar, 0 where the value is not divided by the size or `linearize` differentiates it.
        """
        return 0.0


class _FromLinearization(torch.autograd.Function):
    """Makes a closed-form value and gradient differentiable."""

    @staticmethod
    def forward(ctx: Any, p_N: Tensor, objective: ClosedFormObjective, ground: GroundSet) -> Tensor:  # noqa: ANN401
        result = objective.linearize(p_N.detach().double(), ground)
        slope = objective.size_slope(p_N.detach().double(), result, ground) if ground.has_free_size else 0.0
        ctx.save_for_backward(result.gradient_N + slope)
        return result.value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient_N,) = ctx.saved_tensors
        return grad_outputs[0] * gradient_N, None, None


class ClosedFormObjective(Objective):
    """An objective whose expectation and gradient are known in closed form, shared among the ranks of a ground set."""

    @abstractmethod
    def linearize(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """Value and gradient of the multilinear extension. Collective over `ground.ranks`."""

    def expectation(self, p_N: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.expectation`."""
        value: Tensor = _FromLinearization.apply(p_N, self, ground)  # type: ignore[no-untyped-call]
        return value
