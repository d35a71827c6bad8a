"""Plackett-Luce as a race: sample i has a clock that rings after an exponential time of rate exp(logit_i).

The order in which clocks ring is a Plackett-Luce order, so the first K to ring are a draw. At a fixed time t the
samples whose clock has rung are independent, each with probability 1 - exp(-rate t).

Shapes: N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_NEWTON_STEPS = 100
RELATIVE_TOLERANCE = 1e-10


def solve_log_time(logits_N: Tensor, num_expected: float) -> float:
    """Finds the time by which `num_expected` clocks are expected to have rung.

    Safeguarded Newton in float64 on the logarithm of the time, from a bracket that is known to hold it.

    Args:
        logits_N: float (N,), finite.
        num_expected: in (0, N).

    Returns:
        Logarithm of the time.

    Example:
        >>> solve_log_time(torch.zeros(4), 2.0) == math.log(math.log(2.0))
        True
    """
    logits64_N = logits_N.detach().double()
    uniform = math.log(-math.log1p(-num_expected / logits64_N.numel()))
    low, high = uniform - logits64_N.max().item(), uniform - logits64_N.min().item()
    log_time = (low + high) / 2
    for _ in range(MAX_NEWTON_STEPS):
        hazard_N = (logits64_N + log_time).exp_()
        excess = -hazard_N.neg().expm1_().sum().item() - num_expected
        if abs(excess) <= RELATIVE_TOLERANCE * num_expected or low >= high:
            break
        low, high = (low, log_time) if excess > 0 else (log_time, high)
        # where a hazard is infinite nothing is left to change
        slope = hazard_N.neg().exp_().mul_(hazard_N).nan_to_num_(nan=0.0).sum().item()
        newton = log_time - excess / slope if slope > 0 else low
        # a Newton step out of the bracket is replaced by bisection
        log_time = newton if low < newton < high else (low + high) / 2
    return log_time


def rung_probabilities(logits_N: Tensor, log_time: float | Tensor) -> Tensor:
    """Probability that each clock has rung by a time: 1 - exp(-exp(logit + log_time)).

    Args:
        logits_N: float (N,).
        log_time: logarithm of the time.

    Returns:
        float64 (N,), in [0, 1].

    Example:
        >>> rung_probabilities(torch.zeros(2), math.log(math.log(2.0)))
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return (logits_N.detach().double() + log_time).exp_().neg_().expm1_().neg_()


def ringing_rates(logits_N: Tensor, log_time: float | Tensor) -> Tensor:
    """Derivative of `rung_probabilities` in the logits: h exp(-h), h = exp(logit + log_time).

    Args:
        logits_N: float (N,).
        log_time: logarithm of the time.

    Returns:
        float64 (N,), in [0, 1 / e]; 0 where it is less than float64 can tell.

    Example:
        >>> ringing_rates(torch.zeros(2), 0.0)
        tensor([0.3679, 0.3679], dtype=torch.float64)
    """
    log_hazard_N = logits_N.detach().double() + log_time
    return torch.exp(log_hazard_N - log_hazard_N.exp())


def inclusion_probabilities(logits_N: Tensor, num_selected: int) -> Tensor:
    """Probability that each sample is drawn, to within O(1 / K): that its clock rings by the time expected of the last.

    Args:
        logits_N: float (N,), finite.
        num_selected: K, in [1, N].

    Returns:
        float64 (N,), in [0, 1], with sum K.

    Source: Rosen 1972 for the asymptotics of successive sampling.

    Example:
        >>> inclusion_probabilities(torch.zeros(4), 1)
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    if num_selected == logits_N.numel():
        return torch.ones(logits_N.shape, dtype=torch.float64, device=logits_N.device)
    return rung_probabilities(logits_N, solve_log_time(logits_N, num_selected))
