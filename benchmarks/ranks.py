"""What it costs to share a step among processes: R ranks of one thread beside one rank of R threads, and bytes moved.

python benchmarks/ranks.py [--ranks 2] [--repeats 5]

Data are synthetic: clusters on the unit sphere. Both sides do the same steps and end with the same logits, which is
checked. Seconds are medians of a step, after one that warms up and builds what is kept for the block.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner.step import multilinear_update, rollout_update
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

NUM_ROLLOUTS = 128


@dataclass(frozen=True)
class Case:
    estimator: str
    diversity: str
    num_samples: int
    num_features: int
    control_variate: bool = False


CASES = [
    Case("multilinear", "pairwise", 1_000_000, 64),
    Case("multilinear", "disf", 1_000_000, 64),
    Case("multilinear", "facility_location", 50_000, 64),
    Case("group_relative", "pairwise", 10_000, 384),
    Case("group_relative", "disf", 2_400, 384),
    Case("group_relative", "facility_location", 2_400, 384),
    Case("group_relative", "facility_location", 10_000, 384),
    Case("leave_one_out", "pairwise", 2_400, 384, control_variate=True),
    Case("leave_one_out", "disf", 2_400, 384, control_variate=True),
    Case("leave_one_out", "facility_location", 2_400, 384, control_variate=True),
]


class CountingGroup(RankGroup):
    """Counts the bytes that a rank hands to the others."""

    num_bytes = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        CountingGroup.num_bytes += tensor.numel() * tensor.element_size()
        return super().sum_(tensor)

    def complete_(self, tensor: Tensor, rows_of: list[range]) -> Tensor:
        CountingGroup.num_bytes += len(rows_of[self.rank]) * tensor[0].numel() * tensor.element_size()
        return super().complete_(tensor, rows_of)


def clustered(num_samples: int, num_features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(500, num_features, generator=generator)
    rows = torch.randint(500, (num_samples,), generator=generator)
    noise = torch.randn(num_samples, num_features, generator=generator)
    return torch.nn.functional.normalize(centers[rows] + noise)


@torch.no_grad()
def measure(case: Case, ranks: RankGroup, repeats: int) -> tuple[float, int, Tensor]:
    is_whole = case.estimator == "multilinear"
    features = clustered(case.num_samples, case.num_features)
    quality = torch.rand(case.num_samples, generator=torch.Generator().manual_seed(1))
    objective = JointObjective(quality_weight=0.3, diversity=case.diversity)
    scales = torch.ones(2, dtype=torch.float64)
    logits = torch.zeros(case.num_samples)
    seconds = []
    ground: Any = None
    for step in range(repeats + 1):
        if ranks.size > 1:
            dist.barrier()
        start_s = time.perf_counter()
        if ground is None or not is_whole:
            ground = GroundSet.of(
                features_ND=features,
                quality_N=quality,
                budget=case.num_samples // 10,
                ranks=ranks if is_whole else None,
                helpers=None if is_whole else ranks,
            )
        CountingGroup.num_bytes = 0
        if is_whole:
            update = multilinear_update(
                logits, objective=objective, ground=ground, scales=scales, step_name=f"step {step}"
            )
        else:
            update = rollout_update(
                logits,
                objective=objective,
                ground=ground,
                scales=scales,
                estimator=case.estimator,  # type: ignore[arg-type]
                num_rollouts=NUM_ROLLOUTS,
                control_variate=case.control_variate,
                seed_of=lambda rollout, step=step: derive_seed(0, 0, step, rollout),
                ranks=ranks,
                step_name=f"step {step}",
            )
        logits += update.direction_M.float()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:]), CountingGroup.num_bytes, logits


def work(rank: int, cases: list[Case], size: int, threads: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(threads)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for index, case in enumerate(cases):
        result = measure(case, CountingGroup(rank, size), repeats)
        if rank == 0:
            torch.save(result, f"{folder}/{index}.pt")


def run(cases: list[Case], size: int, threads: int, repeats: int) -> list[tuple[float, int, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(cases, size, threads, repeats, folder), nprocs=size)
        return [torch.load(Path(folder) / f"{index}.pt") for index in range(len(cases))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of sharing a step among ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each case's samples")
    args = parser.parse_args()
    cases = [replace(case, num_samples=max(100, int(case.num_samples * args.scale))) for case in CASES]
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, {args.ranks} cores\n")
    alone = run(cases, 1, args.ranks, args.repeats)
    together = run(cases, args.ranks, 1, args.repeats)
    one_thread = run(cases, 1, 1, args.repeats)
    heads = ["estimator", "diversity", "samples", "features", f"1 rank x {args.ranks} threads, s"]
    heads += [f"{args.ranks} ranks x 1 thread, s", "ratio", "MB moved a step", "bits of 1 rank x 1 thread"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for case, (alone_s, _, _), (together_s, num_bytes, logits), (_, _, reference) in zip(
        cases, alone, together, one_thread, strict=True
    ):
        name = case.estimator + (" with control variate" if case.control_variate else "")
        cells = [name, case.diversity, f"{case.num_samples:,}", str(case.num_features)]
        cells += [f"{alone_s:.3f}", f"{together_s:.3f}", f"{together_s / alone_s:.2f}", f"{num_bytes / 1e6:.2f}"]
        print("| " + " | ".join([*cells, "same" if torch.equal(logits, reference) else "OTHER"]) + " |")


if __name__ == "__main__":
    main()
