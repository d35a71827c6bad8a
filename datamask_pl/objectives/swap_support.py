"""What an objective may know in addition, so that the swaps after the last step are faster and find more.

Derive an objective from one of these classes as well as from `Objective`; both are optional.

Shapes: N samples, C and O some of them, P candidates, E entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from datamask_pl.objectives.ground_set import GroundSet


class SupportsInteractions(ABC):
    """The objective is quadratic in the mask: what keeping one sample adds to another is a number of the two alone."""

    @property
    def has_interactions(self) -> bool:
        """False if the options of this instance rule interactions out."""
        return True

    @abstractmethod
    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet) -> Tensor:
        """By how much keeping one sample changes the marginal gain of another. Local.

        Args:
            rows: a slice, or int64 (C,); `ground.features` takes either.
            others: int64 (O,).
            ground: the samples, or some of them by themselves.

        Returns:
            float (C, O), symmetric in rows and others; the values of a sample and itself are not used.
        """


class SupportsCoverage(ABC):
    """The objective is a sum over samples of what the nearest kept one is worth, as facility location is."""

    @abstractmethod
    def coverage(self, mask_N: Tensor, rows_P: Tensor, ground: GroundSet) -> tuple[Tensor, Tensor, Tensor]:
        """Samples that candidates cover better than the other kept samples do. Collective.

        Args:
            mask_N: bool (N,).
            rows_P: int64 (P,), the candidates, kept or not.
            ground: the samples.

        Returns:
            sample_E: int64 (E,), samples that would be worth more by one of the candidates than they are by kept
                samples that are not candidates; the entries of one sample are next to each other.
            candidate_E: int64 (E,), the index of the candidate.
            worth_E: float64 (E,), how much more, positive, and not increasing for one sample.
        """
