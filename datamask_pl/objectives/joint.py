"""The joint objective: quality and one or several diversity terms, scaled and weighted.

Shapes: R masks, N samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from datamask_pl.errors import ConfigError, ObjectiveError
from datamask_pl.functional.swaps.coverage import CandidateCoverage
from datamask_pl.objectives.base import ClosedFormObjective, Expectation, Objective
from datamask_pl.objectives.disf import DiSF
from datamask_pl.objectives.facility_location import FacilityLocation
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.pairwise import PairwiseSimilarity
from datamask_pl.objectives.quality import Quality
from datamask_pl.objectives.swap_support import SupportsCoverage, SupportsInteractions

DiversityName = Literal["facility_location", "pairwise", "disf"]


@dataclass(frozen=True)
class WeightedObjective:
    """A summand of a weighted list of diversity terms.

    Attributes:
        objective: `facility_location`, `pairwise`, `disf`, or an objective of your own.
        weight: its share of the diversity; the weights are divided by their sum.
    """

    objective: DiversityName | Objective
    weight: float = 1.0


_OBJECTIVES: dict[str, type[Objective]] = {
    "facility_location": FacilityLocation,
    "pairwise": PairwiseSimilarity,
    "disf": DiSF,
}


def resolve_objective(choice: str | Objective) -> tuple[str, Objective]:
    """Name and instance of an objective given by name or as an instance.

    Raises:
        ConfigError: If there is no objective of that name.
    """
    if isinstance(choice, Objective):
        names = {kind: name for name, kind in _OBJECTIVES.items()}
        _refuse_old_names(choice)
        return names.get(type(choice), type(choice).__name__), choice
    if choice not in _OBJECTIVES:
        raise ConfigError(f"model.diversity must be one of {', '.join(_OBJECTIVES)} or a class path, got {choice!r}.")
    return choice, _OBJECTIVES[choice]()


def _refuse_old_names(objective: Objective) -> None:
    """Raises a ConfigError if the class was written for an interface that is no longer called."""
    kind = type(objective)
    defined = {name for each in kind.__mro__ for name in vars(each)}
    wanted = {
        "linearize": None,
        "interactions": SupportsInteractions,
        "coverage": SupportsCoverage,
    }
    for name, base in wanted.items():
        if name in defined and (base is None or not isinstance(objective, base)):
            remedy = "rename it to value_and_gradient" if base is None else f"derive it from {base.__name__}, too"
            raise ConfigError(f"model.diversity: {kind.__name__} has a method {name}, which is not called; {remedy}.")


@dataclass(frozen=True)
class Term:
    """A summand of the joint objective: weight * objective / scale."""

    name: str
    weight: float
    objective: Objective


class JointObjective:
    """f = quality_weight * Q / sd(Q) + (1 - quality_weight) * D / sd(D), D one diversity term or a weighted sum.

    Args:
        quality_weight: lambda in [0, 1]: 1 is pure quality, 0 pure diversity.
        diversity: a name, an objective, or a weighted list of them.

    Raises:
        ConfigError: If a weight is out of range, the list is empty, or a name is unknown.
    """

    def __init__(self, *, quality_weight: float, diversity: str | Objective | list[WeightedObjective]) -> None:
        if not 0.0 <= quality_weight <= 1.0:
            raise ConfigError(f"model.quality_weight must be from 0 to 1, got {quality_weight}.")
        entries = diversity if isinstance(diversity, list) else [WeightedObjective(diversity)]  # type: ignore[arg-type]
        total = sum(entry.weight for entry in entries)
        if not entries or any(entry.weight < 0 for entry in entries) or not 0 < total < math.inf:
            weights = [entry.weight for entry in entries]
            raise ConfigError(
                f"model.diversity needs finite weights that are not negative, one of them positive; got {weights}."
            )
        self.terms = [Term("quality", quality_weight, Quality())]
        for entry in entries:
            name, objective = resolve_objective(entry.objective)
            if any(term.name == name for term in self.terms):
                name = f"{name}_{len(self.terms)}"
            self.terms.append(Term(name, (1.0 - quality_weight) * entry.weight / total, objective))
        # now, for an objective may keep what it has seen beside its options
        self._description = " + ".join(map(_describe_term, self.terms))

    @property
    def has_expectation(self) -> bool:
        """True if every term that counts has an expectation."""
        return not self.without_expectation()

    @property
    def has_interactions(self) -> bool:
        """True if every term that counts has interactions."""
        objectives = [term.objective for term in self.terms if term.weight > 0]
        return all(isinstance(each, SupportsInteractions) and each.has_interactions for each in objectives)

    @property
    def holds_lists(self) -> bool:
        """True if a term that counts keeps more of a block than its features take."""
        objectives = [term.objective for term in self.terms if term.weight > 0]
        return any(isinstance(each, ClosedFormObjective) and each.holds_lists for each in objectives)

    @property
    def has_coverage(self) -> bool:
        """True if one term that counts gives what candidates cover, and no other but quality counts."""
        others = [term for term in self.terms if term.weight > 0 and not isinstance(term.objective, Quality)]
        return len(others) == 1 and isinstance(others[0].objective, SupportsCoverage)

    def without_expectation(self) -> list[str]:
        """Names of the terms that can only be trained by the rollout estimators."""
        return [term.name for term in self.terms if term.weight > 0 and not term.objective.has_expectation]

    def describe(self) -> str:
        """Weights, names and options of the terms, for comparing two runs."""
        return self._description

    def prepare(self, ground: GroundSet, *, num_masks: int) -> None:
        """See `Objective.prepare`."""
        for term in self.terms:
            term.objective.prepare(ground, num_masks=num_masks)

    def term_values(self, masks_RN: Tensor, ground: GroundSet) -> Tensor:
        """Every term of every mask, neither scaled nor weighted.

        Returns:
            float64 (number of terms, R).

        Raises:
            ObjectiveError: If a term returns another shape than one number a mask.
        """
        rows = []
        for term in self.terms:
            value_R = _value(term.objective, masks_RN, ground)
            if not isinstance(value_R, Tensor) or value_R.shape != masks_RN.shape[:1]:
                seen = f"shape {tuple(value_R.shape)}" if isinstance(value_R, Tensor) else type(value_R).__name__
                raise ObjectiveError(
                    f"objective {term.name} returned {seen} for {masks_RN.shape[0]} masks; "
                    f"`value` must return one number a mask, a tensor of shape ({masks_RN.shape[0]},)."
                )
            rows.append(value_R)
        return torch.stack(rows)

    def combine(self, values: Tensor, scales: Tensor) -> Tensor:
        """Weighted sum of terms, (number of terms, R) -> (R,). A term of weight or scale 0 counts nothing."""
        factors_1 = self._factors(scales)[:, None]
        # not a product with 0: a term that does not count may be NaN
        return torch.where(factors_1 == 0, 0.0, factors_1 * values).sum(0)

    def check_finite(self, values: Tensor, *, when: str) -> None:
        """Checks the values of the terms that count.

        Args:
            values: float64 (number of terms, R), from `term_values`, the same on every rank.
            when: for the error's text.

        Raises:
            ObjectiveError: If one is not finite.
        """
        for term, values_R in zip(self.terms, values, strict=True):
            if term.weight > 0 and not bool(values_R.isfinite().all()):
                index = int((~values_R.isfinite()).nonzero()[0])
                raise _not_finite(
                    f"objective {term.name} returned {values_R[index].item()} for mask {index} {when}; "
                    "`value` must return finite numbers."
                )

    def value_and_gradient(
        self, p_N: Tensor, ground: GroundSet, scales: Tensor, *, when: str = "of a mask"
    ) -> tuple[Expectation, Tensor]:
        """Value and gradient of the joint expectation, and every term's expectation, unscaled (number of terms,).

        Terms that do not count are not computed; their expectation is given as NaN.

        Raises:
            ObjectiveError: If a term's expectation or its gradient is not finite; its text ends with `when`.
        """
        value = torch.zeros((), dtype=torch.float64, device=p_N.device)
        gradient_N: Tensor | None = None
        term_values = torch.full((len(self.terms),), torch.nan, dtype=torch.float64, device=p_N.device)
        diagnostics: dict[str, Tensor] = {}
        for index, (term, factor) in enumerate(zip(self.terms, self._factors(scales).tolist(), strict=True)):
            if factor == 0.0:
                continue
            part = _value_and_gradient(term.objective, p_N, ground)
            if not bool(torch.stack([part.value, *part.gradient_N.aminmax()]).isfinite().all()):
                raise _not_finite(
                    f"objective {term.name} has an expectation of {part.value.item()} with "
                    f"{int((~part.gradient_N.isfinite()).sum())} derivatives that are not finite {when}; "
                    "`expectation` must be finite and differentiable where probabilities are 0 or 1, too."
                )
            value = value + factor * part.value
            # the first product is a tensor of its own: a term may keep the gradient that it gives
            if gradient_N is None:
                gradient_N = part.gradient_N * factor
            else:
                gradient_N.add_(part.gradient_N, alpha=factor)
            term_values[index] = part.value
            diagnostics |= {f"{term.name}/{name}": number for name, number in part.diagnostics.items()}
        return Expectation(value, torch.zeros_like(p_N) if gradient_N is None else gradient_N, diagnostics), term_values

    def counting(self, scales: Tensor) -> list[tuple[Term, float]]:
        """The terms that count, each with what its value is multiplied by."""
        return [pair for pair in zip(self.terms, self._factors(scales).tolist(), strict=True) if pair[1] != 0.0]

    def interactions(self, rows: slice | Tensor, others: Tensor, ground: GroundSet, scales: Tensor) -> Tensor:
        """See `SupportsInteractions.interactions`; 0 for a sample and itself."""
        row_C = torch.arange(ground.num_samples, device=others.device)[rows]
        total_CO = torch.zeros((), device=others.device).expand(row_C.numel(), others.numel())
        for term, factor in self.counting(scales):
            assert isinstance(term.objective, SupportsInteractions)
            total_CO = torch.add(total_CO, term.objective.interactions(rows, others, ground), alpha=factor)
        return total_CO.masked_fill(row_C[:, None] == others, 0.0)

    def coverage(self, mask_N: Tensor, rows_P: Tensor, ground: GroundSet, scales: Tensor) -> CandidateCoverage:
        """What some candidates cover, in units of the joint objective. Collective over `ground.shares.ranks`.

        Args:
            mask_N: bool (N,).
            rows_P: int64 (P,), the candidates.
            ground: the samples.
            scales: float64 (number of terms,), by which the terms are divided.
        """
        entries = [torch.zeros(0, dtype=torch.int64)] * 2 + [torch.zeros(0, dtype=torch.float64)]
        alone_P = torch.zeros(rows_P.numel(), dtype=torch.float64, device=rows_P.device)
        for term, factor in self.counting(scales):
            if isinstance(term.objective, SupportsCoverage):
                *entries, worth_E = term.objective.coverage(mask_N, rows_P, ground)
                entries.append(worth_E * factor)
            else:
                alone_P += _value_and_gradient(term.objective, mask_N.double(), ground).gradient_N[rows_P] * factor
        return CandidateCoverage(*(values.cpu().numpy() for values in (*entries, alone_P)))

    def _factors(self, scales: Tensor) -> Tensor:
        weights = torch.tensor([term.weight for term in self.terms], dtype=torch.float64, device=scales.device)
        return torch.where(scales > 0, weights / torch.where(scales > 0, scales, 1.0), 0.0)


def _value(objective: Objective, masks_RN: Tensor, ground: GroundSet) -> Tensor:
    """The values, each mask judged by its own size."""
    value_R = torch.zeros(masks_RN.shape[0], dtype=torch.float64, device=masks_RN.device)
    for index, size in ground.budget.by_size(masks_RN):
        part = objective.value(masks_RN[index], ground.sized(size))
        if not isinstance(part, Tensor) or part.shape != value_R[index].shape:
            return part  # of a shape that the caller refuses
        value_R[index] = part.detach().to(value_R.device).double()
    return value_R


def _value_and_gradient(objective: Objective, p_N: Tensor, ground: GroundSet) -> Expectation:
    """The expectation; where sizes are free, to first order: divided by the expected size, exact where p is a mask."""
    if ground.budget.is_size_fixed:
        return objective.value_and_gradient(p_N, ground)
    sized = ground.sized(float(ground.budget.expected_size(p_N)))
    found = objective.value_and_gradient(p_N, sized)
    slope = objective.size_slope(p_N, found, sized) if isinstance(objective, ClosedFormObjective) else 0.0
    return replace(found, gradient_N=found.gradient_N + slope)


def _not_finite(message: str) -> ObjectiveError:
    error = ObjectiveError(message)
    error.is_on_all_ranks = True
    return error


def _describe_term(term: Term) -> str:
    options = ", ".join(f"{name}={_describe(value)}" for name, value in sorted(vars(term.objective).items()))
    return f"{term.weight:.12g} * {term.name}({options})"


def _describe(option: object) -> str:
    """An option as text that is the same in every process: of anything but plain values, its type."""
    if isinstance(option, (list, tuple)):
        return f"[{', '.join(map(_describe, option))}]"
    return repr(option) if option is None or isinstance(option, (bool, int, float, str)) else type(option).__name__
