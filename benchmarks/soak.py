"""A long run of many blocks and checkpoints: do memory, open files or threads of any rank grow?

    python benchmarks/soak.py --minutes 30 --ranks 2

Prints what each rank had after a quarter of the time, what it had at the end, and the slope between; ends with 1 if
anything grew. The run is ended by SIGTERM, as a scheduler would, and must have saved.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
BLOCK_ROWS, DIM = 500, 32
PREEMPTED = 75
# What may come and go: the manifest of some thousands of blocks, a file that is being written, a thread that is ending.
ALLOWED = {"rss_mb": 24.0, "files": 2.0, "threads": 1.0}


@dataclass(frozen=True)
class Sample:
    """What a process has at a moment."""

    seconds: float
    rss_mb: float
    files: float
    threads: float


def look(pid: int, started_s: float) -> Sample | None:
    """Reads /proc; None for a process that is gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
        rss_mb = int(status["VmRSS"].split()[0]) / 1024
    except (OSError, KeyError):
        return None
    return Sample(time.monotonic() - started_s, rss_mb, files, int(status["Threads"]))


def family(pid: int) -> list[int]:
    """A process and its children, which are the other ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *map(int, children.read_text().split())] if children.exists() else []


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float, float]:
    """Medians of a number over the second and the last quarter of the time, and the slope between, a minute.

    The first quarter is left out: libraries are still being imported, and allocators fill up.
    """
    quarter = len(samples) // 4
    first, last = samples[quarter : 2 * quarter], samples[-quarter:]
    minutes = (median(s.seconds for s in last) - median(s.seconds for s in first)) / 60
    before, after = (median(getattr(s, name) for s in part) for part in (first, last))
    return before, after, (after - before) / minutes


def report(samples: dict[int, list[Sample]]) -> bool:
    """Prints a line a rank and number. Returns whether anything grew by more than is allowed."""
    has_grown = False
    for pid, found in samples.items():
        for name, allowed in ALLOWED.items():
            before, after, slope = growth(found, name)
            grew = after - before > allowed
            has_grown |= grew
            verdict = "GREW" if grew else "ok"
            print(f"process {pid}  {name:<8} {before:9.1f} -> {after:9.1f}  {slope:+8.3f} a minute  {verdict}")
    return has_grown


def write_rows(folder: Path, num_blocks: int) -> None:
    """Shards of random features, 100 blocks each."""
    rng = np.random.default_rng(0)
    for index in range(-(-num_blocks // 100)):
        num_rows = 100 * BLOCK_ROWS
        features = pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=num_rows * DIM).astype(np.float32)), DIM)
        first = index * num_rows
        columns = {"chunk_id": np.arange(first, first + num_rows), "quality_score": rng.random(num_rows)}
        pq.write_table(pa.table({**columns, "feature_arr": features}), folder / f"part-{index:03}.parquet")


def soak(minutes: float, ranks: int, folder: Path) -> bool:
    """Runs, watches, ends the run and reports. Returns whether anything grew."""
    data = folder / "data"
    data.mkdir()
    # 20 blocks a second are more than two CPU cores solve
    write_rows(data, max(200, int(minutes * 60 * 20)))
    command = [sys.executable, str(ROOT / "cli.py"), "fit", "--data.path", str(data), "--run_name", "soak"]
    command += ["--data.block_size", str(BLOCK_ROWS), "--model.num_steps", "12", "--checkpoint.every_n_steps", "3"]
    command += ["--trainer.accelerator", "cpu", "--trainer.devices", str(ranks), "--data.check_rows", "false"]
    command += ["--trainer.enable_progress_bar", "false", *(["--trainer.strategy", "ddp"] if ranks > 1 else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=env)
    samples: dict[int, list[Sample]] = {}
    mask = folder / "runs/datamask/soak/mask"
    try:
        while process.poll() is None and not list(mask.glob("part-*")):
            time.sleep(0.2)
        started_s = time.monotonic()
        while process.poll() is None and time.monotonic() - started_s < minutes * 60:
            for pid in family(process.pid):
                if (sample := look(pid, started_s)) is not None:
                    samples.setdefault(pid, []).append(sample)
            time.sleep(min(1.0, minutes))
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    finally:
        process.kill()
    # the launcher of the ranks may start helpers that end at once
    samples = {pid: found for pid, found in samples.items() if len(found) >= 8}
    print(f"{len(list(mask.glob('part-*')))} blocks in {minutes:g} minutes on {len(samples)} ranks, exit code {code}")
    if code not in (0, PREEMPTED) or len(samples) < ranks:
        print("the run did not end as it should")
        return True
    return report(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(int(soak(args.minutes, args.ranks, Path(folder))))


if __name__ == "__main__":
    main()
