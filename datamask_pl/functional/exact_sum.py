"""Floating point sums that do not depend on their order.

Addends are rounded to a grid so coarse that float64 holds every partial sum exactly. Addition is then associative,
and one rank, four ranks, and any chunking of the rows give the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT64_MANTISSA_BITS = 52


def round_to_grid(values: Tensor, *, bound: float) -> Tensor:
    """Rounds to the finest grid on which sums stay exact as long as their absolute values add up to `bound` at most.

    Args:
        values: float32 or float64, any shape.
        bound: upper bound on the sum of absolute values that will ever be added up, positive.

    Returns:
        float64, same shape, each a multiple of 2 ** (ceil(log2(bound)) - 51). The error of one value is half of that:
        1e-10 for a bound of one million.

    Example:
        >>> import torch
        >>> parts = round_to_grid(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), bound=1.0)
        >>> bool((parts[0] + parts[1]) + parts[2] == parts[0] + (parts[1] + parts[2]))
        True
    """
    scale = grid_scale(bound)
    scaled = values * scale if values.dtype == torch.float64 else values.double().mul_(scale)
    return scaled.round_().mul_(1 / scale)


def grid_scale(bound: float) -> float:
    """The power of two by which the numbers of `round_to_grid` are whole: for those who round where numbers are made.

    Args:
        bound: as there.

    Example:
        >>> grid_scale(1.0) == 2**51
        True
    """
    # One bit in reserve: rounding up may push the sum of n values past the bound by n half grid steps.
    return 2.0 ** (FLOAT64_MANTISSA_BITS - 1 - math.ceil(math.log2(bound)))
