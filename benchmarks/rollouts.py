"""Rollouts: what draws cost, how noisy gradients are, and how soon what the paper's settings reach is reached.

python benchmarks/rollouts.py dictionary-*.parquet [--seconds 300] [--terms disf] [--parts time] [--json FOLDER]

Three tables. Seconds of draws are of the processor, those to an f of the clock, everything included that a fit would
do: lists of neighbours, too. f is raw, of the largest tenth of the logits, by code that shares nothing with the
package, and finding it is not counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from common import Kind, evaluate, load_dictionary
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.functional.rollouts.advantages import normalized
from datamask_pl.functional.rollouts.plackett_luce import draw_group
from datamask_pl.functional.schedule import default_schedule, linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner import step as step_module
from datamask_pl.learner.solve import round_logits
from datamask_pl.learner.step import multilinear_update, rollout_update
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

NUM_ROLLOUTS, PARTIAL, RATIO = 128, 0.1, 0.1
QUALITY_WEIGHT: dict[Kind, float] = {"facility_location": 0.0, "pairwise": 0.05, "disf": 0.0}
RAW = torch.ones(2, dtype=torch.float64)


@dataclass(frozen=True)
class Settings:
    """How a run is made."""

    name: str
    estimator: step_module.RolloutEstimator
    control_variate: bool
    partial: float
    num_rollouts: int
    num_steps: int
    max_lr: float
    min_lr: float


PAPER = Settings("paper", "group_relative", False, PARTIAL, NUM_ROLLOUTS, 5000, 10.0, 1.0)


class Point(NamedTuple):
    """Where a run was."""

    step: int
    seconds: float
    f: float
    logits_N: Tensor


@dataclass(frozen=True)
class Block:
    features_ND: Tensor
    quality_N: Tensor
    kind: Kind

    def objective(self) -> JointObjective:
        return JointObjective(quality_weight=QUALITY_WEIGHT[self.kind], diversity=self.kind)

    def part(self, rows_M: Tensor) -> GroundSet:
        num_selected = round(RATIO * rows_M.numel())
        return GroundSet.of(features_ND=self.features_ND[rows_M], quality_N=self.quality_N[rows_M], budget=num_selected)

    def f(self, logits_N: Tensor) -> float:
        mask_N = top_k_mask(logits_N, round(RATIO * logits_N.numel()))
        return evaluate(self.features_ND, self.quality_N, mask_N, self.kind, QUALITY_WEIGHT[self.kind]).f


def seconds_of(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    print("|" + "---|" * len(cells))


def draw_all_keys(logits_N: Tensor, num_selected: int, seed: int) -> Tensor:
    noise_N = torch.rand(logits_N.shape, generator=torch.Generator().manual_seed(seed))
    return (logits_N - (-noise_N.log()).log()).topk(num_selected).indices


def sampling(repeats: int) -> None:
    """Seconds for the draws of a step."""
    head("samples", "drawn", "logits", "float32 Gumbel keys and topk, s", "ours, s")
    seeds = range(NUM_ROLLOUTS)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for num_samples, k in ((2_399, 240), (100_000, 10_000)):
        for name, scale in (("equal", 0.0), ("normal, deviation 2", 2.0)):
            logits_N = scale * torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
            keys = partial(lambda logits_N, k: [draw_all_keys(logits_N, k, seed) for seed in seeds], logits_N, k)
            ours = partial(draw_group, logits_N, k, generators=generators)
            cells = [f"{min(seconds_of(draw) for _ in range(repeats)):.3f}" for draw in (keys, ours)]
            row(f"{num_samples:,}", f"{k:,}", name, *cells)


def unshrunk(estimate_N: Tensor, squared_noise: Tensor) -> Tensor:
    return torch.ones_like(squared_noise)


def primal(budget: FixedSize, *_: Tensor, linear_N: Tensor, rest_N: Tensor) -> Tensor:
    return linear_N + rest_N


def variances(block: Block, repeats: int) -> None:
    """Variance of the gradient, neither shrunk nor scaled, over all samples, with equal logits and after some steps."""
    shrinkage, controlled_direction = step_module.shrinkage, FixedSize.controlled_direction
    step_module.shrinkage, FixedSize.controlled_direction = unshrunk, primal
    rows_M = torch.randperm(len(block.quality_N), generator=torch.Generator().manual_seed(0))
    rows_M = rows_M[: round(PARTIAL * rows_M.numel())]
    ground, objective = block.part(rows_M), block.objective()
    logits_M = torch.zeros(rows_M.numel())
    for num_steps in (0, 20):
        for step in range(num_steps):
            logits_M += normalized(gradient(logits_M, objective, ground, step, control_variate=True)).float()
        found = {}
        for is_controlled in (False, True):
            gradients = [
                gradient(logits_M, objective, ground, 10**6 + step, control_variate=is_controlled)
                for step in range(repeats)
            ]
            gradient_RM = torch.stack(gradients)
            variance = gradient_RM.var(0).sum()
            signal = gradient_RM.mean(0).square().sum() - variance / repeats
            found[is_controlled] = variance, signal
        (plain, _), (controlled, signal) = found[False], found[True]
        cells = [f"{plain / controlled:.1f}", f"{signal / plain:.3f}", f"{signal / controlled:.3f}"]
        row(block.kind, f"{rows_M.numel():,}", num_steps, *cells)
    step_module.shrinkage, FixedSize.controlled_direction = shrinkage, controlled_direction


def gradient(
    logits_M: Tensor, objective: JointObjective, ground: GroundSet, step: int, *, control_variate: bool
) -> Tensor:
    return rollout_update(
        logits_M,
        objective=objective,
        ground=ground,
        scales=RAW,
        estimator="leave_one_out",
        control_variate=control_variate,
        num_rollouts=NUM_ROLLOUTS,
        seed_of=lambda rollout: derive_seed(1, 0, step, rollout),
        ranks=RankGroup(),
        step_name=f"step {step}",
    ).direction_M


def ascend(block: Block, settings: Settings) -> Iterator[tuple[float, Tensor]]:
    """Seconds so far and logits after every step."""
    logits_N = torch.zeros(len(block.quality_N))
    objective, num_rows = block.objective(), round(settings.partial * logits_N.numel())
    start_s = time.perf_counter()
    whole = block.part(torch.arange(logits_N.numel())) if num_rows == logits_N.numel() else None
    spent_s = time.perf_counter() - start_s
    for step in range(settings.num_steps):
        start_s = time.perf_counter()
        rows_M = torch.arange(num_rows)
        if whole is None:
            generator = torch.Generator().manual_seed(derive_seed(2, step))
            rows_M = torch.randperm(logits_N.numel(), generator=generator)[:num_rows].sort().values
        update = rollout_update(
            logits_N[rows_M],
            objective=objective,
            ground=whole or block.part(rows_M),
            scales=RAW,
            estimator=settings.estimator,
            control_variate=settings.control_variate,
            num_rollouts=settings.num_rollouts,
            seed_of=lambda rollout, step=step: derive_seed(3, step, rollout),  # type: ignore[misc]
            ranks=RankGroup(),
            step_name=f"step {step}",
        )
        rate = linear_rate(step, settings.num_steps, max_lr=settings.max_lr, min_lr=settings.min_lr)
        logits_N[rows_M] += (rate * update.direction_M).float()
        spent_s += time.perf_counter() - start_s
        yield spent_s, logits_N


def ascend_exactly(block: Block, num_steps: int) -> Iterator[tuple[float, Tensor]]:
    """The same of `multilinear`."""
    logits_N, objective = torch.zeros(len(block.quality_N)), block.objective()
    start_s = time.perf_counter()
    ground = block.part(torch.arange(logits_N.numel()))
    spent_s = time.perf_counter() - start_s
    _, max_lr, min_lr = default_schedule("multilinear", is_polish_quick=False)
    for step in range(num_steps):
        start_s = time.perf_counter()
        update = multilinear_update(logits_N, objective=objective, ground=ground, scales=RAW)
        logits_N += linear_rate(step, num_steps, max_lr=max_lr, min_lr=min_lr) * update.direction_M.float()
        spent_s += time.perf_counter() - start_s
        yield spent_s, logits_N


def curve_of(block: Block, ascent: Iterator[tuple[float, Tensor]], *, every_s: float, limit_s: float) -> list[Point]:
    """Points after the first step, and then whenever `every_s` have gone by."""
    points, due_s = [], 0.0
    for step, (spent_s, logits_N) in enumerate(ascent, start=1):
        if spent_s >= due_s or spent_s >= limit_s:
            points.append(Point(step, spent_s, block.f(logits_N), logits_N.clone()))
            due_s = spent_s + every_s
        if spent_s >= limit_s:
            break
    return points


def polished_f(block: Block, logits_N: Tensor) -> float:
    ground = block.part(torch.arange(logits_N.numel()))
    options = {"objective": block.objective(), "ground": ground, "scales": RAW}
    mask_N = round_logits(logits_N, **options, is_polished=True, best_rollout_N=None)
    return evaluate(block.features_ND, block.quality_N, mask_N, block.kind, QUALITY_WEIGHT[block.kind]).f


def time_to_f(block: Block, ours: Settings, *, limit_s: float, folder: Path | None) -> None:
    """What the paper's settings reach within the limit, and when ours and `multilinear` get there."""
    curves = {
        "paper": curve_of(block, ascend(block, PAPER), every_s=limit_s / 50, limit_s=limit_s),
        "rollouts": curve_of(block, ascend(block, ours), every_s=0.0, limit_s=limit_s),
        "multilinear": curve_of(block, ascend_exactly(block, ours.num_steps), every_s=0.0, limit_s=limit_s),
    }
    best = max(curves["paper"], key=lambda point: point.f)
    cells: list[object] = [f"{best.f:.6f}", f"{best.seconds:.1f}", best.step]
    for name in ("rollouts", "multilinear"):
        reached = next((point for point in curves[name] if point.f >= best.f), None)
        cells += [f"{reached.seconds:.2f}", f"{best.seconds / reached.seconds:.0f}"] if reached else ["never", "-"]
        cells.append(f"{curves[name][-1].f:.6f}")
    row(block.kind, *cells)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        found = {name: [point[:3] for point in points] for name, points in curves.items()}
        about = {"best": best[:3], "best, polished": polished_f(block, best.logits_N), "step, seconds, f": found}
        (folder / f"{block.kind}.json").write_text(json.dumps(about))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws, noise, and time to f of the rollout estimators.")
    parser.add_argument("paths", nargs="+", help="parquet files with feature_arr and quality_score, one block")
    parser.add_argument("--terms", nargs="+", choices=list(QUALITY_WEIGHT), default=list(QUALITY_WEIGHT))
    parser.add_argument("--seconds", type=float, default=300.0, help="what the paper's settings get, a term")
    parser.add_argument("--steps", type=int, default=20, help="of ours")
    parser.add_argument("--rollouts", type=int, default=16, help="of ours, a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="folder for the curves of `time`, a file a term")
    parser.add_argument("--repeats", type=int, default=10)
    parts = ["sampling", "variance", "time"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, {args.threads} threads\n")
    features_ND, quality_N = load_dictionary(args.paths)
    blocks = [Block(features_ND, quality_N, cast(Kind, kind)) for kind in args.terms]
    if "sampling" in args.parts:
        sampling(args.repeats)
    if "variance" in args.parts:
        print()
        head("term", "samples", "steps before", "variance, plain / ours", "signal / variance, plain", "ours")
        for block in blocks:
            variances(block, args.repeats)
    if "time" in args.parts:
        print()
        whats = ("s to that f", "times faster", "f at the end")
        heads = [f"{name}: {what}" for name in ("rollouts", "multilinear") for what in whats]
        head("term", "paper's best f", "after s", "steps", *heads)
        _, max_lr, min_lr = default_schedule("leave_one_out", is_polish_quick=False, has_control_variate=True)
        ours = Settings("ours", "leave_one_out", True, 1.0, args.rollouts, args.steps, max_lr, min_lr)
        for block in blocks:
            time_to_f(block, ours, limit_s=args.seconds, folder=args.json)


if __name__ == "__main__":
    main()
