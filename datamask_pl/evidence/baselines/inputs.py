"""Checks of inputs that all baselines share, and masks of rows.

Shape suffixes: N samples, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.errors import BadRowError, BudgetError, ConfigError


def check_inputs(features_ND: Tensor, quality_N: Tensor, num_selected: int, quality_weight: float) -> int:
    """Returns N once everything that the baselines have in common is known to be sound.

    Raises:
        ConfigError: If the shapes disagree or quality_weight is outside [0, 1].
        BudgetError: If num_selected is outside [1, N].
        BadRowError: If a feature or a quality is not finite.
    """
    if features_ND.ndim != 2 or quality_N.shape != features_ND.shape[:1]:
        raise ConfigError(
            f"features_ND must be (N, D) and quality_N (N,), got {tuple(features_ND.shape)} and "
            f"{tuple(quality_N.shape)}; pass one quality for every row of features."
        )
    if not 0.0 <= quality_weight <= 1.0:
        raise ConfigError(f"quality_weight must be in [0, 1], got {quality_weight}; 1 is pure quality, 0 diversity.")
    check_budget(features_ND.shape[0], num_selected)
    check_finite("features_ND", features_ND)
    check_finite("quality_N", quality_N)
    return features_ND.shape[0]


def check_budget(num_samples: int, num_selected: int) -> None:
    """Raises BudgetError if num_selected is outside [1, num_samples]."""
    if not 1 <= num_selected <= num_samples:
        raise BudgetError(
            f"num_selected must be in [1, {num_samples}], the number of samples, got {num_selected}; "
            "keep at least one sample and at most all."
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raises BadRowError if a row of `values`, (N,) or (N, D), is not finite; names the first."""
    is_bad_N = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    if is_bad_N.any():
        row = int(is_bad_N.int().argmax())
        raise BadRowError(f"{name} must be finite, but row {row} is not; leave such samples out first.")


def mask_of(rows: Tensor, num_samples: int) -> Tensor:
    """The mask that keeps these rows: bool (N,), on their device."""
    mask_N = torch.zeros(num_samples, dtype=torch.bool, device=rows.device)
    mask_N[rows] = True
    return mask_N
