"""Numbers that describe a mask, as plain types: commands that only read masks need no torch for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupBudget:
    """The budget of a group and its use. Costs are numbers of samples where samples have no cost.

    Attributes:
        name: of the group, empty where there are no groups.
        num_samples: of the group.
        num_selected: kept.
        cost: of the group.
        budget: what the mask may cost; None if the group has no limit of its own.
        kept_cost: cost of the kept samples.
    """

    name: str
    num_samples: int
    num_selected: int
    cost: float
    budget: float | None
    kept_cost: float


@dataclass(frozen=True)
class Values:
    """The values of a mask on its block.

    Attributes:
        f: the joint objective, in the units of its calibration.
        terms: every term by name, neither scaled nor weighted; `quality` is the first.
    """

    f: float
    terms: dict[str, float]
