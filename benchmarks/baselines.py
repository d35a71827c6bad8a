"""What the greedy competitors reach, and in what time.

python benchmarks/baselines.py FILE.parquet [FILE.parquet ...] [--select-ratio 0.1] [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch
from common import Evaluation, Kind, evaluate, load_dictionary

from datamask_pl.baselines.greedy import (
    greedy_disf,
    greedy_pairwise,
    lazy_greedy_facility_location,
    random_mask,
    top_quality_mask,
)
from datamask_pl.functional.budget import budget

COMPETITORS = {"facility_location": lazy_greedy_facility_location, "pairwise": greedy_pairwise, "disf": greedy_disf}
CASES: list[tuple[Kind, float]] = [
    ("facility_location", 0.0),
    ("facility_location", 0.3),
    ("pairwise", 0.05),
    ("pairwise", 0.3),
    ("disf", 0.0),
    ("disf", 0.02),
    ("disf", 0.3),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy, random and top-quality masks of one block.")
    parser.add_argument("paths", nargs="+", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--select-ratio", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    features_ND, quality_N = load_dictionary(args.paths)
    num_samples, num_features = features_ND.shape
    num_selected = budget(args.select_ratio, num_samples)
    print(f"{num_samples} samples, {num_features} features, {num_selected} selected, torch {torch.__version__}")
    print(f"{'term':<18}{'weight':>7}  {'mask':<12}{'f':>11}{'Q':>10}{'D':>12}{'seconds':>9}")
    simple = {
        "random": random_mask(num_samples, num_selected, generator=torch.Generator().manual_seed(0)),
        "top quality": top_quality_mask(quality_N, num_selected),
    }
    for kind, quality_weight in CASES:
        for name, mask_N in simple.items():
            show(kind, quality_weight, name, evaluate(features_ND, quality_N, mask_N, kind, quality_weight))
        start_s = time.perf_counter()
        mask_N = COMPETITORS[kind](features_ND, quality_N, num_selected=num_selected, quality_weight=quality_weight)
        elapsed_s = time.perf_counter() - start_s
        found = evaluate(features_ND, quality_N, mask_N, kind, quality_weight)
        show(kind, quality_weight, "greedy", found, f"{elapsed_s:9.2f}")


def show(kind: Kind, quality_weight: float, name: str, found: Evaluation, seconds: str = "") -> None:
    values = f"{found.f:11.6f}{found.quality:10.5f}{found.diversity:12.6f}"
    print(f"{kind:<18}{quality_weight:>7}  {name:<12}{values}{seconds}", flush=True)


if __name__ == "__main__":
    main()
