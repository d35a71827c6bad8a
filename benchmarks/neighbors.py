"""Neighbour lists of facility location: seconds, share of the machine's products, recall, f and peak memory.

python benchmarks/neighbors.py FILE.parquet [FILE.parquet ...] [--samples N] [--searches exact approximate] [--steps 20]

More samples than the files hold are made of them: each is the mean of a random sample and one of its neighbours, plus
noise, of unit norm, kept in float16. `--clustered D` with `--samples` needs no files: it makes samples of D features
around 1,000 centres. `--write FOLDER` writes them as parquet files, with random quality, and searches nothing. With
faiss installed, `--searches ivf hnsw` measure its indices on the same samples. Run one search a process for its peak
memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import load_dictionary
from torch import Tensor

from datamask_pl.functional.budget import num_to_keep
from datamask_pl.functional.neighbors.exact import nearest_neighbors
from datamask_pl.functional.schedule import default_schedule, linear_rate
from datamask_pl.learner.solve import round_logits
from datamask_pl.learner.step import multilinear_update
from datamask_pl.objectives import FacilityLocation
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

T = TypeVar("T")
ROWS = 8192
FILE_ROWS = 250_000
NUM_QUERIES = 256


def product_rate() -> float:
    """Float32 flops a second of the best of ten products."""
    left, out = torch.randn(2048, 384), torch.empty(2048, 2048)
    seconds = min(timed(lambda: torch.mm(left, left.T, out=out))[1] for _ in range(10))
    return 2 * 2048**2 * 384 / seconds


def timed(make: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start_s


def mixtures(features_ND: Tensor, num_samples: int) -> Tensor:
    """Samples between random ones and their neighbours: float16 (num_samples, D)."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_features = features_ND.shape
    _, neighbor_TV = nearest_neighbors(
        lambda rows: features_ND[rows], [slice(0, num_rows)], range(num_rows), num_neighbors=16
    )
    made = torch.empty(num_samples, num_features, dtype=torch.float16)
    for part in made.split(ROWS):
        first = torch.randint(num_rows, (len(part),), generator=generator)
        second = neighbor_TV[torch.randint(1, 16, (len(part),), generator=generator), first]
        share = torch.rand(len(part), 1, generator=generator)
        noise = torch.randn(len(part), num_features, generator=generator) * 0.2 / num_features**0.5
        mixed = share * features_ND[first] + (1 - share) * features_ND[second] + noise
        part.copy_(torch.nn.functional.normalize(mixed))
    return made


