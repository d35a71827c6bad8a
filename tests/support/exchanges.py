"""Random blocks as the swap search sees them, with an oracle of their value."""

from __future__ import annotations

import numpy as np
import torch

from datamask_pl.functional.swaps.polish import polish
from datamask_pl.objectives.joint import JointObjective
from tests.support import oracles, problems

SCALES = torch.ones(2, dtype=torch.float64)


class Solver:
    """A block, with all that `polish` can be told of it."""

    def __init__(self, kind, seed, *, num_samples, num_selected=None, constraint=None):
        rng = np.random.default_rng(seed)
        self.kind, self.constraint = kind, constraint
        num_selected = constraint.typical_size if constraint else num_selected or int(rng.integers(1, num_samples // 2))
        self.quality_weight = float(rng.choice([0.0, 0.3]))
        self.features_ND = problems.unit_rows(num_samples, int(rng.choice([3, 6])), seed)
        self.quality_N = problems.qualities(num_samples, seed)
        self.ground = problems.ground_set(self.features_ND, constraint or num_selected, quality_N=self.quality_N)
        self.objective = JointObjective(quality_weight=self.quality_weight, diversity=problems.DIVERSITIES[kind])

    def values(self, masks_RN):
        return self.objective.combine(self.objective.term_values(masks_RN, self.ground), SCALES)

    def gains(self, mask_N):
        return self.objective.value_and_gradient(mask_N.double(), self.ground, SCALES)[0].gradient_N

    def interactions(self, rows_P):
        pool = self.ground.part(rows_P)
        return lambda places, others: self.objective.interactions(places, others, pool, SCALES)

    def covered(self, mask_N, rows_P):
        return self.objective.coverage(mask_N, rows_P, self.ground, SCALES)

    def oracle(self, mask_N):
        mask_N = np.asarray(mask_N)
        value = oracles.objective(
            self.kind, self.features_ND, self.quality_N, num_selected=int(mask_N.sum()),
            quality_weight=self.quality_weight,
        )  # fmt: skip
        return value(mask_N)

    def random_mask(self, seed=0):
        return self.ground.budget.fill(
            torch.randn(self.ground.num_samples, generator=torch.Generator().manual_seed(seed))
        )

    def may_be(self, mask_N):
        """Whether the budget allows the mask, and nothing can be added to it."""
        if self.constraint is None:
            return int(mask_N.sum()) == self.ground.num_selected
        more_RN = mask_N.repeat(len(mask_N), 1) | torch.eye(len(mask_N), dtype=torch.bool)
        return self.constraint.allows(mask_N) and not any(map(self.constraint.allows, more_RN[~mask_N]))

    def polish(self, start_N, *, known="nothing", **options):
        told = {
            "nothing": {},
            "features": {"features": self.ground.centered},
            "interactions": {"interactions": self.interactions},
            "coverage": {"covered": self.covered, "features": self.ground.centered},
        }
        options = {"values": self.values, "gains": self.gains, "constraint": self.constraint, **told[known], **options}
        return polish(start_N, **options)


def swaps_of(mask_N):
    """All masks that differ by one swap, with what comes in and what goes."""
    for added in (~mask_N).nonzero().squeeze(1).tolist():
        for removed in mask_N.nonzero().squeeze(1).tolist():
            trial_N = mask_N.clone()
            trial_N[added], trial_N[removed] = True, False
            yield trial_N, added, removed
