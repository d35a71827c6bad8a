"""Ours beside greedy: f, seconds, and their ratio in one run.

python benchmarks/greedy.py FILE.parquet [FILE.parquet ...] [--select-ratio 0.1] [--threads 2] [--repeats 3]

f is raw (not calibrated), and found by code that shares nothing with the package. Both sides start from unit float32
features in memory, and both times include similarities or neighbour lists. Seconds are medians.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from common import Kind, evaluate, load_dictionary
from torch import Tensor

from datamask_pl.baselines.greedy import (
    greedy_disf,
    greedy_pairwise,
    lazy_greedy_facility_location,
    random_mask,
    top_quality_mask,
)
from datamask_pl.evidence.relearned import relearn
from datamask_pl.functional.budget import budget
from datamask_pl.functional.schedule import default_schedule
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

GREEDY = {"facility_location": lazy_greedy_facility_location, "pairwise": greedy_pairwise, "disf": greedy_disf}
CASES: list[tuple[Kind, float]] = [
    ("facility_location", 0.0),
    ("facility_location", 0.3),
    ("pairwise", 0.05),
    ("pairwise", 0.3),
    ("disf", 0.0),
    ("disf", 0.02),
    ("disf", 0.3),
]


def multilinear(
    features_ND: Tensor, quality_N: Tensor, *, kind: Kind, num_selected: int, quality_weight: float, is_polished: bool
) -> Tensor:
    """The default estimator at its default settings, as bare functions: bool (N,)."""
    ground = GroundSet(features_ND=features_ND, quality_N=quality_N, num_selected=num_selected)
    objective = JointObjective(quality_weight=quality_weight, diversity=kind)
    schedule = default_schedule("multilinear", is_polish_quick=is_polished and objective.has_interactions)
    return relearn(
        ground,
        objective=objective,
        scales=torch.ones(len(objective.terms), dtype=torch.float64),
        num_steps=schedule.num_steps,
        max_lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        init="same",
        is_polished=is_polished,
    )


def timed(make: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        mask_N = make()
        seconds.append(time.perf_counter() - start_s)
    return mask_N, statistics.median(seconds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Ours beside greedy, random and top-quality masks of one block.")
    parser.add_argument("paths", nargs="+", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--select-ratio", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    features_ND, quality_N = load_dictionary(args.paths)
    num_samples, num_features = features_ND.shape
    num_selected = budget(args.select_ratio, num_samples)
    print(f"{num_samples} samples, {num_features} features, {num_selected} selected, {args.threads} threads")
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, numpy {version('numpy')}\n")
    print(f"{'term':<18}{'weight':>7}  {'mask':<18}{'f':>11}{'Q':>10}{'D':>12}{'seconds':>9}{'greedy/ours':>13}")
    for kind, weight in CASES:

        def ours(is_polished: bool, kind: Kind = kind, weight: float = weight) -> Tensor:
            return multilinear(
                features_ND,
                quality_N,
                kind=kind,
                num_selected=num_selected,
                quality_weight=weight,
                is_polished=is_polished,
            )

        def greedy(kind: Kind = kind, weight: float = weight) -> Tensor:
            return GREEDY[kind](features_ND, quality_N, num_selected=num_selected, quality_weight=weight)

        makers: dict[str, Callable[[], Tensor]] = {
            "random": lambda: random_mask(num_samples, num_selected, generator=torch.Generator().manual_seed(0)),
            "top quality": lambda: top_quality_mask(quality_N, num_selected),
            "greedy": greedy,
            "ours, unpolished": lambda: ours(False),
            "ours": lambda: ours(True),
        }
        greedy_seconds = float("nan")
        for name, make in makers.items():
            mask_N, seconds = timed(make, args.repeats)
            found = evaluate(features_ND, quality_N, mask_N, kind, weight)
            greedy_seconds = seconds if name == "greedy" else greedy_seconds
            ratio = f"{greedy_seconds / seconds:12.1f}x" if name.startswith("ours") else ""
            values = f"{found.f:11.6f}{found.quality:10.5f}{found.diversity:12.6f}{seconds:9.2f}"
            print(f"{kind:<18}{weight:>7}  {name:<18}{values}{ratio}", flush=True)


if __name__ == "__main__":
    main()
