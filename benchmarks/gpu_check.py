"""The main job on a CUDA GPU: are its masks those of the CPU, and how long does a large block take?

python benchmarks/gpu_check.py [--num-samples 1000000] [--num-features 768] [--output gpu.md]

Prints two markdown tables. The first compares GPU and CPU on a small block, for every estimator and term. The second
times one large block on the GPU. Data are synthetic clusters, written as float16 parquet shards and read by the data
module as any others. Needs torch, lightning and pyarrow, and no command line parser but Python's own.

Exit codes: 0 if GPU and CPU agree, 1 if they do not, 2 without a CUDA GPU. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.data.module import FeatureDataModule
from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import World, set_world
from datamask_pl.learner.module import MaskLearner
from datamask_pl.mask.manifest import Manifest
from datamask_pl.mask.parts import part_name

TERMS = ("facility_location", "pairwise", "disf")
ESTIMATORS = ("multilinear", "leave_one_out", "group_relative")
ROWS_AT_ONCE = 100_000
# Difference of f, in shares of what the CPU's mask gains over a random one. Exact gradients differ by rounding and by
# how ties are ordered; those that draw masks draw others on another device.
ALLOWED = {"multilinear": 0.005, "leave_one_out": 0.1, "group_relative": 0.1}


@dataclass
class Seconds:
    """Where the time of a run went, and the most memory that the GPU held."""

    read: float = 0.0
    prepare: float = 0.0
    steps: list[float] = field(default_factory=list)
    rounding: float = 0.0
    total: float = 0.0
    peak_bytes: int = 0

    @property
    def step(self) -> float:
        """Median of the steps after the first."""
        return float(torch.tensor(self.steps[1:] or self.steps).median())


class Clock(Checkpoint):
    """Reads the time between the hooks, once the device has done what it was asked.

    A Checkpoint, so that Lightning calls it at an epoch's end after the learner has rounded the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = Seconds()
        self._mark_s = self._started_s = time.perf_counter()

    def _lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before_s, self._mark_s = self._mark_s, time.perf_counter()
        return self._mark_s - before_s

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        seconds = self._lap()
        if batch_idx == 0:
            self.seconds.read = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.steps.append(self._lap())

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds.rounding = self._lap()
        # the first step begins with what is made once a block
        self.seconds.prepare = max(0.0, self.seconds.steps[0] - self.seconds.step)
        self.seconds.total = time.perf_counter() - self._started_s
        if self.device.type == "cuda":
            self.seconds.peak_bytes = torch.cuda.max_memory_allocated(self.device)


