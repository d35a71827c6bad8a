"""Small ground sets, random and degenerate, as numpy arrays for the oracles and as a GroundSet for the package."""

from __future__ import annotations

import numpy as np
import torch

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.budget import Budget
from datamask_pl.objectives import ClosedFormObjective, DiSF, FacilityLocation, PairwiseSimilarity
from datamask_pl.objectives.ground_set import GroundSet
from tests.support import oracles

DIVERSITIES: dict[str, ClosedFormObjective] = {
    "facility_location": FacilityLocation(),
    "pairwise": PairwiseSimilarity(),
    "disf": DiSF(),
    "disf_standardized": DiSF(standardize=True),
}


def unit_rows(num_samples: int, num_features: int, seed: int) -> np.ndarray:
    features_ND = np.random.default_rng(seed).normal(size=(num_samples, num_features))
    return features_ND / np.linalg.norm(features_ND, axis=1, keepdims=True)


def qualities(num_samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).uniform(size=num_samples)


def ground_set(
    features_ND: np.ndarray,
    budget: int | Budget,
    *,
    quality_N: np.ndarray | None = None,
    dtype: torch.dtype = torch.float64,
    num_slice_rows: int = 16_384,
    ranks: RankGroup | None = None,
) -> GroundSet:
    quality_N = np.zeros(len(features_ND)) if quality_N is None else quality_N
    return GroundSet.of(
        features_ND=torch.tensor(features_ND, dtype=dtype),
        quality_N=torch.tensor(quality_N, dtype=dtype),
        budget=budget,
        num_slice_rows=num_slice_rows,
        ranks=ranks,
    )


def random_masks(num_masks: int, num_samples: int, num_selected: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 2])
    return np.stack(
        [oracles.mask_of(list(rng.permutation(num_samples)[:num_selected]), num_samples) for _ in range(num_masks)]
    )


def value_of(objective: ClosedFormObjective, mask_N: np.ndarray, ground: GroundSet) -> float:
    return float(objective.value(torch.tensor(mask_N)[None], ground)[0])
