"""How time and memory of a whole `fit` command grow with the rows.

python benchmarks/growth.py --folder /tmp/growth [--sizes 10000 100000 1000000 10000000] [--terms pairwise disf ...]

Writes clustered float16 features into --folder, whose files larger sizes share, and runs `python cli.py fit` on them,
in blocks of a million rows. Memory is the largest resident set of the process and its children together, looked at
every 50 ms. The bar for more than one block is two blocks of float16 features and a gigabyte, however many blocks there
are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
TERMS = {
    "pairwise": "pairwise",
    "disf": "disf",
    "facility_location": "facility_location",
    **{
        f"facility_location:{search}": json.dumps(
            {"class_path": "datamask_pl.objectives.FacilityLocation", "init_args": {"neighbors": search}}
        )
        for search in ("exact", "approximate")
    },
}
FILE_ROWS, ROW_GROUP_ROWS = 500_000, 50_000
NUM_CLUSTERS = 1000


def make_shards(folder: Path, num_rows: int, num_features: int) -> list[Path]:
    """Shards of noisy copies of random centres, float16; those that are there already are not written again."""
    centers = np.random.default_rng(0).standard_normal((NUM_CLUSTERS, num_features), dtype=np.float32)
    schema = pa.schema(
        {
            "chunk_id": pa.int64(),
            "quality_score": pa.float32(),
            "feature_arr": pa.list_(pa.float16(), num_features),
        }
    )
    paths = []
    for number, first in enumerate(range(0, num_rows, FILE_ROWS)):
        stop = min(first + FILE_ROWS, num_rows)
        paths.append(folder / f"shard-{num_features}-{number:03d}-{stop - first}.parquet")
        if paths[-1].exists():
            continue
        rng = np.random.default_rng((1, number))
        unfinished = paths[-1].with_suffix(".tmp")
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer:
            for start in range(first, stop, ROW_GROUP_ROWS):
                count = min(ROW_GROUP_ROWS, stop - start)
                features = centers[rng.integers(NUM_CLUSTERS, size=count)]
                features += rng.standard_normal((count, num_features), dtype=np.float32)
                column = pa.FixedSizeListArray.from_arrays(
                    pa.array(features.astype(np.float16).reshape(-1)), num_features
                )
                columns = [np.arange(start, start + count), rng.random(count, dtype=np.float32), column]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=ROW_GROUP_ROWS)
        unfinished.rename(paths[-1])
    return paths


def resident_bytes(root: int) -> int:
    """Resident bytes of a process and all that descend from it, now."""
    parents, resident = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)], resident[int(entry.name)] = int(fields[1]), int(fields[21])
    family = {root}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(resident.get(process, 0) for process in family) * os.sysconf("SC_PAGE_SIZE")


def run_fit(paths: list[Path], folder: Path, term: str, options: list[str]) -> tuple[float, int]:
    """Seconds and peak bytes of a `fit` command, with its start and end."""
    command = [sys.executable, "cli.py", "fit", f"--data.path={json.dumps([str(path) for path in paths])}"]
    command += [f"--model.diversity={TERMS[term]}"]
    command += [f"--trainer.logger.save_dir={folder}/runs", "--run_name=run", "--trainer.accelerator=cpu", *options]
    peak_bytes, start_s = 0, time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                peak_bytes = max(peak_bytes, resident_bytes(process.pid))
                time.sleep(0.05)
        finally:
            process.kill()  # it has ended, unless this one is interrupted
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'log.txt').read_text()}")
    return time.monotonic() - start_s, peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the data, which stay, and the runs, which go")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--terms", nargs="+", choices=list(TERMS), default=list(TERMS)[:3])
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=1_000_000)
    parser.add_argument("--options", nargs="*", default=[], help="more options of fit, such as data.check_rows=false")
    args = parser.parse_args()
    options = [f"--data.block_size={args.block_size}", *(f"--{option}" for option in args.options)]

    args.folder.mkdir(parents=True, exist_ok=True)
    given = " ".join(args.options) or "no other options"
    print(
        f"{args.features} float16 features, blocks of {args.block_size:,}, {given}; "
        f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, {time.strftime('%Y-%m-%d')}\n"
    )
    print("| term | rows | blocks | s in all | µs a row | s in blocks | peak memory | two blocks + 1 GB |")
    print("|---|---|---|---|---|---|---|---|")
    for num_rows in args.sizes:
        paths = make_shards(args.folder, num_rows, args.features)
        num_blocks = -(-num_rows // args.block_size)
        bar_bytes = 2 * -(-num_rows // num_blocks) * args.features * 2 + 10**9
        for term in args.terms:
            with tempfile.TemporaryDirectory(dir=args.folder) as name:
                seconds, peak_bytes = run_fit(paths, Path(name), term, options)
                manifest = json.loads(next(Path(name).glob("runs/**/_manifest.json")).read_text())
            in_blocks_s = sum(block["seconds"] for block in manifest["blocks"].values())
            cells = [term, f"{num_rows:,}", str(num_blocks), f"{seconds:.1f}", f"{1e6 * seconds / num_rows:.1f}"]
            cells += [f"{in_blocks_s:.1f}", f"{peak_bytes / 1e9:.2f} GB"]
            print(f"| {' | '.join(cells)} | {bar_bytes / 1e9:.2f} GB |", flush=True)


if __name__ == "__main__":
    main()
