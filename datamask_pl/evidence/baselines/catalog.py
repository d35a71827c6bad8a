"""All baselines under one signature, by name.

Shape suffixes: N samples, D features.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from datamask_pl.errors import check_choice
from datamask_pl.evidence.baselines.batches import batched_disf, leverage_scores
from datamask_pl.evidence.baselines.greedy import (
    greedy_disf,
    greedy_pairwise,
    lazy_greedy_facility_location,
    random_mask,
    top_quality_mask,
)
from datamask_pl.evidence.baselines.semdedup import semdedup

BaselineName = Literal[
    "random",
    "top_quality",
    "greedy_facility_location",
    "greedy_pairwise",
    "greedy_disf",
    "disf_batches",
    "disf_published",
    "leverage_score",
    "semdedup",
    "semdedup_quality",
]


class _Baseline(Protocol):
    def __call__(
        self, features_ND: Tensor, quality_N: Tensor, *, num_selected: int, quality_weight: float, seed: int
    ) -> Tensor: ...


def baseline_mask(
    name: BaselineName, features_ND: Tensor, quality_N: Tensor, *, num_selected: int, quality_weight: float, seed: int
) -> Tensor:
    """The mask of a baseline.

    Args:
        name: one of BASELINES: `random`; `top_quality`; greedy for one diversity term, `greedy_facility_location`
            (needs N x N floats), `greedy_pairwise` or `greedy_disf`; `disf_batches` and `disf_published`, DiSF's
            greedy in random batches, for the plain term or for correlations; `leverage_score`; `semdedup` and
            `semdedup_quality`, which keeps the best of near-duplicates.
        features_ND: float (N, D), rows of unit L2 norm.
        quality_N: float (N,), scaled quality.
        num_selected: samples to keep, in [1, N].
        quality_weight: lambda in [0, 1]. Random, top quality and SemDeDup have no use for it.
        seed: of those that draw something. The greedy ones and top quality do not.

    Returns:
        bool (N,), True = kept, on the features' device, exactly num_selected.

    Raises:
        ConfigError: If there is no baseline of that name; also the errors of the baseline itself.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(10.0).reshape(5, 2) + 1)
        >>> baseline_mask("top_quality", x, x[:, 0], num_selected=1, quality_weight=0.5, seed=0)
        tensor([False, False, False, False,  True])
    """
    check_choice("a baseline", name, BASELINES)
    return BASELINES[name](features_ND, quality_N, num_selected=num_selected, quality_weight=quality_weight, seed=seed)


def _generator(seed: int) -> torch.Generator:
    # On the CPU, so that a seed means the same on every device.
    return torch.Generator().manual_seed(seed)


BASELINES: dict[BaselineName, _Baseline] = {
    "random": lambda x, q, *, num_selected, quality_weight, seed: random_mask(
        len(x), num_selected, generator=_generator(seed)
    ).to(x.device),
    "top_quality": lambda x, q, *, num_selected, quality_weight, seed: top_quality_mask(q, num_selected),
    "greedy_facility_location": lambda x, q, *, num_selected, quality_weight, seed: lazy_greedy_facility_location(
        x, q, num_selected=num_selected, quality_weight=quality_weight
    ),
    "greedy_pairwise": lambda x, q, *, num_selected, quality_weight, seed: greedy_pairwise(
        x, q, num_selected=num_selected, quality_weight=quality_weight
    ),
    "greedy_disf": lambda x, q, *, num_selected, quality_weight, seed: greedy_disf(
        x, q, num_selected=num_selected, quality_weight=quality_weight
    ),
    "disf_batches": lambda x, q, *, num_selected, quality_weight, seed: batched_disf(
        x, q, num_selected=num_selected, quality_weight=quality_weight, generator=_generator(seed)
    ),
    "disf_published": lambda x, q, *, num_selected, quality_weight, seed: batched_disf(
        x, q, num_selected=num_selected, quality_weight=quality_weight, generator=_generator(seed), standardize=True
    ),
    "leverage_score": lambda x, q, *, num_selected, quality_weight, seed: leverage_scores(
        x, q, num_selected=num_selected, quality_weight=quality_weight, generator=_generator(seed)
    ),
    "semdedup": lambda x, q, *, num_selected, quality_weight, seed: semdedup(
        x, q, num_selected=num_selected, generator=_generator(seed)
    ),
    "semdedup_quality": lambda x, q, *, num_selected, quality_weight, seed: semdedup(
        x, q, num_selected=num_selected, generator=_generator(seed), keep="quality"
    ),
}
