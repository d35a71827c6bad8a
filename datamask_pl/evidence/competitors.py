"""Other ways to choose as many samples, each with the same pull of quality.

Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from datamask_pl.errors import ConfigError
from datamask_pl.evidence.baselines.catalog import BASELINES, BaselineName
from datamask_pl.objectives import DiversityName

# Quick, and one of each kind; the others have to be asked for.
DEFAULT_COMPETITORS: list[BaselineName] = [
    "random",
    "top_quality",
    "greedy_facility_location",
    "greedy_pairwise",
    "greedy_disf",
    "leverage_score",
    "semdedup",
    "semdedup_quality",
]
# The kind of diversity that a baseline maximises together with quality, where it does.
DIVERSITY_OF: dict[BaselineName, DiversityName] = {
    "greedy_facility_location": "facility_location",
    "greedy_pairwise": "pairwise",
    "greedy_disf": "disf",
    "disf_batches": "disf",
}
# The similarities of all pairs of samples that greedy_facility_location holds, at most.
MAX_SIMILARITY_BYTES = 4_000_000_000


def quality_weight_of(name: BaselineName, quality_weight: float, *, scale_of: Callable[[str], float]) -> float:
    """The share of quality that a baseline is given, so that quality pulls as much as in the run.

    Greedy maximises raw terms. w Q / a + (1 - w) D / b is, up to a factor, v Q + (1 - v) D with
    v = (w / a) / (w / a + (1 - w) / b). `leverage_score` has quality and diversity on one scale, and takes w itself.
    DiSF as it was published has no quality.

    Args:
        name: of the baseline.
        quality_weight: w, in [0, 1].
        scale_of: what the run divides a term by, `quality` or a kind of diversity; 0 if it is constant and counts
            nothing.

    Returns:
        In [0, 1]; w where neither term counts.

    Example:
        >>> quality_weight_of("greedy_disf", 0.5, scale_of={"quality": 3.0, "disf": 1.0}.__getitem__)
        0.25
    """
    if name == "disf_published":
        return 0.0
    if name not in DIVERSITY_OF:
        return quality_weight
    quality_scale, diversity_scale = scale_of("quality"), scale_of(DIVERSITY_OF[name])
    quality = quality_weight / quality_scale if quality_scale > 0 else 0.0
    diversity = (1.0 - quality_weight) / diversity_scale if diversity_scale > 0 else 0.0
    return quality / (quality + diversity) if quality + diversity > 0 else quality_weight


def check_competitors(names: Sequence[str], *, num_samples: int) -> list[BaselineName]:
    """Checks names, and that there is memory for them.

    Args:
        names: of baselines.
        num_samples: of the largest problem.

    Returns:
        The names.

    Raises:
        ConfigError: If there is no baseline of a name, one is named twice, or there are too many samples.
    """
    known = [name for name in BASELINES if name in names]
    if len(known) < len(names):
        raise ConfigError(f"competitors must be different ones of: {', '.join(BASELINES)}; got {list(names)}.")
    num_bytes = 4 * num_samples**2
    if "greedy_facility_location" in names and num_bytes > MAX_SIMILARITY_BYTES:
        raise ConfigError(
            f"max_samples: greedy_facility_location holds the similarities of all pairs, {num_bytes / 1e9:.1f} GB for "
            f"{num_samples:,} samples; lower max_samples to {int((MAX_SIMILARITY_BYTES / 4) ** 0.5):,} or leave it out "
            "of competitors."
        )
    return known
