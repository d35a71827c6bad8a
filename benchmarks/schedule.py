"""Which learning rates, and how many steps: the share of the best known gain that a schedule misses.

python benchmarks/schedule.py [FILE.parquet ...] [--terms disf,pairwise] [--steps 8,20] [--rates 2:0.2,4:1.5]

Three data sets: rows of the files, clusters on the unit sphere, and copies with a little noise of rows of the files,
or of the clusters where no files are given. A number is 100 * (best - f) / (best - random), best being the highest f of
the case over all schedules, polished ones too where exchanges are quick. Below are medians over the cases, first of the
masks as the logits give them, then polished.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from common import load_dictionary
from torch import Tensor

from datamask_pl.block_solution import draw_uniform_masks, round_logits
from datamask_pl.estimation import multilinear_update
from datamask_pl.functional.budget import budget
from datamask_pl.functional.rounding import top_k_mask
from datamask_pl.functional.schedule import linear_rate
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

Block = tuple[Tensor, Tensor]


def clusters(num_samples: int, num_features: int) -> Block:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(500, num_features, generator=generator)
    rows = torch.randint(500, (num_samples,), generator=generator)
    features = centers[rows] + torch.randn(num_samples, num_features, generator=generator)
    return torch.nn.functional.normalize(features), torch.rand(num_samples, generator=generator)


def copies(block: Block, num_rows: int) -> Block:
    generator = torch.Generator().manual_seed(1)
    features = block[0][:num_rows].repeat(3, 1)
    noise = torch.randn(features.shape, generator=generator)
    features = torch.nn.functional.normalize(features + 0.01 * noise / features.shape[1] ** 0.5)
    return features, block[1][:num_rows].repeat(3)


def ascend(objective: JointObjective, ground: GroundSet, num_steps: int, rates: tuple[float, float]) -> Tensor:
    logits_N = torch.zeros(ground.num_samples)
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    for step in range(num_steps):
        update = multilinear_update(logits_N, objective=objective, ground=ground, scales=scales)
        logits_N += linear_rate(step, num_steps, max_lr=rates[0], min_lr=rates[1]) * update.direction_M.float()
    return logits_N


def measure(
    objective: JointObjective, ground: GroundSet, schedules: list[tuple[int, tuple[float, float]]]
) -> tuple[list[float], list[float]]:
    """What each schedule misses, in percent: as the logits give the mask, and polished (empty where that is slow)."""
    scales = torch.ones(len(objective.terms), dtype=torch.float64)

    def f(mask_N: Tensor) -> float:
        return float(objective.combine(objective.term_values(mask_N[None], ground), scales)[0])

    plain, polished = [], []
    for num_steps, rates in schedules:
        logits_N = ascend(objective, ground, num_steps, rates)
        plain.append(f(top_k_mask(logits_N, ground.num_selected)))
        if objective.has_interactions:
            mask_N = round_logits(
                logits_N, objective=objective, ground=ground, scales=scales, is_polished=True, best_rollout_N=None
            )
            polished.append(f(mask_N))
    random = f(draw_uniform_masks(1, ground, seed=0)[0])
    best = max(plain + polished)
    gap = max(best - random, 1e-300)
    return [100 * (best - value) / gap for value in plain], [100 * (best - value) / gap for value in polished]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Ablation of the schedule of the multilinear estimator.")
    parser.add_argument("paths", nargs="*", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--terms", default="pairwise,disf,facility_location")
    parser.add_argument("--ratios", default="0.01,0.1,0.5")
    parser.add_argument("--weights", default="0,0.3", help="quality weights")
    parser.add_argument("--steps", default="8,20")
    parser.add_argument("--rates", default="2:0.2,4:4,4:1.5,8:2.5", help="first:last")
    parser.add_argument("--samples", type=int, default=8000, help="of each data set, about")
    args = parser.parse_args()

    blocks = {"clusters": clusters(args.samples, 128)}
    if args.paths:
        features, quality = load_dictionary(args.paths)
        stride = max(1, features.shape[0] // args.samples)
        blocks = {"files": (features[::stride].contiguous(), quality[::stride].contiguous()), **blocks}
    blocks["copies"] = copies(next(iter(blocks.values())), args.samples // 3)
    rates = [tuple(map(float, pair.split(":"))) for pair in args.rates.split(",")]
    schedules = [(int(steps), (first, last)) for steps in args.steps.split(",") for first, last in rates]

    heads = [f"{steps} x {first:g} to {last:g}" for steps, (first, last) in schedules]
    print("| data | term | ratio | weight | " + " | ".join(heads) + " |\n|" + "---|" * (4 + len(heads)))
    columns: dict[str, list[list[float]]] = defaultdict(list)
    for name, (features, quality) in blocks.items():
        for term in args.terms.split(","):
            for ratio in map(float, args.ratios.split(",")):
                num_selected = budget(ratio, features.shape[0])
                ground = GroundSet(features_ND=features, quality_N=quality, num_selected=num_selected)
                for weight in map(float, args.weights.split(",")):
                    objective = JointObjective(quality_weight=weight, diversity=term)
                    plain, polished = measure(objective, ground, schedules)
                    cells = [name, term, f"{ratio:g}", f"{weight:g}"]
                    print("| " + " | ".join(cells + [f"{missed:.3f}" for missed in plain]) + " |", flush=True)
                    columns["plain"].append(plain)
                    columns["polished"] += [polished] if polished else []
    for kind, rows in columns.items():
        medians = [f"{statistics.median(column):.3f}" for column in zip(*rows, strict=True)]
        print("| " + " | ".join(["median", kind, "", "", *medians]) + " |")


if __name__ == "__main__":
    main()
