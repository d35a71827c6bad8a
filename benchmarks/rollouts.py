"""Rollouts: what draws cost, how noisy gradients are, and how soon what the paper's settings reach is reached.

python benchmarks/rollouts.py dictionary-*.parquet [--seconds 300] [--terms pairwise disf] [--parts time]

Three tables. Seconds are of the processor, on one thread, so that other work on the machine changes them little. f is
raw, of the largest tenth of the logits, by code that shares nothing with the package, and finding it is not counted.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from common import Kind, evaluate, load_dictionary
from torch import Tensor

from datamask_pl import estimation
from datamask_pl.distributed import RankGroup
from datamask_pl.estimation import rollout_update
from datamask_pl.functional.plackett_luce import draw_group
from datamask_pl.functional.rounding import top_k_mask
from datamask_pl.functional.schedule import linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.ground_set import GroundSet
from datamask_pl.joint_objective import JointObjective

NUM_ROLLOUTS, PARTIAL, RATIO = 128, 0.1, 0.1
QUALITY_WEIGHT: dict[Kind, float] = {"facility_location": 0.0, "pairwise": 0.05, "disf": 0.0}
RAW = torch.ones(2, dtype=torch.float64)


@dataclass(frozen=True)
class Settings:
    """How a run is made."""

    name: str
    estimator: estimation.RolloutEstimator
    control_variate: bool
    num_steps: int
    max_lr: float
    min_lr: float


PAPER = Settings("paper", "group_relative", False, 5000, 10.0, 1.0)


@dataclass(frozen=True)
class Block:
    features_ND: Tensor
    quality_N: Tensor
    kind: Kind

    def objective(self) -> JointObjective:
        return JointObjective(quality_weight=QUALITY_WEIGHT[self.kind], diversity=self.kind)

    def part(self, rows_M: Tensor) -> GroundSet:
        num_selected = round(RATIO * rows_M.numel())
        return GroundSet(
            features_ND=self.features_ND[rows_M], quality_N=self.quality_N[rows_M], num_selected=num_selected
        )

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


def unscaled(gradient_N: Tensor) -> Tensor:
    return gradient_N


def unshrunk(estimate_N: Tensor, squared_noise: Tensor) -> Tensor:
    return torch.ones_like(squared_noise)


def primal(logits_N: Tensor, linear_N: Tensor, rest_N: Tensor, *, num_selected: int) -> Tensor:
    return linear_N + rest_N


def variances(block: Block, repeats: int) -> None:
    """Variance of the gradient, neither shrunk nor scaled, over all samples, with equal logits and after some steps."""
    normalized, shrinkage, dual_direction = estimation.normalized, estimation.shrinkage, estimation.dual_direction
    estimation.normalized, estimation.shrinkage, estimation.dual_direction = unscaled, unshrunk, primal
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
    estimation.normalized, estimation.shrinkage, estimation.dual_direction = normalized, shrinkage, dual_direction


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
    objective, num_rows = block.objective(), round(PARTIAL * logits_N.numel())
    spent_s = 0.0
    for step in range(settings.num_steps):
        start_s = time.process_time()
        seed = derive_seed(2, step)
        rows_M = torch.randperm(logits_N.numel(), generator=torch.Generator().manual_seed(seed))[:num_rows]
        update = rollout_update(
            logits_N[rows_M],
            objective=objective,
            ground=block.part(rows_M),
            scales=RAW,
            estimator=settings.estimator,
            control_variate=settings.control_variate,
            num_rollouts=NUM_ROLLOUTS,
            seed_of=lambda rollout, step=step: derive_seed(3, step, rollout),  # type: ignore[misc]
            ranks=RankGroup(),
            step_name=f"step {step}",
        )
        rate = linear_rate(step, settings.num_steps, max_lr=settings.max_lr, min_lr=settings.min_lr)
        logits_N[rows_M] += (rate * update.direction_M).float()
        spent_s += time.process_time() - start_s
        yield spent_s, logits_N


def time_to_f(block: Block, ours: Settings, *, limit_s: float) -> None:
    """What the paper's settings reach within the limit, and when ours get there; f is looked at 20 times a run."""
    best, best_s, best_step, due_s = -float("inf"), 0.0, 0, 0.0
    for step, (spent_s, logits_N) in enumerate(ascend(block, PAPER), start=1):
        if spent_s < due_s and spent_s < limit_s and step < PAPER.num_steps:
            continue
        due_s += limit_s / 20
        f = block.f(logits_N)
        if f > best:
            best, best_s, best_step = f, spent_s, step
        if spent_s >= limit_s:
            break
    reached_s, reached_step, final, spent_s = float("nan"), 0, float("nan"), 0.0
    for step, (spent_s, logits_N) in enumerate(ascend(block, ours), start=1):
        if step < ours.num_steps and (reached_step or step % 5):
            continue
        final = block.f(logits_N)
        if not reached_step and final >= best:
            reached_s, reached_step = spent_s, step
    cells = [f"{best:.6f}", f"{best_s:.1f}", best_step, f"{reached_s:.1f}", reached_step]
    row(block.kind, *cells, f"{best_s / reached_s:.1f}", f"{final:.6f}", f"{spent_s:.1f}", ours.num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws, noise, and time to f of the rollout estimators.")
    parser.add_argument("paths", nargs="+", help="parquet files with feature_arr and quality_score, one block")
    parser.add_argument("--terms", nargs="+", choices=list(QUALITY_WEIGHT), default=list(QUALITY_WEIGHT))
    parser.add_argument("--seconds", type=float, default=300.0, help="what the paper's settings get, a term")
    parser.add_argument("--steps", type=int, default=300, help="of ours")
    parser.add_argument("--max-lr", type=float, default=2.0, help="of ours, falling to a tenth")
    parser.add_argument("--repeats", type=int, default=10)
    parts = ["sampling", "variance", "time"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, 1 thread\n")
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
        heads = ["term", "paper's best f", "after s", "steps", "ours reach it after s", "steps", "times faster"]
        head(*heads, "ours at the end", "after s", "steps")
        ours = Settings("ours", "leave_one_out", True, args.steps, args.max_lr, args.max_lr / 10)
        for block in blocks:
            time_to_f(block, ours, limit_s=args.seconds)


if __name__ == "__main__":
    main()
