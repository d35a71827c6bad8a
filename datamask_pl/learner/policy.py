"""The policy: one logit per sample of the block, and the optimizer that moves them.

Shapes: N samples of the block, M samples of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from datamask_pl.functional.initialization import quality_log_odds, quality_logits

Initialization = Literal["same", "quality"]


def first_logits(quality_N: Tensor, num_selected: int, init: Initialization, *, is_independent: bool) -> Tensor:
    """The logits that a block starts with: float32 (N,); see `MaskPolicy.reset`."""
    if init == "same":
        return torch.zeros(quality_N.numel(), device=quality_N.device)
    return (quality_log_odds(quality_N, num_selected) if is_independent else quality_logits(quality_N)).float()


class MaskPolicy(nn.Module):
    """Owns the logits of the current block.

    Blocks differ by a row at most, and the parameter is as long as the longest: `logits[:N]` are in use.

    Args:
        num_samples: samples of the longest block.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_samples))

    @torch.no_grad()
    def reset(self, quality_N: Tensor, num_selected: int, *, init: Initialization, is_independent: bool) -> None:
        """Sets the logits that a block starts with.

        Args:
            quality_N: float32 (N,), scaled quality.
            num_selected: the budget.
            init: `same` for equal logits, `quality` for probabilities proportional to quality.
            is_independent: True if samples are kept independently (multilinear), False for Plackett-Luce.
        """
        self.logits.zero_()
        start_N = first_logits(quality_N, num_selected, init, is_independent=is_independent)
        self.logits[: quality_N.numel()] = start_N


class LogitAscent(torch.optim.Optimizer):
    """Adds a staged direction to some of the logits.

    An optimizer of its own, so that Lightning counts steps, checkpoints and stops as it does for any other; the
    direction is computed in closed form, and no gradient is ever attached to the parameter.

    Args:
        logits: the one parameter.
    """

    def __init__(self, logits: nn.Parameter) -> None:
        super().__init__([logits], {"lr": 0.0})
        self._staged: tuple[Tensor | None, Tensor] | None = None

    def stage(self, rows_M: Tensor | None, change_M: Tensor, *, rate: float = 0.0) -> None:
        """Says what the next `step` adds.

        Args:
            rows_M: int64 (M,), distinct rows to change, or None for the first M.
            change_M: float (M,), what is added to their logits.
            rate: the learning rate in it, for callbacks that watch it.
        """
        self.param_groups[0]["lr"] = rate
        self._staged = rows_M, change_M

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Adds what was staged, once."""
        if closure is not None:
            closure()
        assert self._staged is not None, "stage() comes before step()"
        logits = self.param_groups[0]["params"][0]
        rows_M, change_M = self._staged
        if rows_M is None:
            logits[: change_M.numel()] += change_M.to(logits.dtype)
        else:
            logits[rows_M] += change_M.to(logits.dtype)
        self._staged = None