def around_centers(num_samples: int, num_features: int) -> Tensor:
    """A thousand bunches of samples: float16 (num_samples, D)."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.nn.functional.normalize(torch.randn(1000, num_features, generator=generator))
    made = torch.empty(num_samples, num_features, dtype=torch.float16)
    for part in made.split(ROWS):
        center = centers[torch.randint(1000, (len(part),), generator=generator)]
        noise = torch.randn(len(part), num_features, generator=generator) / num_features**0.5
        part.copy_(torch.nn.functional.normalize(center + noise))
    return made


def write_files(features_ND: Tensor, folder: Path) -> None:
    """Parquet files of float16 features, ids and random quality."""
    folder.mkdir(parents=True)
    quality_N = np.random.default_rng(0).random(len(features_ND), dtype=np.float32)
    for first in range(0, len(features_ND), FILE_ROWS):
        part = features_ND[first : first + FILE_ROWS].half()
        column = pa.FixedSizeListArray.from_arrays(pa.array(part.numpy().reshape(-1)), part.shape[1])
        ids = np.arange(first, first + len(part))
        table = pa.table({"chunk_id": ids, "quality_score": quality_N[ids], "feature_arr": column})
        pq.write_table(table, folder / f"{first:09d}.parquet", row_group_size=50_000, compression="none")


def true_neighbors(ground: GroundSet, queries_Q: Tensor, num_neighbors: int) -> Tensor:
    """By brute force, in order of likeness: int64 (Q, T)."""
    query_QD = ground.features(queries_Q)
    best = torch.empty(len(queries_Q), 0), torch.empty(len(queries_Q), 0, dtype=torch.int64)
    for start in range(0, ground.num_samples, ROWS):
        products = query_QD @ ground.features(slice(start, min(start + ROWS, ground.num_samples))).T
        columns = torch.arange(start, start + products.shape[1]).expand_as(products)
        values, index = torch.cat([best[0], products], 1), torch.cat([best[1], columns], 1)
        top = values.topk(min(num_neighbors, values.shape[1]), dim=1)
        best = top.values, index.gather(1, top.indices)
    return best[1]


def recall_of(found_QT: Tensor, true_QT: Tensor) -> float:
    return float((found_QT[:, :, None] == true_QT[:, None, :]).any(2).double().mean())


def our_search(ground: GroundSet, args: argparse.Namespace, search: str, num_neighbors: int) -> None:
    """The table, the steps, the mask, by lists; f of the mask by brute force where that takes less than a minute."""
    facility = FacilityLocation(num_neighbors=num_neighbors, neighbors=search, recall=args.recall)  # type: ignore[arg-type]
    joint = JointObjective(quality_weight=0.0, diversity=facility)
    table, table_s = timed(lambda: facility._table(ground))
    queries_Q = torch.randperm(ground.num_samples, generator=torch.Generator().manual_seed(5))[:NUM_QUERIES]
    place_N = torch.empty(ground.num_samples, dtype=torch.int64)
    place_N[table.rows_V] = torch.arange(ground.num_samples)
    found_QT = table.neighbor_TV[:, place_N[queries_Q]].T.long()
    recall = recall_of(found_QT, true_neighbors(ground, queries_Q, num_neighbors))
    flops = ground.num_samples**2 * ground.num_features
    print(f"{search}: table {table_s:.2f} s, recall {recall:.3f} (said: {table.recall:.3f}), ", end="")
    print(
        f"{flops / table_s / product_rate():.2f} of the rate of products if each pair were multiplied once", flush=True
    )
    scales = torch.ones(2, dtype=torch.float64)
    logits_N = torch.zeros(ground.num_samples)
    _, max_lr, min_lr = default_schedule("multilinear", is_polish_quick=False)
    start_s, steps_s = time.perf_counter(), []

    def update_of_step():
        return multilinear_update(logits_N, objective=joint, ground=ground, scales=scales)

    for step in range(args.steps):
        update, seconds = timed(update_of_step)
        steps_s.append(seconds)
        logits_N += linear_rate(step, args.steps, max_lr=max_lr, min_lr=min_lr) * update.direction_M.float()
    mask_N, rounding_s = timed(
        lambda: round_logits(
            logits_N, objective=joint, ground=ground, scales=scales, is_polished=True, best_rollout_N=None
        )
    )
    milliseconds = [1000 * seconds for seconds in steps_s]
    print(
        f"  steps {time.perf_counter() - start_s - rounding_s:.2f} s: {min(milliseconds):.1f} ms the fastest, ", end=""
    )
    print(f"{milliseconds[0]:.1f} the first, {milliseconds[-1]:.1f} the last; rounding {rounding_s:.2f} s")
    value = float(facility.value(mask_N[None], ground)[0])
    exact = float(facility._brute_force(mask_N, ground)) if ground.num_samples <= 100_000 else float("nan")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  f by lists {value:.6f}, by brute force {exact:.6f}; peak {peak_mib:.0f} MiB", flush=True)


def faiss_search(ground: GroundSet, kind: str, num_neighbors: int) -> None:
    import faiss  # not a dependency

    faiss.omp_set_num_threads(torch.get_num_threads())
    features = ground.features(slice(None)).numpy()
    queries_Q = torch.randperm(ground.num_samples, generator=torch.Generator().manual_seed(5))[:NUM_QUERIES]
    true_QT = true_neighbors(ground, queries_Q, num_neighbors)
    num_samples, num_features = features.shape
    start_s = time.perf_counter()
    if kind == "ivf":
        num_lists = round(num_samples**0.5)
        flat = faiss.IndexFlatIP(num_features)
        index = faiss.IndexIVFFlat(flat, num_features, num_lists, faiss.METRIC_INNER_PRODUCT)
        index.train(features)
        settings = [("nprobe", probes) for probes in (8, 16, 32, 64)]
    else:
        index = faiss.IndexHNSWFlat(num_features, 32, faiss.METRIC_INNER_PRODUCT)
        settings = [("efSearch", width) for width in (64, 128)]
    index.add(features)
    built_s = time.perf_counter() - start_s
    for name, value in settings:
        faiss.ParameterSpace().set_index_parameter(index, name, value)
        (_, found), search_s = timed(lambda: index.search(features, num_neighbors))
        recall = recall_of(torch.from_numpy(found)[queries_Q], true_QT)
        print(f"faiss {kind} {name} {value}: {built_s:.2f} + {search_s:.2f} s, recall {recall:.3f}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Neighbour lists: seconds, recall, f, memory.")
    parser.add_argument("paths", nargs="*", help="parquet files with feature_arr and quality_score")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--clustered", type=int, metavar="D", help="with --samples, instead of files")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--searches", nargs="+", default=["exact", "approximate"])
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--select-ratio", type=float, default=0.1)
    parser.add_argument("--neighbors", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.clustered and args.samples:
        features_ND = around_centers(args.samples, args.clustered)
    elif args.paths:
        features_ND, _ = load_dictionary(args.paths)
        if args.samples:
            features_ND = mixtures(features_ND, args.samples)
    else:
        parser.error("give files, or --clustered and --samples")
    if args.write:
        write_files(features_ND, args.write)
        return
    num_samples, num_features = features_ND.shape
    norm_N = torch.cat([part.float().norm(dim=1) for part in features_ND.split(ROWS)])
    for search in args.searches:
        ground = GroundSet.of(
            features_ND=features_ND,
            quality_N=torch.zeros(num_samples),
            budget=num_to_keep(args.select_ratio, num_samples),
            inv_norm_N=1 / norm_N,
        )
        print(f"{num_samples} x {num_features}, {args.neighbors} neighbours, {args.threads} threads, ", end="")
        print(f"products {product_rate() / 1e9:.0f} GFLOP/s, torch {torch.__version__}", flush=True)
        if search in ("ivf", "hnsw"):
            faiss_search(ground, search, args.neighbors)
        else:
            our_search(ground, args, search, args.neighbors)


if __name__ == "__main__":
    main()
