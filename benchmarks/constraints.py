"""Limits that `fit` knows beside the same limits put on its logits afterwards.

python benchmarks/constraints.py FILE.parquet [FILE.parquet ...] [--select-ratio 0.1] [--quality-weight 0.3] [--kinds]

Tokens are lognormal and go with nothing. Groups are quarters of the samples by quality, from the worst, whose quotas
are 16, 12, 8 and 4 % where 10 % are kept. The ids kept in any case are those of the first 2 % of the rows. f is raw,
and found by code that shares nothing with the package; with tokens it is of a mask of any size.
"""

from __future__ import annotations

import argparse
import platform
import time
from importlib.metadata import version

import numpy as np
import torch
from common import evaluate, load_dictionary

from datamask_pl.functional.budget import BudgetSpec, num_to_keep
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.schedule import default_schedule, linear_rate
from datamask_pl.learner.solve import round_logits
from datamask_pl.learner.step import multilinear_update
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

KINDS = ("facility_location", "pairwise", "disf")
NAMES = ("worst", "below", "above", "best")


def make_holdings(quality_N: torch.Tensor) -> dict[str, Holdings]:
    num_samples = len(quality_N)
    tokens_N = np.random.default_rng(0).lognormal(6.0, 1.0, size=num_samples).round().clip(1)
    group_N = (quality_N.double() * 4).floor().clamp(max=3).long()
    forced_N = torch.zeros(num_samples, dtype=torch.int8)
    forced_N[: num_samples // 50] = 1
    return {
        "tokens": Holdings.of(num_samples, cost_N=torch.from_numpy(tokens_N)),
        "quotas": Holdings.of(num_samples, group_N=group_N, names=NAMES),
        "ids": Holdings.of(num_samples, forced_N=forced_N),
    }


def learn(objective: JointObjective, ground: GroundSet, scales: torch.Tensor) -> torch.Tensor:
    num_steps, max_lr, min_lr = default_schedule("multilinear", is_polish_quick=objective.has_interactions)
    logits_N = torch.zeros(ground.num_samples)
    for step in range(num_steps):
        update = multilinear_update(logits_N, objective=objective, ground=ground, scales=scales)
        logits_N += linear_rate(step, num_steps, max_lr=max_lr, min_lr=min_lr) * update.direction_M.float()
    return logits_N


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Limits within fit beside limits put on afterwards.")
    parser.add_argument("paths", nargs="+", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--select-ratio", type=float, default=0.1)
    parser.add_argument("--quality-weight", type=float, default=0.3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--every", type=int, default=1, help="take every n-th row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    features_ND, quality_N = load_dictionary(args.paths)
    features_ND, quality_N = features_ND[:: args.every].contiguous(), quality_N[:: args.every]
    num_samples, weight = len(features_ND), args.quality_weight
    ratios = dict(zip(NAMES, (factor * args.select_ratio for factor in (1.6, 1.2, 0.8, 0.4)), strict=True))
    print(f"{num_samples} samples, quality_weight {weight}, select_ratio {args.select_ratio}, {args.threads} threads")
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, numpy {version('numpy')}\n")
    print(
        f"{'term':<18}{'limit':<8}  {'mask':<24}{'f':>11}{'Q':>10}{'D':>12}{'kept':>8}{'budget used':>13}{'seconds':>9}"
    )
    scales = torch.ones(2, dtype=torch.float64)
    for kind in args.kinds:
        objective = JointObjective(quality_weight=weight, diversity=kind)
        num_selected = num_to_keep(args.select_ratio, num_samples)
        plain = GroundSet.of(features_ND=features_ND, quality_N=quality_N, budget=num_selected)
        plain_logits_N = learn(objective, plain, scales)
        for limit, holdings in make_holdings(quality_N).items():
            constraint = Constrained(
                holdings, BudgetSpec(args.select_ratio, ratios if limit == "quotas" else "proportional")
            )
            ground = GroundSet.of(
                features_ND=features_ND,
                quality_N=quality_N,
                budget=constraint,
            )
            objective.prepare(ground, num_masks=num_samples)
            start_s = time.perf_counter()
            logits_N = learn(objective, ground, scales)
            options = {"objective": objective, "ground": ground, "scales": scales, "best_rollout_N": None}
            masks = {
                "export": constraint.fill(plain_logits_N),
                "fit, unpolished": constraint.fill(logits_N),
                "fit": round_logits(logits_N, is_polished=True, **options),
            }
            seconds = time.perf_counter() - start_s
            for name, mask_N in masks.items():
                assert constraint.allows(mask_N)
                found = evaluate(features_ND, quality_N, mask_N, kind, weight)
                used = 1 - float(constraint.room_left(mask_N).sum()) / sum(constraint.budgets)
                values = (
                    f"{found.f:11.6f}{found.quality:10.5f}{found.diversity:12.6f}{int(mask_N.sum()):8d}{used:13.6f}"
                )
                print(
                    f"{kind:<18}{limit:<8}  {name:<24}{values}{seconds if name == 'fit' else float('nan'):9.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