def write_shards(folder: Path, *, num_samples: int, num_features: int, device: torch.device, seed: int = 0) -> str:
    """Clusters of about 50 samples of very different sizes, and a quality that depends on the cluster a little."""
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(seed)
    num_clusters = max(2, num_samples // 50)
    centers_CD = torch.randn(num_clusters, num_features, device=device, generator=generator)
    level_C = torch.randn(num_clusters, device=device, generator=generator)
    for index, start in enumerate(range(0, num_samples, ROWS_AT_ONCE)):
        num_rows = min(ROWS_AT_ONCE, num_samples - start)
        # squared: a few clusters are large
        uniform_N = torch.rand(num_rows, device=device, generator=generator)
        cluster_N = (uniform_N.square() * num_clusters).long().clamp_(max=num_clusters - 1)
        noise_ND = torch.randn(num_rows, num_features, device=device, generator=generator)
        features_ND = centers_CD[cluster_N] + 0.7 * noise_ND
        quality_N = 0.5 * level_C[cluster_N] + torch.randn(num_rows, device=device, generator=generator)
        values = pa.array(features_ND.half().flatten().cpu().numpy())
        table = pa.table(
            {
                "chunk_id": pa.array(range(start, start + num_rows)),
                "quality_score": pa.array(quality_N.cpu().numpy()),
                "feature_arr": pa.FixedSizeListArray.from_arrays(values, num_features),
            }
        )
        pq.write_table(table, folder / f"shard-{index:03d}.parquet", row_group_size=50_000, compression="none")
    return str(folder)


def learn(path: str, output: Path, device: torch.device, *, is_ddp: bool = False, **options: Any) -> Seconds:
    """One run of the main job, into the folder `output`."""
    clock = Clock(device)
    strategy: Any = BlockGroupStrategy() if is_ddp else "auto"
    if is_ddp:  # a port of its own for every process group of this process
        os.environ.pop("MASTER_PORT", None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        max_epochs=-1,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
        default_root_dir=str(output),
        callbacks=[clock, MaskExport(output=str(output))],
    )
    try:
        trainer.fit(MaskLearner(**options), datamodule=FeatureDataModule(path=path, block_size=2**31))
    finally:
        if is_ddp and dist.is_initialized():
            dist.destroy_process_group()
            set_world(World())
    return clock.seconds


def outcome(output: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """The mask, and what the manifest says of it."""
    manifest = Manifest.read(output)
    assert manifest is not None
    selected = pq.read_table(output / part_name(0), columns=["selected"])["selected"]
    return torch.from_numpy(selected.to_numpy()), manifest.blocks[0]


def compare(args: argparse.Namespace, device: torch.device, folder: Path) -> tuple[list[str], bool]:
    """The first table, and whether device and CPU agree everywhere."""
    path = write_shards(
        folder / "small", num_samples=args.small_samples, num_features=args.small_features, device=torch.device("cpu")
    )
    lines = ["| estimator | term | kept | in both | f CPU | f GPU | difference | CPU s | GPU s | |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|--:|---|")
    is_good = True
    for estimator in ESTIMATORS:
        for term in TERMS:
            options: dict[str, Any] = {"estimator": estimator, "diversity": term}
            if estimator != "multilinear":
                options["num_steps"] = args.rollout_steps
            found = []
            for name, where in (("cpu", torch.device("cpu")), ("gpu", device)):
                output = folder / f"{name}-{estimator}-{term}"
                seconds = learn(path, output, where, is_ddp=args.ddp and name == "gpu", **options)
                found.append((*outcome(output), seconds))
            (mask_N, block, seconds), (other_N, other, other_seconds) = found
            gain = block.mask.f - block.random.f
            difference = (other.mask.f - block.mask.f) / gain
            does_agree = abs(difference) <= ALLOWED[estimator] and int(other_N.sum()) == int(mask_N.sum())
            is_good &= does_agree
            share = int((mask_N & other_N).sum()) / int(mask_N.sum())
            lines.append(
                f"| {estimator} | {term} | {int(other_N.sum()):,} | {share:.1%} | {block.mask.f:.6g} "
                f"| {other.mask.f:.6g} | {difference:+.3%} | {seconds.total:.1f} | {other_seconds.total:.1f} "
                f"| {'agrees' if does_agree else 'DIFFERS'} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines, is_good


def time_block(args: argparse.Namespace, device: torch.device, folder: Path) -> list[str]:
    """The second table."""
    path = write_shards(
        folder / "large", num_samples=args.num_samples, num_features=args.num_features, device=device, seed=1
    )
    lines = ["| estimator | term | read | prepare | steps | a step | rounding | total | peak GPU memory |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for estimator in args.timed_estimators:
        for term in args.terms:
            options: dict[str, Any] = {"estimator": estimator, "diversity": term}
            if estimator != "multilinear":
                options["num_steps"] = args.timed_steps
            seconds = learn(path, folder / f"large-{estimator}-{term}", device, is_ddp=args.ddp, **options)
            lines.append(
                f"| {estimator} | {term} | {seconds.read:.1f} s | {seconds.prepare:.1f} s "
                f"| {len(seconds.steps)} | {seconds.step:.3f} s | {seconds.rounding:.1f} s | {seconds.total:.1f} s "
                f"| {seconds.peak_bytes / 2**30:.2f} GiB |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def describe(device: torch.device) -> str:
    """Device, versions and date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    cuda = f", CUDA {torch.version.cuda}" if device.type == "cuda" else ""
    packages = ", ".join(f"{package} {version(package)}" for package in ("lightning", "pyarrow", "numpy"))
    return (
        f"{name}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads; torch {torch.__version__}{cuda}, "
        f"{packages}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}."
    )


def report(args: argparse.Namespace, device: torch.device, folder: Path) -> tuple[str, bool]:
    """All of the markdown, and whether device and CPU agree."""
    backend = ", one rank of DDP" if args.ddp else ""
    is_good, parts = True, [f"{describe(device)}{backend}"]
    if not args.skip_comparison:
        lines, is_good = compare(args, device, folder)
        parts += [
            f"{args.small_samples:,} samples of {args.small_features} float16 features, a tenth kept, defaults but "
            f"{args.rollout_steps} steps for the estimators that draw masks. The difference is that of f, in shares of "
            f"what the CPU's mask gains over a random one; allowed are {ALLOWED['multilinear']:.1%} for exact "
            f"gradients and {ALLOWED['group_relative']:.0%} where masks are drawn, which are others on another device.",
            "\n".join(lines),
        ]
    if not args.skip_timing:
        lines = time_block(args, device, folder)
        parts += [
            f"One block of {args.num_samples:,} samples of {args.num_features} float16 features from parquet, a tenth "
            "kept. Read: footers, reading and checking all rows, on the host. Prepare: copying to the device, "
            "calibration, and what is made once a block, such as neighbour lists. A step: the median. Rounding: logits "
            "to mask, exchanges, and the values of three masks. Writing the mask is not in the total.",
            "\n".join(lines),
        ]
    return "\n\n".join(parts) + "\n", is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU and CPU side by side, and the time of a large block on the GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-samples", type=int, default=1_000_000, help="of the block that is timed")
    parser.add_argument("--num-features", type=int, default=768)
    parser.add_argument("--small-samples", type=int, default=20_000, help="of the block that is compared")
    parser.add_argument("--small-features", type=int, default=128)
    parser.add_argument("--rollout-steps", type=int, default=200, help="compared steps of estimators that draw masks")
    parser.add_argument("--timed-steps", type=int, default=20, help="timed steps of estimators that draw masks")
    parser.add_argument("--timed-estimators", nargs="*", choices=ESTIMATORS, default=["multilinear"])
    parser.add_argument("--terms", nargs="*", choices=TERMS, default=list(TERMS), help="that are timed")
    parser.add_argument("--ddp", action="store_true", help="as one rank of a process group, NCCL on a GPU")
    parser.add_argument("--skip-comparison", action="store_true")
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--folder", help="for shards and masks; a temporary one if left out")
    parser.add_argument("--output", help="markdown file to write, beside what is printed")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA GPU here; --device cpu tries the script itself.", file=sys.stderr)
        return 2
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The number of training batches .* is smaller than the logging interval")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        text, is_good = report(args, device, Path(folder))
    print(text)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
