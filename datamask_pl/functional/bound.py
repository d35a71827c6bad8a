"""Upper bounds on the value of every allowed mask, from planes above the objective.

A plane is an affine function of the mask, constant + sum_i slope_i m_i, that is nowhere below the objective on masks of
the budget. Its maximum over the budget is easy, and bounds the best mask. A term that is concave in the mask lies below
each of its tangents; facility location lies below the Lagrangian of "a sample is served by one kept sample":

    sum_j max_{i in S} s_ji  <=  sum_j v_j + sum_i m_i sum_j (s_ji - v_j)+

for any multipliers v_j. Where v_j is at least the last similarity of the list of sample j, pairs that are in no list
add nothing, so truncated lists give a true bound.

Shapes: N samples, V samples whose lists a rank holds, T neighbours, E pairs (sample, neighbour) that can count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.functional.exact_sum import round_to_grid
from datamask_pl.functional.kernels import first_largest

# Adds up a tensor over the ranks that share the lists, in place.
SumOverRanks = Callable[[Tensor], Tensor]

# Pairs of lists that are looked at together: float64 values of them take 16 MiB.
PAIRS_AT_ONCE = 2**21
# Pairs count where their similarity is above the one at which the expected number of kept neighbours reaches this:
# 1 at the best multipliers, more for those on the way there.
MAX_SERVED = 2.5
# The direction is bent away from the one before where they are more than a right angle apart (Camerini et al. 1975).
DEFLECTION = 1.5
# The search for the price of a sample begins at this share of the largest slope, and is as fine as its halvings.
SMALLEST_PRICE, MAX_DOUBLINGS, NUM_HALVINGS = 2.0**-10, 40, 10
# The step is halved after so many steps that lower the bound by less than this share of the gap.
PATIENCE, LEAST_PROGRESS = 5, 1e-3
SMALLEST_STEP = 2.0**-14


@dataclass(frozen=True)
class Plane:
    """constant + sum_i slope_i m_i.

    Attributes:
        constant: float64 scalar.
        slope_N: float64 (N,).
    """

    constant: Tensor
    slope_N: Tensor

    def __add__(self, other: Plane) -> Plane:
        """The sum of both."""
        return Plane(self.constant + other.constant, self.slope_N + other.slope_N)

    def times(self, factor: float) -> Plane:
        """The plane of the term times a positive factor."""
        return Plane(self.constant * factor, self.slope_N * factor)


@dataclass(frozen=True)
class LinearMaximum:
    """The largest value of sum_i slope_i m_i over the budget, or over a relaxation of it.

    Attributes:
        value: float64 scalar.
        point_N: float64 (N,), where it is reached; 0 and 1 except for samples that fit in part.
        price_G: float64 (G,), the slope (per cost) from which samples of each group are kept.
        size_price: of one kept sample more or less, where the number of samples is limited next to their cost.
    """

    value: Tensor
    point_N: Tensor
    price_G: Tensor
    size_price: float = 0.0


def with_sizes(
    maximum: Callable[[Tensor], LinearMaximum], slope_N: Tensor, *, sizes: tuple[int, int], near: float = 0.0
) -> LinearMaximum:
    """An upper bound on a linear maximum among masks of these sizes: the number of samples gets a price.

    Args:
        maximum: over masks of any size.
        slope_N: float64 (N,).
        sizes: the smallest and the largest number of kept samples.
        near: the price where the search begins.
    """
    best: LinearMaximum | None = None

    def excess(price: float) -> float:
        """Kept samples above the largest size, or below the smallest (negative)."""
        nonlocal best
        top = maximum(slope_N - price)
        size = float(top.point_N.sum())
        limit = sizes[1] if price > 0 or (price == 0 and size > sizes[1]) else sizes[0]
        value = top.value + price * limit
        if best is None or bool(value < best.value):
            best = LinearMaximum(value, top.point_N, top.price_G, price)
        return 0.0 if price == 0.0 and sizes[0] <= size <= sizes[1] else size - limit

    free = excess(0.0)
    if free == 0.0:
        assert best is not None
        return best
    sign = 1.0 if free > 0 else -1.0
    # 1. a bracket: `inner` is too small a price, `outer` is too large
    inner, outer = (
        0.0,
        sign * max(abs(near), SMALLEST_PRICE * float(slope_N.abs().max()), torch.finfo(torch.float64).tiny),
    )
    for _ in range(MAX_DOUBLINGS):
        if excess(outer) * sign <= 0:
            break
        inner, outer = outer, 2 * outer
    # 2. halve it
    for _ in range(NUM_HALVINGS):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if excess(middle) * sign > 0 else (inner, middle)
    assert best is not None
    return best


def largest_by_group(
    slope_F: Tensor, cost_F: Tensor, room_G: Tensor, length_G: Tensor, *, least_G: Tensor
) -> tuple[Tensor, Tensor]:
    """The maximum over 0 <= m <= 1 where each group costs from `least` to its room: fractional knapsacks.

    Samples are taken by slope per cost: those above 0 while there is room, the others until the least is spent.

    Args:
        slope_F: float64 (F,), samples sorted by group.
        cost_F: float64 (F,), positive.
        room_G: float64 (G,).
        length_G: int64 (G,), samples of each group.
        least_G: float64 (G,), at most the room.

    Returns:
        The maximum, float64 (F,), and the price of each group, float64 (G,): 0 where everything fits.
    """
    worth_F = slope_F / cost_F
    group_F = torch.repeat_interleave(length_G)
    order = worth_F.argsort(descending=True, stable=True)
    order = order[group_F[order].argsort(stable=True)]
    cost, group = cost_F[order], group_F[order]
    before = cost.cumsum(0) - cost
    first_G = (length_G.cumsum(0) - length_G).clamp(max=max(len(order) - 1, 0))
    before = before - before[first_G][group] if len(order) else before
    limit = torch.where(worth_F[order] > 0, room_G[group], least_G[group])
    share = ((limit - before) / cost).clamp_(0.0, 1.0)
    point_F = torch.zeros_like(slope_F)
    point_F[order] = share
    price_G = torch.zeros_like(room_G)
    is_last = (share > 0) & (before + cost >= limit)
    price_G[group[is_last].flip(0)] = worth_F[order][is_last].flip(0)
    return point_F, price_G


def nearest_by_group(
    target_F: Tensor, cost_F: Tensor, room_G: Tensor, length_G: Tensor, *, num_halvings: int = 60
) -> Tensor:
    """The nearest point at which each group costs its room: clamp(target - price * cost, 0, 1), by bisection.

    Returns:
        float64 (F,).
    """
    group_F = torch.repeat_interleave(length_G)

    def point(price_G: Tensor) -> Tensor:
        return (target_F - price_G[group_F] * cost_F).clamp_(0.0, 1.0)

    def spent(price_G: Tensor) -> Tensor:
        return torch.zeros_like(room_G).index_add_(0, group_F, point(price_G) * cost_F)

    reach = float(((target_F.abs() + 1.0) / cost_F).max()) if len(target_F) else 0.0
    low_G, high_G = torch.full_like(room_G, -reach), torch.full_like(room_G, reach)
    for _ in range(num_halvings):
        middle_G = (low_G + high_G) / 2
        is_over_G = spent(middle_G) > room_G
        low_G, high_G = torch.where(is_over_G, middle_G, low_G), torch.where(is_over_G, high_G, middle_G)
    return point(high_G)


def largest_sum(slope_N: Tensor, num_selected: int) -> LinearMaximum:
    """The maximum over masks of K samples.

    Args:
        slope_N: float64 (N,).
        num_selected: K.

    Example:
        >>> largest_sum(torch.tensor([1.0, 3.0, 2.0]).double(), 2).value
        tensor(5., dtype=torch.float64)
    """
    rows_K = first_largest(slope_N, num_selected)
    point_N = torch.zeros_like(slope_N)
    point_N[rows_K] = 1.0
    return LinearMaximum(slope_N[rows_K].sum(), point_N, slope_N[rows_K[-1:]])


class ServiceDual:
    """The planes above facility location, sum_j max_{i in S} s_ji, by the multipliers of this rank's samples.

    Args:
        similarity_TV: float (T, V), not increasing along T.
        neighbor_TV: int32 (T, V).
        is_whole: True if the lists hold all samples, so that no pair is omitted.
        p_N: float64 (N,), inclusion probabilities near the best ones, where the multipliers begin.
        sum_over_ranks: adds up over ranks.
    """

    def __init__(
        self, similarity_TV: Tensor, neighbor_TV: Tensor, *, is_whole: bool, p_N: Tensor, sum_over_ranks: SumOverRanks
    ) -> None:
        num_neighbors, num_held = neighbor_TV.shape
        self._num_samples, self._sum = p_N.numel(), sum_over_ranks
        self._scale = p_N.numel() * num_neighbors**2
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        floors, starts = [], []
        num_columns = max(1, PAIRS_AT_ONCE // num_neighbors)
        for begin in range(0, num_held, num_columns):
            columns = slice(begin, min(begin + num_columns, num_held))
            similarity_TC, neighbor_TC = similarity_TV[:, columns].double(), neighbor_TV[:, columns]
            served_TC = p_N.index_select(0, neighbor_TC.reshape(-1)).view(neighbor_TC.shape).cumsum(0)
            # rounded up: pairs behind the end may be as similar as the last one, and its number may be rounded
            end_C = torch.zeros_like(similarity_TC[0]) if is_whole else similarity_TC[-1] * (1 + 1e-6)
            floor_C = torch.maximum(end_C, _where_reached(similarity_TC, served_TC, MAX_SERVED, is_whole=is_whole))
            place_E, column_E = (similarity_TC > floor_C).nonzero(as_tuple=True)
            pairs.append(
                (similarity_TV[:, columns][place_E, column_E], neighbor_TC[place_E, column_E], column_E.int() + begin)
            )
            floors.append(floor_C)
            starts.append(torch.maximum(floor_C, _where_reached(similarity_TC, served_TC, 1.0, is_whole=is_whole)))
        empty = similarity_TV.new_zeros(0)
        self._pairs = pairs
        self.floor_V = torch.cat(floors) if floors else empty.double()
        self.start_V = torch.cat(starts) if starts else empty.double()
        self.ceiling_V = similarity_TV[0].double() if num_held else empty.double()

    def plane(self, v_V: Tensor) -> Plane:
        """The plane of the multipliers, float64 (V,), at least `floor_V`. Collective."""
        slope_N = torch.zeros(self._num_samples + 1, dtype=torch.float64, device=v_V.device)
        for similarity_E, neighbor_E, sample_E in self._pairs:
            more_E = (similarity_E.double() - v_V.index_select(0, sample_E)).clamp_(min=0.0)
            slope_N.index_add_(0, neighbor_E, round_to_grid(more_E, bound=2.0 * self._num_samples))
        slope_N[-1] = round_to_grid(v_V, bound=2.0 * self._num_samples).sum()
        self._sum(slope_N)
        return Plane(slope_N[-1], slope_N[:-1])

    def subgradient(self, v_V: Tensor, point_N: Tensor) -> Tensor:
        """1 - the number of kept neighbours that are more similar than the multiplier: float64 (V,). Local."""
        result_V = torch.ones_like(v_V)
        for similarity_E, neighbor_E, sample_E in self._pairs:
            is_more_E = similarity_E.double() > v_V.index_select(0, sample_E)
            result_V.index_add_(0, sample_E, -point_N.index_select(0, neighbor_E) * is_more_E)
        return result_V

    def inner(self, left_V: Tensor, right_V: Tensor) -> float:
        """Inner product over all samples, the same bits on any number of ranks. Collective."""
        total = round_to_grid(left_V * right_V, bound=32.0 * self._scale).sum()[None]
        return float(self._sum(total))


def _where_reached(similarity_TC: Tensor, served_TC: Tensor, amount: float, *, is_whole: bool) -> Tensor:
    """Similarity at which the expected number of kept neighbours reaches the amount; the last one if it never does."""
    place_C = (served_TC < amount).sum(0)
    num_neighbors = len(similarity_TC)
    reached_C = similarity_TC.gather(0, place_C.clamp(max=num_neighbors - 1)[None])[0]
    return reached_C.masked_fill(place_C == num_neighbors, 0.0) if is_whole else reached_C


@dataclass
class DualSteps:
    """Polyak's steps on the multipliers, with the value of a known mask as the level to be reached.

    Args:
        dual: the planes.
        factor: of facility location's sum in the objective, positive.
        target: value of the best known mask.
        patience: steps without progress after which the step is halved.
    """

    dual: ServiceDual
    factor: float
    target: float

    patience: int = PATIENCE

    def __post_init__(self) -> None:
        self.best_v_V = self.dual.start_V
        self.restart()

    def restart(self) -> None:
        """Begins anew at the best multipliers, for another objective."""
        self.v_V = self.best_v_V
        self.best = float("inf")
        self._share, self._num_stalled = 1.0, 0
        self._direction_V: Tensor | None = None

    @property
    def is_over(self) -> bool:
        """True once the steps have become too small to change the bound."""
        return self._share < SMALLEST_STEP

    def plane(self, v_V: Tensor | None = None) -> Plane:
        """The plane of these multipliers, by default of the current ones, in units of the objective. Collective."""
        return self.dual.plane(self.v_V if v_V is None else v_V).times(self.factor)

    def advance(self, bound: float, point_N: Tensor) -> None:
        """A step from the current multipliers. Collective.

        Args:
            bound: on the objective, from the current plane.
            point_N: float64 (N,), where the plane has its maximum.
        """
        if bound < self.best:
            is_progress = self.best - bound > LEAST_PROGRESS * max(self.best - self.target, 0.0)
            self._num_stalled = 0 if is_progress else self._num_stalled + 1
            self.best, self.best_v_V = bound, self.v_V
        else:
            self._num_stalled += 1
        if self._num_stalled >= self.patience:
            self._share, self._num_stalled = self._share / 2, 0
        gradient_V = self.dual.subgradient(self.v_V, point_N)
        if self._direction_V is not None:
            before_V = self._direction_V
            bend = -DEFLECTION * self.dual.inner(before_V, gradient_V) / self.dual.inner(before_V, before_V)
            gradient_V = gradient_V + max(0.0, bend) * before_V
        squared_norm = self.dual.inner(gradient_V, gradient_V)
        if squared_norm == 0.0:  # every sample is served once: the bound is the best one
            self._share = 0.0
            return
        self._direction_V = gradient_V
        step = self._share * max(bound - self.target, 0.0) / (self.factor * squared_norm)
        moved_V = torch.maximum(self.v_V - step * gradient_V, self.dual.floor_V)
        self.v_V = torch.minimum(moved_V, torch.maximum(self.dual.ceiling_V, self.dual.floor_V))
