"""How far a mask can be from the best one: an upper bound on the objective of every allowed mask.

Shapes: N samples.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datamask_pl.functional.bound import PATIENCE, DualSteps, LinearMaximum, Plane
from datamask_pl.objectives.bound_support import SupportsService, SupportsTangents
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

BoundKind = Literal["proved", "estimated"]

# Steps on the multipliers of facility location: as many as a block of this size can have in the time of its lists.
MAX_DUAL_STEPS, MIN_DUAL_STEPS, SAMPLES_OF_MAX_STEPS = 200, 40, 100_000
MAX_CURVED_STEPS = 20
# The multipliers begin at the mask, with this much of equal ones.
SHARE_OF_UNIFORM = 0.3
# Concave terms next to facility location are replaced by their tangents anew after so many steps.
STEPS_PER_TANGENT = 10
# The point of the tangents is a running mean of the planes' maxima.
MEMORY = 0.9
# Steps end where the gap is below this share of the value, or this share of the gap is all that they can still close.
CLOSED, NEARLY = 1e-9, 0.02
# Intervals of numbers of kept samples: at most so many, and none is split that is this short, relative to its start.
MAX_INTERVALS, SHORT_INTERVAL, MAX_SEARCHES = 96, 1e-4, 4
# Relative rounding of tangents that are multiplied in float32.
FLOAT32_ROUNDING = 1e-6


@dataclass(frozen=True)
class Certificate:
    """A bound on the best mask.

    Attributes:
        bound: no mask that uses the budget up has a larger f.
        kind: `proved`; or `estimated`, where lists are approximate: true with a confidence of 99 %.
        prices: by group, the gain in f of a sample at the margin, per cost where samples have one; "" without groups.
    """

    bound: float
    kind: BoundKind
    prices: dict[str, float]


def can_certify(objective: JointObjective) -> bool:
    """True if every term that counts has planes above it."""
    terms = [term.objective for term in objective.terms if term.weight > 0]
    num_services = sum(isinstance(each, SupportsService) for each in terms)
    num_tangents = sum(isinstance(each, SupportsTangents) and each.has_tangents for each in terms)
    return num_services <= 1 and num_services + num_tangents == len(terms)


@torch.no_grad()
def certify(
    mask_N: Tensor,
    *,
    value: float,
    objective: JointObjective,
    ground: GroundSet,
    scales: Tensor,
    seed: int = 0,
    max_steps: int | None = None,
) -> Certificate | None:
    """Bounds the objective of every mask that uses the budget up. Collective over the ranks of the ground set.

    Args:
        mask_N: bool (N,), the best known mask, near which the search for good planes begins.
        value: of this mask.
        objective: the terms.
        ground: the whole block.
        scales: float64 (number of terms,), by which the terms are divided.
        seed: of rows that are looked at where lists are approximate.
        max_steps: of the search; by default fewer for larger blocks.

    Returns:
        The certificate; None if a term that counts has no bound.

    Source: the Lagrangian of facility location after Cornuejols, Fisher, Nemhauser 1977; its steps are Polyak's.
    """
    if not can_certify(objective):
        return None
    search = _Search(mask_N.double(), value, objective, ground, scales)
    search.run(max_steps)
    search.keep_planes()
    smallest, largest = ground.budget.size_range()
    bound, best = search.bound, search.best
    if smallest < largest:
        bound, best = _over_sizes(search, smallest, largest, max_steps)
    missed = search.missed(seed)
    names = getattr(getattr(ground.budget, "holdings", None), "names", ("",))
    prices = dict(zip(names, best.price_G.tolist(), strict=True))
    return Certificate(bound, "proved", prices) if missed is None else Certificate(bound + missed, "estimated", prices)


def _over_sizes(search: _Search, smallest: int, largest: int, max_steps: int | None) -> tuple[float, LinearMaximum]:
    """The bound over all numbers of kept samples, by branch and bound on intervals of them.

    Terms are divided by the number of kept samples. In an interval, the smallest or the largest number takes its place,
    whichever gives the larger value; the shorter the interval, the less this adds. Where the bound is highest, better
    planes are searched for.
    """

    def entry(sizes: tuple[int, int]) -> tuple[float, tuple[int, int], LinearMaximum]:
        bound, top = search.at_sizes(sizes)
        return -bound, sizes, top

    waiting = [entry((smallest, largest))]
    num_searches = 1
    for _ in range(MAX_INTERVALS):
        negative_bound, (low, high), top = waiting[0]
        if high - low <= SHORT_INTERVAL * low:
            if num_searches == MAX_SEARCHES:
                break
            search.move_to(low)
            search.run(max_steps)
            search.keep_planes()
            num_searches += 1
            waiting = [entry(sizes) for _, sizes, _ in waiting]
            heapq.heapify(waiting)
            if -waiting[0][0] > -negative_bound - NEARLY * (-negative_bound - search.value):
                break
            continue
        # at ratios, not at differences: what a number of samples divides by is what counts
        middle = min(max(math.isqrt(low * high), low), high - 1)
        heapq.heapreplace(waiting, entry((low, middle)))
        heapq.heappush(waiting, entry((middle + 1, high)))
    negative_bound, _, top = waiting[0]
    return -negative_bound, top


class _Search:
    """Planes with ever lower maxima; the lowest one is the bound."""

    best: LinearMaximum

    def __init__(
        self, mask_N: Tensor, value: float, objective: JointObjective, ground: GroundSet, scales: Tensor
    ) -> None:
        self._ground, self.value = ground, value
        self._kept: list[tuple[Tensor, int, Plane | None, float]] = []
        size = ground.budget.typical_size if ground.budget.is_size_fixed else max(1, round(float(mask_N.sum())))
        self._sizes = size, size
        self._tangents: list[tuple[SupportsTangents, float]] = []
        self._service: tuple[SupportsService, float] | None = None
        for term, factor in objective.counting(scales):
            if isinstance(term.objective, SupportsService):
                self._service = term.objective, factor / ground.num_samples
            else:
                assert isinstance(term.objective, SupportsTangents)
                self._tangents.append((term.objective, factor))
        self._is_curved = any(not term.is_linear for term, _ in self._tangents)
        self._point_N = ground.budget.nearest(mask_N)
        self.bound, self._relaxed = math.inf, -math.inf
        self._dual = None if self._service is None else self._begin_dual(*self._service)

    def _begin_dual(self, objective: SupportsService, factor: float) -> DualSteps:
        # undecided: the multipliers begin where also a random mask serves
        uniform_N = self._ground.budget.nearest(torch.full_like(self._point_N, self._sizes[0] / len(self._point_N)))
        start_N = (1 - SHARE_OF_UNIFORM) * self._point_N + SHARE_OF_UNIFORM * uniform_N
        return DualSteps(objective.service(start_N, self._ground), factor, self.value)

    def run(self, max_steps: int | None) -> None:
        """Takes steps until the bound cannot be lowered any more, or not by much."""
        steps = self._curved_steps() if self._dual is None else self._dual_steps(self._dual)
        num_steps = max_steps or self._default_steps()
        if self._dual is not None:
            self._dual.patience = max(PATIENCE, PATIENCE * num_steps // MAX_DUAL_STEPS)
        for _ in itertools.islice(steps, num_steps):
            gap = self.bound - self.value
            is_over = self._dual is not None and self._dual.is_over
            if is_over or gap <= CLOSED * max(abs(self.value), 1.0) or self.bound - self._relaxed <= NEARLY * gap:
                break

    def _default_steps(self) -> int:
        if self._dual is None:
            return MAX_CURVED_STEPS
        num_paid = MAX_DUAL_STEPS * SAMPLES_OF_MAX_STEPS // self._ground.num_samples
        return min(MAX_DUAL_STEPS, max(MIN_DUAL_STEPS, num_paid))

    def missed(self, seed: int) -> float | None:
        """What approximate lists may have missed, in units of the objective; None where they are exact."""
        if self._service is None:
            return None
        assert self._dual is not None
        objective, factor = self._service
        share = objective.missed_service(self._dual.best_v_V, self._ground, seed=seed)
        return None if share is None else share * self._ground.num_samples * factor

    def keep_planes(self) -> None:
        """Remembers the best planes of this number of kept samples, for other numbers."""
        service = None if self._dual is None else self._dual.plane(self._dual.best_v_V)
        self._kept.append((self._point_N, self._sizes[0], service, self.best.size_price))

    def move_to(self, size: int) -> None:
        """Searches from here on at another number of kept samples, from the current planes."""
        self._point_N = self._point_N * (size / self._sizes[0])
        self._sizes = size, size
        self.bound, self._relaxed = math.inf, -math.inf
        if self._dual is not None:
            self._dual.restart()

    def at_sizes(self, sizes: tuple[int, int]) -> tuple[float, LinearMaximum]:
        """The lowest bound for other numbers of kept samples, by the planes that were kept."""
        found = []
        for point_N, size, service, price in self._kept:
            plane = self._tangent(point_N * (math.sqrt(sizes[0] * sizes[1]) / size), sizes)
            plane = plane if service is None else plane + service
            top = self._ground.budget.linear_maximum(plane.slope_N, sizes=sizes, near=price)
            found.append((float(plane.constant + top.value), top))
        return min(found, key=lambda pair: pair[0])

    def _tangent(self, p_N: Tensor, sizes: tuple[int, int]) -> Plane:
        total = Plane(p_N.new_zeros(()), torch.zeros_like(p_N))
        for term, factor in self._tangents:
            plane = term.tangent(p_N, self._ground, sizes=sizes).times(factor)
            if not term.is_linear:
                rounding = FLOAT32_ROUNDING * (plane.constant.abs() + (plane.slope_N * p_N).sum().abs())
                plane = Plane(plane.constant + rounding, plane.slope_N)
            total = total + plane
        return total

    def _record(self, plane: Plane) -> tuple[float, LinearMaximum]:
        near = 0.0 if self.bound == math.inf else self.best.size_price
        top = self._ground.budget.linear_maximum(plane.slope_N, sizes=self._sizes, near=near)
        bound = float(plane.constant + top.value)
        if bound < self.bound:
            self.bound, self.best = bound, top
        return bound, top

    def _curved_steps(self) -> Iterator[None]:
        """Projected gradient ascent on the concave function, with the spectral steps of Barzilai and Borwein."""
        before: tuple[Tensor, Tensor] | None = None
        while True:
            point_N = self._point_N
            plane = self._tangent(point_N, self._sizes)
            _, top = self._record(plane)
            self._relaxed = max(self._relaxed, float(plane.constant + (plane.slope_N * point_N).sum()))
            yield
            if not self._is_curved:
                return
            if before is None:
                rate = 0.1 / float(plane.slope_N.std().clamp(min=torch.finfo(torch.float64).tiny))
            else:
                moved_N, bent_N = point_N - before[0], plane.slope_N - before[1]
                curvature = -float((moved_N * bent_N).sum())
                if curvature <= 0.0:  # it has not moved, or rounding is all that is left
                    return
                rate = float(moved_N.square().sum()) / curvature
            before = point_N, plane.slope_N
            self._point_N = self._ground.budget.nearest(point_N + rate * (plane.slope_N - top.size_price))

    def _dual_steps(self, dual: DualSteps) -> Iterator[None]:
        """Steps on the multipliers; concave terms are replaced by tangents, whose point follows the planes' maxima."""
        tangent = self._tangent(self._point_N, self._sizes)
        for step in itertools.count(1):
            bound, top = self._record(tangent + dual.plane())
            yield
            dual.advance(bound, top.point_N)
            if self._is_curved:
                self._point_N = MEMORY * self._point_N + (1 - MEMORY) * top.point_N
                if step % STEPS_PER_TANGENT == 0:
                    tangent = self._tangent(self._point_N, self._sizes)
