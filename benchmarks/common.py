"""What the benchmarks share: reading a block, and judging a mask by brute force.

Independent of the package, so that a mistake there cannot hide here.

Shape suffixes: N samples, K selected, B rows of a chunk, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["facility_location", "pairwise", "disf"]


class Evaluation(NamedTuple):
    """f = quality_weight * quality + (1 - quality_weight) * diversity, raw and uncalibrated."""

    f: float
    quality: float
    diversity: float


def load_dictionary(
    paths: Sequence[str | Path], *, feature_column: str = "feature_arr", quality_column: str = "quality_score"
) -> tuple[Tensor, Tensor]:
    """Reads parquet files into one block.

    Args:
        paths: parquet files, in the order of the block's rows.
        feature_column: fixed-size list of floats.
        quality_column: float, higher is better.

    Returns:
        features_ND: float32 (N, D), rows of unit L2 norm.
        quality_N: float32 (N,), rank / (N - 1) in [0, 1]; equal scores share their mean rank.
    """
    features, scores = [], []
    for path in paths:
        table = pq.read_table(path, columns=[feature_column, quality_column])
        for column in table.column(feature_column).chunks:
            values = column.flatten().to_numpy(zero_copy_only=False)
            features.append(values.reshape(len(column), -1).astype(np.float32))
        scores.append(table.column(quality_column).to_numpy())
    features_ND = np.concatenate(features)
    features_ND /= np.linalg.norm(features_ND, axis=1, keepdims=True)
    return torch.from_numpy(features_ND), torch.from_numpy(rank_scale(np.concatenate(scores)).astype(np.float32))


def rank_scale(score_N: NDArray[np.floating]) -> NDArray[np.float64]:
    """Mean rank of each score divided by N - 1: float64 (N,) in [0, 1]."""
    _, group_N, count = np.unique(score_N, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count + 1) / 2
    return mean_rank[group_N] / max(1, len(score_N) - 1)


def evaluate(features_ND: Tensor, quality_N: Tensor, mask_N: Tensor, kind: Kind, quality_weight: float) -> Evaluation:
    """Judges a mask from the definitions, in chunks of rows: under 1 GB beside the features for blocks of 100,000.

    Args:
        features_ND: float32 (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        mask_N: bool (N,), True = kept.
        kind: the diversity term.
        quality_weight: lambda in [0, 1].
    """
    quality = float(quality_N[mask_N].double().mean())
    if kind == "facility_location":
        diversity = _facility_location(features_ND, mask_N)
    elif kind == "pairwise":
        diversity = _pairwise(features_ND[mask_N])
    elif kind == "disf":
        diversity = _disf(features_ND, mask_N)
    else:
        raise ValueError(f"kind must be facility_location, pairwise or disf, got {kind!r}.")
    return Evaluation(quality_weight * quality + (1.0 - quality_weight) * diversity, quality, diversity)


def _facility_location(features_ND: Tensor, mask_N: Tensor) -> float:
    kept_KD = features_ND[mask_N]
    total = 0.0
    for chunk_BD in features_ND.split(2048):
        total += float((chunk_BD @ kept_KD.T).amax(dim=1).clamp(min=0.0).double().sum())
    return total / len(features_ND)


def _pairwise(kept_KD: Tensor) -> float:
    num_selected = len(kept_KD)
    if num_selected == 1:
        return 0.0
    sum_D = kept_KD.sum(dim=0, dtype=torch.float64)
    norms = sum(float(chunk_BD.double().square().sum()) for chunk_BD in kept_KD.split(8192))
    return -(float(sum_D @ sum_D) - norms) / (num_selected * (num_selected - 1))


def _disf(features_ND: Tensor, mask_N: Tensor) -> float:
    mean_D = features_ND.mean(dim=0, dtype=torch.float64)
    kept_KD = features_ND[mask_N]
    moment_DD = torch.zeros(len(mean_D), len(mean_D), dtype=torch.float64)
    for chunk_BD in kept_KD.split(8192):
        z_BD = chunk_BD.double() - mean_D
        moment_DD += z_BD.T @ z_BD
    return -float((moment_DD / len(kept_KD)).square().sum())
