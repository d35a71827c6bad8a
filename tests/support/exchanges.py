"""Random blocks as exchanges see them, and oracles of their value."""

from __future__ import annotations

import numpy as np
import torch

from datamask_pl.functional import multilinear
from datamask_pl.functional.swaps.pooled import top_k_mask
from datamask_pl.objectives.joint import JointObjective
from tests.support import oracles, problems

SCALES = torch.ones(2, dtype=torch.float64)


class Solver:
    """A block solved by the multilinear method, with what `polish` and `polish_within` need."""

    def __init__(self, features_ND, num_selected, *, kind, quality_weight, quality_N, constraint=None):
        self.ground = problems.ground_set(features_ND, num_selected, quality_N=quality_N, constraint=constraint)
        self.objective = JointObjective(quality_weight=quality_weight, diversity=problems.DIVERSITIES[kind])

    def values(self, masks_RN):
        return self.objective.combine(self.objective.term_values(masks_RN, self.ground), SCALES)

    def gains(self, mask_N):
        return self.objective.linearize(mask_N.double(), self.ground, SCALES)[0].gradient_N

    def interactions(self, rows_P):
        pool = self.ground.part(rows_P)
        return lambda places, others: self.objective.interactions(places, others, pool, SCALES)

    def top_k(self, num_steps=20):
        logits_N = torch.zeros(self.ground.num_samples, dtype=torch.float64)
        for step in range(num_steps):
            p_N = multilinear.inclusion_probabilities(logits_N, self.ground.num_selected)
            gradient_N = self.objective.linearize(p_N, self.ground, SCALES)[0].gradient_N
            logits_N += (1.0 - 0.9 * step / (num_steps - 1)) * multilinear.ascent_direction(gradient_N, p_N)
        return top_k_mask(logits_N, self.ground.num_selected)


def random_solver(kind, seed, *, num_samples=None):
    rng = np.random.default_rng(seed)
    num_samples = num_samples or int(rng.integers(4, 11))
    num_selected = int(rng.integers(1, num_samples // 2 + 1))
    features_ND = problems.unit_rows(num_samples, int(rng.choice([3, 6])), seed)
    quality_N, quality_weight = problems.qualities(num_samples, seed), float(rng.choice([0.0, 0.3]))
    solver = Solver(features_ND, num_selected, kind=kind, quality_weight=quality_weight, quality_N=quality_N)
    oracle = oracles.objective(kind, features_ND, quality_N, num_selected=num_selected, quality_weight=quality_weight)
    return solver, oracle
