"""Quality of a set: the mean scaled quality of what it keeps.

Shapes: R masks, N samples.
"""

from __future__ import annotations

from torch import Tensor


def quality_value(masks_RN: Tensor, quality_N: Tensor, *, num_selected: int) -> Tensor:
    """Sum of quality over each mask divided by the budget.

    Args:
        masks_RN: bool (R, N), or probabilities (R, N): the value is linear, so its expectation is the same formula.
        quality_N: float (N,), scaled quality.
        num_selected: the budget.

    Returns:
        float64 (R,).

    Example:
        >>> import torch
        >>> quality_value(torch.tensor([[True, False, True]]), torch.tensor([0.0, 0.5, 1.0]), num_selected=2)
        tensor([0.5000], dtype=torch.float64)
    """
    return masks_RN.double() @ quality_N.double() / num_selected
