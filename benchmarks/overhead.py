"""What Lightning costs: milliseconds a step beyond the bare functions, and seconds until the first step.

python benchmarks/overhead.py [--samples 2000] [--steps 500] [--threads 2] [--repeats 3]

`fit` runs as a command, as users run it, on a block that is so small that a step is mostly what surrounds it. The bare
functions are the same estimator in a loop. Numbers are medians over --repeats runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.callbacks import Callback

ROOT = Path(__file__).parents[1]
NUM_FEATURES = 64
MODES = {
    "no logging, no bar": ["--trainer.logger=false", "--trainer.enable_progress_bar=false"],
    "no logging": ["--trainer.logger=false"],
    "TensorBoard every 10 steps": ["--trainer.log_every_n_steps=10"],
    "TensorBoard every step (default)": [],
}


class Clock(Callback):
    """Writes when the first step began, and what the others took."""

    def __init__(self, *, output: str) -> None:
        self.output = output
        self.times_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.times_s:
            self.first_s = time.monotonic()
        self.times_s.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        steps_s = np.diff(self.times_s)[1:]
        seen = {"first_s": self.first_s, "median_ms": 1e3 * float(np.median(steps_s))}
        Path(self.output).write_text(json.dumps({**seen, "mean_ms": 1e3 * float(np.mean(steps_s))}))


def make_block(path: Path, num_samples: int) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(num_samples, NUM_FEATURES)).astype(np.float32)
    columns = {
        "chunk_id": pa.array(np.arange(num_samples)),
        "quality_score": pa.array(rng.random(num_samples).astype(np.float32)),
        "feature_arr": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), NUM_FEATURES),
    }
    pq.write_table(pa.table(columns), path)


def bare_step_ms(path: Path, num_steps: int) -> tuple[float, float]:
    """Median and mean milliseconds of a step of the bare functions, the first left out."""
    from common import load_dictionary

    from datamask_pl.learner.step import multilinear_update
    from datamask_pl.objectives.ground_set import GroundSet
    from datamask_pl.objectives.joint import JointObjective

    features_ND, quality_N = load_dictionary([path])
    ground = GroundSet.of(features_ND=features_ND, quality_N=quality_N, budget=len(quality_N) // 10)
    objective = JointObjective(quality_weight=0.5, diversity="pairwise")
    logits_N, scales = torch.zeros(len(quality_N)), torch.ones(2, dtype=torch.float64)
    times_s = []
    for _ in range(num_steps + 1):
        times_s.append(time.perf_counter())
        update = multilinear_update(logits_N, objective=objective, ground=ground, scales=scales)
        logits_N += 0.1 * update.direction_M.float()
    steps_s = np.diff(times_s)[1:]
    return 1e3 * float(np.median(steps_s)), 1e3 * float(np.mean(steps_s))


def fit(folder: Path, num_steps: int, options: list[str], num_threads: int) -> tuple[float, ...]:
    """Median and mean milliseconds a step, seconds to the first step, and seconds in all, of a `fit` command."""
    output = folder / "clock.json"
    command = [sys.executable, "cli.py", "fit", f"--data.path={folder}/block.parquet", "--model.diversity=pairwise"]
    command += [
        f"--model.num_steps={num_steps}",
        f"--mask.output={folder}/mask",
        f"--trainer.default_root_dir={folder}",
    ]
    command += ["--model.max_lr=0.1", "--model.min_lr=0.1", "--trainer.accelerator=cpu"]
    command += ["--trainer.callbacks+=overhead.Clock", f"--trainer.callbacks.output={output}", *options]
    if "--trainer.logger=false" not in options:
        command.append(f"--trainer.logger.save_dir={folder}/runs")
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}
    start_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    total_s = time.monotonic() - start_s
    seen = json.loads(output.read_text())
    subprocess.run(["rm", "-rf", str(folder / "mask")], check=True)
    return seen["median_ms"], seen["mean_ms"], seen["first_s"] - start_s, total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.samples:,} samples of {NUM_FEATURES} features, pairwise, {args.steps} steps, {args.threads} threads; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_block(folder / "block.parquet", args.samples)
        with torch.no_grad():
            bare = [bare_step_ms(folder / "block.parquet", args.steps) for _ in range(args.repeats)]
        bare_ms, bare_mean_ms = (statistics.median(column) for column in zip(*bare, strict=True))
        print(
            "| | ms a step, median | beyond the bare functions | mean, with 10 checkpoints | s to step 1 | s in all |"
        )
        print("|---|---|---|---|---|---|")
        print(f"| bare functions | {bare_ms:.2f} | | {bare_mean_ms:.2f} | | |")
        for mode in args.modes:
            runs = [fit(folder, args.steps, MODES[mode], args.threads) for _ in range(args.repeats)]
            step_ms, mean_ms, first_s, total_s = (statistics.median(column) for column in zip(*runs, strict=True))
            numbers = [f"{step_ms:.2f}", f"{step_ms - bare_ms:+.2f}", f"{mean_ms:.2f}", f"{first_s:.2f}"]
            print(f"| {mode} | {' | '.join(numbers)} | {total_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
