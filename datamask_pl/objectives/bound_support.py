"""What an objective offers so that the best mask can be bounded: see `functional/bound.py`.

Shapes: N samples, V samples whose lists a rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from datamask_pl.functional.bound import Plane, ServiceDual
from datamask_pl.objectives.ground_set import GroundSet


class SupportsTangents(ABC):
    """The objective lies below a concave function of the mask, and equals it on masks.

    Attributes:
        is_linear: True if the concave function is linear: every point has the same tangent.
    """

    is_linear: ClassVar[bool] = False

    @property
    def has_tangents(self) -> bool:
        """False if the options of this instance rule tangents out."""
        return True

    @abstractmethod
    def tangent(self, p_N: Tensor, ground: GroundSet, *, sizes: tuple[int, int]) -> Plane:
        """A plane that is at least the objective on all masks of these sizes. Collective.

        Args:
            p_N: float64 (N,), in [0, 1]: where the plane touches the concave function, if there is one size.
            ground: the samples.
            sizes: the smallest and the largest number of kept samples.
        """


class SupportsService(ABC):
    """The objective is the mean over samples of the similarity to the nearest kept one."""

    @abstractmethod
    def service(self, p_N: Tensor, ground: GroundSet) -> ServiceDual:
        """Planes above the sum over samples, with multipliers that begin near the best ones for p. Collective."""

    @abstractmethod
    def missed_service(self, v_V: Tensor, ground: GroundSet, *, seed: int) -> float | None:
        """What pairs that are in no list can add to the planes: a 99 % upper confidence bound. Collective.

        Args:
            v_V: float64 (V,), the multipliers.
            ground: the samples.
            seed: of the rows that are looked at.

        Returns:
            A share of the sum over all samples that is added to the bound; None where the lists are exact.
        """
