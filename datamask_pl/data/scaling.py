"""Quality scores brought to a common scale within a block. Pure numpy.

Shape suffix: N samples of a block.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from datamask_pl.errors import DatamaskWarning

QualityScaling = Literal["rank", "minmax", "zscore", "none"]

# minmax with less room than this for all but the outermost hundredths is warned of: outliers take the range.
CROWDED = 1e-3


class ConstantQualityWarning(DatamaskWarning):
    """All samples of a block have the same quality, so that quality cannot tell them apart."""


class MergedQualityWarning(DatamaskWarning):
    """Scaling has made many different scores of a block equal, so that quality can hardly tell its samples apart."""


def scale_quality(quality_N: NDArray[np.float32], scaling: QualityScaling) -> NDArray[np.float32]:
    """Quality on the scale that the objective sees.

    Args:
        quality_N: float32 (N,), finite, N at least 1.
        scaling: one of

            - `rank`: average rank of equal scores, from 0 for the lowest to 1 for the highest. Outliers cannot matter.
            - `minmax`: linear, the lowest is 0 and the highest 1.
            - `zscore`: mean 0 and standard deviation 1 over the block.
            - `none`: as it is.

    Returns:
        float32 (N,). A constant quality gives zeros under every scaling but `none`; so does a single sample.

    Raises:
        ValueError: If the scaling is not one of the four.

    Example:
        >>> scale_quality(np.array([3.0, 9.0, 3.0], dtype=np.float32), "rank")
        array([0.25, 1.  , 0.25], dtype=float32)
    """
    if scaling == "none":
        return quality_N
    if is_constant(quality_N):
        return np.zeros_like(quality_N)
    # float64: the range of a float32 column may be above the largest float32
    values_N = quality_N.astype(np.float64)
    if scaling == "rank":
        scaled_N = _average_ranks(values_N) / (len(values_N) - 1)
    elif scaling == "minmax":
        scaled_N = (values_N - values_N.min()) / (values_N.max() - values_N.min())
    elif scaling == "zscore":
        scaled_N = (values_N - values_N.mean()) / values_N.std()
    else:
        raise ValueError(f"quality_scaling must be rank, minmax, zscore or none, got {scaling!r}.")
    return scaled_N.astype(np.float32)


def quality_warning(
    quality_N: NDArray[np.float32], scaled_N: NDArray[np.float32], *, block: int, scaling: QualityScaling
) -> DatamaskWarning | None:
    """What a user should know of the qualities of a block, if anything.

    Args:
        quality_N: float32 (N,), as read.
        scaled_N: float32 (N,), scaled.
        block: index of the block.
        scaling: by which they were scaled.

    Returns:
        A warning if all qualities are the same, if outliers take the range of minmax, or if scaling has merged
        most of the different ones: next to an outlier
        of 1e9, float32 has no room for 0.1 and 0.2.
    """
    if len(quality_N) > 1 and is_constant(quality_N):
        return ConstantQualityWarning(
            f"the quality of all {len(quality_N)} samples of block {block} is {quality_N[0]:.6g}: it cannot tell them "
            "apart, only diversity can. (Said once a run.)"
        )
    num_before, num_after = np.unique(quality_N).size, np.unique(scaled_N).size
    if 2 * num_after < num_before:
        return MergedQualityWarning(
            f"data.quality_scaling: {scaling} leaves {num_after} of {num_before} different qualities of block {block}, "
            f"which go from {quality_N.min():.6g} to {quality_N.max():.6g}; use rank, or remove the outliers. (Said "
            "once a run.)"
        )
    if scaling == "minmax" and num_before > 1:
        low, high = np.percentile(scaled_N, [1, 99])
        if high - low < CROWDED:
            return MergedQualityWarning(
                f"data.quality_scaling: minmax leaves {high - low:.1e} of [0, 1] to 98 % of the samples of block "
                f"{block}, whose qualities go from {quality_N.min():.6g} to {quality_N.max():.6g}; use rank, or remove "
                "the outliers. (Said once a run.)"
            )
    return None


def is_constant(quality_N: NDArray[np.float32]) -> bool:
    """Whether all values are equal."""
    return bool(quality_N.min() == quality_N.max())


def _average_ranks(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of the ranks that they take up together."""
    _, inverse_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts) - 1
    average_ranks: NDArray[np.float64] = last_ranks - (counts - 1) / 2
    return average_ranks[inverse_N]
