"""Counts of values in bins of equal width.

Shapes: N samples, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_COUNT = 2**24


@dataclass(frozen=True)
class Histogram:
    """How many values are in each of B bins of equal width.

    Attributes:
        low: where the first begins.
        high: where the last ends; values at it belong to the last.
        count_B: float64 (B,), on the host.
        num_left_out: values that are not finite.
    """

    low: float
    high: float
    count_B: Tensor
    num_left_out: int = 0

    @property
    def edges(self) -> Tensor:
        """float64 (B + 1,)."""
        return torch.linspace(self.low, self.high, len(self.count_B) + 1, dtype=torch.float64)

    @classmethod
    def merged(cls, parts: Sequence[Histogram]) -> Histogram:
        """The counts of several, at least one, of the same bins."""
        count_B = torch.stack([part.count_B for part in parts]).sum(0)
        return cls(parts[0].low, parts[0].high, count_B, sum(part.num_left_out for part in parts))


def finite_range(values_N: Tensor) -> tuple[float, float]:
    """Lowest and highest finite value; (0, 1) if there is none, and a range about the value if there is one.

    Example:
        >>> finite_range(torch.tensor([2.0, torch.nan, 3.0]))
        (2.0, 3.0)
    """
    finite_N = values_N[values_N.isfinite()]
    if not finite_N.numel():
        return 0.0, 1.0
    low, high = float(finite_N.min()), float(finite_N.max())
    margin = max(abs(low), 1.0) * 1e-3
    return (low, high) if low < high else (low - margin, high + margin)


def histogram(values_N: Tensor, *, num_bins: int, low: float, high: float) -> Histogram:
    """Counts finite values; those outside of the range are in the first or last bin.

    Args:
        values_N: float (N,), on any device; NaN and infinities are dropped and counted.
        num_bins: B.
        low: where the first bin begins.
        high: where the last ends, above low.

    Returns:
        The counts, on the host.

    Example:
        >>> histogram(torch.tensor([0.1, 0.2, 0.9, torch.nan]), num_bins=2, low=0.0, high=1.0).count_B
        tensor([2., 1.], dtype=torch.float64)
    """
    finite_N = values_N[values_N.isfinite()].float().clamp(low, high)
    # in parts: histc counts in float32, which has no whole numbers above 2^24
    counts = [torch.histc(part, bins=num_bins, min=low, max=high).double() for part in torch.split(finite_N, MAX_COUNT)]
    return Histogram(low, high, torch.stack(counts).sum(0).cpu(), values_N.numel() - finite_N.numel())
