"""Other ways to choose as many samples, by name. Each gets the same features, scaled quality and budget.

Shapes: N samples, D features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from datamask_pl.baselines.greedy import (
    greedy_disf,
    greedy_pairwise,
    lazy_greedy_facility_location,
    random_mask,
    top_quality_mask,
)
from datamask_pl.errors import ConfigError

# Lazy greedy keeps the similarities of all pairs of samples.
MAX_SIMILARITY_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Problem:
    """What a competitor gets.

    Attributes:
        features_ND: float32 (N, D), rows of unit L2 norm.
        quality_N: float32 (N,), scaled quality.
        num_selected: samples to keep.
        quality_weights: by kind of diversity, the share of quality where both are raw; see `raw_quality_weight`.
        seed: of what is random.
    """

    features_ND: Tensor
    quality_N: Tensor
    num_selected: int
    quality_weights: Mapping[str, float]
    seed: int

    def generator(self) -> torch.Generator:
        """Randomness, anew for each competitor."""
        return torch.Generator(device=self.features_ND.device).manual_seed(self.seed)


def _random(problem: Problem) -> Tensor:
    return random_mask(len(problem.quality_N), problem.num_selected, generator=problem.generator())


def _top_quality(problem: Problem) -> Tensor:
    return top_quality_mask(problem.quality_N, problem.num_selected)


def _lazy_greedy(problem: Problem) -> Tensor:
    return lazy_greedy_facility_location(
        problem.features_ND,
        problem.quality_N,
        num_selected=problem.num_selected,
        quality_weight=problem.quality_weights["facility_location"],
        max_similarity_bytes=MAX_SIMILARITY_BYTES,
    )


def _pairwise_greedy(problem: Problem) -> Tensor:
    return greedy_pairwise(
        problem.features_ND,
        problem.quality_N,
        num_selected=problem.num_selected,
        quality_weight=problem.quality_weights["pairwise"],
    )


def _disf_greedy(problem: Problem) -> Tensor:
    return greedy_disf(
        problem.features_ND,
        problem.quality_N,
        num_selected=problem.num_selected,
        quality_weight=problem.quality_weights["disf"],
    )


COMPETITORS: dict[str, Callable[[Problem], Tensor]] = {
    "random": _random,
    "top_quality": _top_quality,
    "lazy_greedy": _lazy_greedy,
    "pairwise_greedy": _pairwise_greedy,
    "disf_greedy": _disf_greedy,
}
# The kind of diversity that a competitor maximises together with quality, where it does.
DIVERSITY_OF = {"lazy_greedy": "facility_location", "pairwise_greedy": "pairwise", "disf_greedy": "disf"}


def run_competitor(name: str, problem: Problem) -> tuple[Tensor, float]:
    """The mask of a competitor and the seconds that it took.

    Args:
        name: one of COMPETITORS.
        problem: what to choose from.

    Returns:
        bool (N,), True = kept, and wall-clock seconds.
    """
    started_s = time.perf_counter()
    mask_N = COMPETITORS[name](problem)
    if mask_N.device.type == "cuda":
        torch.cuda.synchronize(mask_N.device)
    return mask_N, time.perf_counter() - started_s


def raw_quality_weight(quality_weight: float, *, quality_scale: float, diversity_scale: float) -> float:
    """The share of quality that makes raw terms pull as the calibrated ones do.

    w Q / a + (1 - w) D / b is, up to a factor, v Q + (1 - v) D with v = (w / a) / (w / a + (1 - w) / b).

    Args:
        quality_weight: w, in [0, 1].
        quality_scale: a; 0 if quality is constant, and then counts nothing.
        diversity_scale: b; 0 likewise.

    Returns:
        v, in [0, 1]; w if neither counts.

    Example:
        >>> raw_quality_weight(0.5, quality_scale=3.0, diversity_scale=1.0)
        0.25
    """
    quality = quality_weight / quality_scale if quality_scale > 0 else 0.0
    diversity = (1.0 - quality_weight) / diversity_scale if diversity_scale > 0 else 0.0
    return quality / (quality + diversity) if quality + diversity > 0 else quality_weight


def check_competitors(names: Sequence[str], *, num_samples: int) -> None:
    """Checks names, and that lazy greedy has the memory that it needs.

    Args:
        names: of competitors.
        num_samples: of the largest problem.

    Raises:
        ConfigError: If there is no competitor of a name, one is named twice, or there are too many samples.
    """
    unknown = [name for name in names if name not in COMPETITORS]
    if unknown or len(set(names)) < len(names):
        raise ConfigError(f"competitors must be different ones of: {', '.join(COMPETITORS)}; got {list(names)}.")
    num_bytes = 4 * num_samples**2
    if "lazy_greedy" in names and num_bytes > MAX_SIMILARITY_BYTES:
        raise ConfigError(
            f"max_samples: lazy_greedy keeps the similarities of all pairs, {num_bytes / 1e9:.1f} GB for "
            f"{num_samples:,} samples; lower max_samples to {int((MAX_SIMILARITY_BYTES / 4) ** 0.5):,} or leave "
            "lazy_greedy out of competitors."
        )
