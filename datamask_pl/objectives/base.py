"""A term of the objective: the value of a set and, where it is known, the expected value of a random one.

A custom objective needs `value` alone, and is trained by the rollout estimators. With a differentiable `expectation` it
can also be trained by `multilinear`.

Shapes: R masks, N samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """A set function that is maximised. Subclass it and implement `value`; the other methods are optional."""

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
        """Called on every rank before `value` is called for `num_masks` masks, over all calls and all ranks.

        Build here what pays for so many masks; if the masks of one call decided, values would depend on how the masks
        are shared out. Does nothing by default.
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
        """True if the class implements `expectation`."""
        return type(self).expectation is not Objective.expectation

    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """Value and gradient of `expectation`, by automatic differentiation; `ClosedFormObjective` has a formula."""
        with torch.enable_grad():
            leaf_N = p_N.detach().double().requires_grad_()
            value = self.expectation(leaf_N, ground.sized(ground.budget.expected_size(leaf_N)))
            (gradient_N,) = torch.autograd.grad(value, leaf_N)
        return Expectation(value.detach().double(), gradient_N.double())


class _FromClosedForm(torch.autograd.Function):
    """Makes a closed-form value and gradient differentiable."""

    @staticmethod
    def forward(ctx: Any, p_N: Tensor, objective: ClosedFormObjective, ground: GroundSet) -> Tensor:  # noqa: ANN401
        result = objective.value_and_gradient(p_N.detach().double(), ground)
        is_fixed = ground.budget.is_size_fixed
        slope = 0.0 if is_fixed else objective.size_slope(p_N.detach().double(), result, ground)
        ctx.save_for_backward(result.gradient_N + slope)
        return result.value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient_N,) = ctx.saved_tensors
        return grad_outputs[0] * gradient_N, None, None


class ClosedFormObjective(Objective):
    """An objective whose expectation and gradient are known in closed form, shared among the ranks of a ground set.

    Attributes:
        holds_lists: True if more of a block than its features is kept; the next block is then not read ahead on a CPU.
    """

    holds_lists: ClassVar[bool] = False

    @abstractmethod
    def value_and_gradient(self, p_N: Tensor, ground: GroundSet) -> Expectation:
        """Value and gradient of the multilinear extension. Collective over the ranks of the ground set."""

    def expectation(self, p_N: Tensor, ground: GroundSet) -> Tensor:
        """See `Objective.expectation`."""
        value: Tensor = _FromClosedForm.apply(p_N, self, ground)  # type: ignore[no-untyped-call]
        return value

    def size_slope(self, p_N: Tensor, found: Expectation, ground: GroundSet) -> Tensor | float:
        """Derivative in `ground.num_selected`, which `value_and_gradient` takes as a constant.

        Asked for where the size of a mask is free.

        Args:
            p_N: float64 (N,), inclusion probabilities that add up to `ground.num_selected`.
            found: from `value_and_gradient`.
            ground: the samples.

        Returns:
            float64 scalar, 0 where the value is not divided by the size.
        """
        return 0.0
