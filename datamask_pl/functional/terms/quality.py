"""Quality of a set: the mean scaled quality of what it keeps.

Shapes: R masks, N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of masks that are float64 at a time: 32 MiB.
MAX_CONVERTED = 2**22


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
    return weigh_masks(masks_RN, quality_N) / num_selected


def weigh_masks(masks_RN: Tensor, weights_N: Tensor) -> Tensor:
    """Sum of the weights that each mask keeps, a few masks at a time: eight times their memory would be much.

    Args:
        masks_RN: bool (R, N), or probabilities (R, N).
        weights_N: float (N,).

    Returns:
        float64 (R,).

    Example:
        >>> import torch
        >>> weigh_masks(torch.tensor([[True, False, True]]), torch.tensor([1.0, 2.0, 4.0]))
        tensor([5.], dtype=torch.float64)
    """
    weights_N = weights_N.double()
    parts = torch.split(masks_RN, max(1, MAX_CONVERTED // max(1, masks_RN.shape[1])))
    return torch.cat([part_RN.double() @ weights_N for part_RN in parts])
