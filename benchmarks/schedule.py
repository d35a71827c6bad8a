"""Which learning rates, and how many steps: the share of the best known gain that a schedule misses.

python benchmarks/schedule.py [FILE.parquet ...] [--terms disf,pairwise] [--steps 8,20] [--rates 2:0.2,4:1.5]

Three data sets: rows of the files, clusters on the unit sphere, and copies with a little noise of rows of the files,
or of the clusters where no files are given. What a mask misses is 100 * (best - f) / (best - random), best being the
highest f over all schedules, polished or not. Cells are medians over ratios and quality weights, and the worst of them
in brackets. With --records FILE the measurements are kept there, and those that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from common import load_dictionary
from torch import Tensor

from datamask_pl.functional.budget import num_to_keep
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.functional.schedule import Schedule, default_schedule
from datamask_pl.learner.loop import learn
from datamask_pl.learner.options import make_method
from datamask_pl.learner.solve import draw_uniform_masks
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

Block = tuple[Tensor, Tensor]
FINISHES = ["the logits' mask", "polished"]


class Case(NamedTuple):
    """What is maximised on what."""

    data: str
    term: str
    ratio: float
    weight: float


# f by schedule, unpolished and polished
Missed = dict[Schedule, tuple[float, float]]


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


def make_blocks(paths: list[str], num_samples: int) -> dict[str, Block]:
    blocks = {"clusters": clusters(num_samples, 128)}
    if paths:
        features, quality = load_dictionary(paths)
        stride = max(1, features.shape[0] // num_samples)
        blocks = {"files": (features[::stride].contiguous(), quality[::stride].contiguous()), **blocks}
    return {**blocks, "copies": copies(next(iter(blocks.values())), num_samples // 3)}


def measure(objective: JointObjective, ground: GroundSet, schedules: list[Schedule]) -> Missed:
    """What each schedule misses, in percent."""
    scales = torch.ones(len(objective.terms), dtype=torch.float64)
    masks = [draw_uniform_masks(1, ground, seed=0)[0]]
    for schedule in schedules:

        def note(step: int, logits_N: Tensor, last: int = schedule.num_steps - 1) -> None:
            if step == last:
                masks.append(top_k_mask(logits_N, ground.num_selected))

        masks.append(
            learn(
                ground,
                objective=objective,
                scales=scales,
                method=make_method(objective, **schedule._asdict()),
                on_step=note,
            )
        )
    random, *values = objective.combine(objective.term_values(torch.stack(masks), ground), scales).tolist()
    best = max(values)
    missed = [100 * (best - value) / max(best - random, 1e-300) for value in values]
    return dict(zip(schedules, zip(missed[::2], missed[1::2], strict=True), strict=True))


def measured(args: argparse.Namespace, schedules: list[Schedule]) -> Iterator[tuple[Case, Missed]]:
    """All cases in turn."""
    for data, (features_ND, quality_N) in make_blocks(args.paths, args.samples).items():
        for term in args.terms.split(","):
            for ratio in map(float, args.ratios.split(",")):
                ground = GroundSet.of(
                    features_ND=features_ND, quality_N=quality_N, budget=num_to_keep(ratio, len(quality_N))
                )
                for weight in map(float, args.weights.split(",")):
                    case = Case(data, term, ratio, weight)
                    missed = recorded(args.records, case, schedules)
                    if missed is None:
                        missed = measure(JointObjective(quality_weight=weight, diversity=term), ground, schedules)
                        record(args.records, case, missed)
                    yield case, missed


def record(path: Path | None, case: Case, missed: Missed) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps([case, [[schedule, values] for schedule, values in missed.items()]]) + "\n")


def recorded(path: Path | None, case: Case, schedules: list[Schedule]) -> Missed | None:
    """What is in the records of a case, if it is of the same schedules."""
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        key, pairs = json.loads(line)
        found = {Schedule(*schedule): (plain, polished) for schedule, (plain, polished) in pairs}
        if Case(*key) == case and list(found) == schedules:
            return found
    return None


def table(found: dict[Case, Missed], schedules: list[Schedule], finish: int) -> list[str]:
    """A row a schedule, a column a data set and term."""
    columns = list(dict.fromkeys((case.data, case.term) for case in found))
    lines = ["| steps | rates | " + " | ".join(f"{data}, {term}" for data, term in columns) + " |"]
    lines.append("|" + "---|" * (2 + len(columns)))
    for schedule in schedules:
        cells = [str(schedule.num_steps), f"{schedule.max_lr:g} to {schedule.min_lr:g}"]
        for column in columns:
            values = [missed[schedule][finish] for case, missed in found.items() if case[:2] == column]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def beside_the_default(found: dict[Case, Missed], schedules: list[Schedule]) -> Iterator[str]:
    """How much more than the best rates the default's miss, by the default's number of steps, in single cases."""
    for term in dict.fromkeys(case.term for case in found):
        has_interactions = JointObjective(quality_weight=0.0, diversity=term).has_interactions
        for finish, name in enumerate(FINISHES):
            default = default_schedule("multilinear", is_polish_quick=has_interactions and finish == 1)
            rivals = [schedule for schedule in schedules if schedule.num_steps == default.num_steps]
            if default not in rivals:
                continue
            cases = [missed for case, missed in found.items() if case.term == term]
            excess = [m[default][finish] - min(m[rival][finish] for rival in rivals) for m in cases]
            better = [
                f"{rival.max_lr:g} to {rival.min_lr:g}"
                for rival in rivals
                if rival != default and all(m[rival][finish] <= m[default][finish] for m in cases)
            ]
            yield (
                f"- {term}, {name}: the default, {default.num_steps} steps at {default.max_lr:g} to "
                f"{default.min_lr:g}, misses {statistics.median(excess):.2f} (at worst {max(excess):.2f}) more than "
                f"the best rates of each case; never worse than it: {', '.join(better) or 'none'}"
            )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--terms", default="pairwise,disf,facility_location")
    parser.add_argument("--ratios", default="0.01,0.1,0.5")
    parser.add_argument("--weights", default="0,0.3", help="quality weights")
    parser.add_argument("--steps", default="4,8,20")
    parser.add_argument("--rates", default="2:0.2,4:1.5,4:4,8:2.5", help="first:last")
    parser.add_argument("--samples", type=int, default=6000, help="of each data set, about")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--records", type=Path, help="file for what is measured, and from which it is not made again")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = [tuple(map(float, pair.split(":"))) for pair in args.rates.split(",")]
    schedules = [Schedule(int(steps), first, last) for steps in args.steps.split(",") for first, last in rates]
    start_s, found = time.perf_counter(), {}
    for case, missed in measured(args, schedules):
        found[case] = missed
        print(f"{' '.join(map(str, case))}: {time.perf_counter() - start_s:.0f} s", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, {args.threads} threads")
    for finish, name in enumerate(FINISHES):
        print(f"\n**{name}**\n")
        print("\n".join(table(found, schedules, finish)))
    print()
    print("\n".join(beside_the_default(found, schedules)))


if __name__ == "__main__":
    main()
