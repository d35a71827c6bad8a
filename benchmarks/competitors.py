"""What the package is compared with. Each competitor takes a Problem and returns the masks it has found, with seconds.

Libraries that are not installed raise ImportError, which the suite reports as such. apricot and submodlib maximise
facility location alone, and have no way to add quality.

Shape suffixes: N samples, T neighbours of each, L entries of all lists.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from common import Kind
from numpy.typing import NDArray
from ours import Point, Problem, multilinear, paper
from torch import Tensor

from datamask_pl.evidence.baselines.catalog import BaselineName, baseline_mask
from datamask_pl.functional.neighbors.exact import nearest_neighbors

Competitor = Callable[[Problem], list[Point]]
FACILITY: Kind = "facility_location"
TABLES = (60, 200, 600)
PAPER = "the paper's estimator"


def compiled(num_neighbors: int) -> str:
    """The name of lazy greedy on lists of so many neighbours."""
    return f"compiled sparse greedy, {num_neighbors} neighbours"


def competitors(kind: Kind, quality_weight: float, paper_seconds: float) -> dict[str, Competitor]:
    """Who takes part for a term, by name; `greedy` is the one whose f is to be reached."""
    greedy: dict[Kind, BaselineName] = {
        FACILITY: "greedy_facility_location",
        "pairwise": "greedy_pairwise",
        "disf": "greedy_disf",
    }
    chosen: dict[str, Competitor] = {"greedy": partial(package_baseline, name=greedy[kind])}
    if kind == FACILITY:
        for length in TABLES:
            chosen[compiled(length)] = partial(sparse_greedy, num_neighbors=length)
        if quality_weight == 0.0:
            chosen["apricot lazy, dense"] = partial(apricot_dense, optimizer="lazy")
            chosen["apricot two-stage, dense"] = partial(apricot_dense, optimizer="two-stage")
            chosen["apricot lazy, 200 neighbours"] = partial(apricot_sparse, num_neighbors=200)
            chosen["submodlib LazyGreedy, dense"] = submodlib_dense
            chosen["submodlib LazyGreedy, 200 neighbours"] = partial(submodlib_sparse, num_neighbors=200)
    else:
        if kind == "disf":
            chosen["DiSF's greedy in batches of 1024"] = partial(package_baseline, name="disf_batches")
            chosen["the same for correlations, as published"] = partial(package_baseline, name="disf_published")
        chosen["leverage scores in batches of 1024"] = partial(package_baseline, name="leverage_score")
    chosen[PAPER] = partial(paper, limit_s=paper_seconds)
    chosen["ours"] = multilinear
    return chosen


def package_baseline(problem: Problem, *, name: BaselineName) -> list[Point]:
    start_s = time.perf_counter()
    mask_N = baseline_mask(
        name,
        problem.features_ND,
        problem.quality_N,
        num_selected=problem.num_selected,
        quality_weight=problem.quality_weight,
        seed=0,
    )
    return [Point("", time.perf_counter() - start_s, mask_N)]


def sparse_greedy(problem: Problem, *, num_neighbors: int) -> list[Point]:
    """Lazy greedy on the table of nearest neighbours, compiled: the fastest greedy for facility location we know of."""
    start_s = time.perf_counter()
    start_N, row_L, value_L = _candidates(problem.features_ND, num_neighbors)
    table_s = time.perf_counter() - start_s
    num_samples = len(problem.features_ND)
    modular_N = problem.quality_weight / problem.num_selected * problem.quality_N.double().numpy()
    scale = (1.0 - problem.quality_weight) / num_samples
    rows = _compiled_lazy_greedy()(start_N, row_L, value_L, modular_N, scale, problem.num_selected)
    return [Point("", time.perf_counter() - start_s, _mask(rows, num_samples), table_s)]


def apricot_dense(problem: Problem, *, optimizer: str) -> list[Point]:
    selection = _apricot()(problem.num_selected, metric="precomputed", optimizer=optimizer)
    start_s = time.perf_counter()
    # apricot computes in float64, and would convert
    features_ND = problem.features_ND.double()
    similarity_NN = (features_ND @ features_ND.T).clamp_(min=0.0).numpy()
    table_s = time.perf_counter() - start_s
    rows = selection.fit(similarity_NN).ranking
    return [Point("", time.perf_counter() - start_s, _mask(rows, len(similarity_NN)), table_s)]


def apricot_sparse(problem: Problem, *, num_neighbors: int) -> list[Point]:
    from scipy.sparse import csr_matrix

    selection = _apricot()(problem.num_selected, metric="precomputed", optimizer="lazy")
    start_s = time.perf_counter()
    start_N, row_L, value_L = _candidates(problem.features_ND, num_neighbors)
    table_s = time.perf_counter() - start_s
    num_samples = len(problem.features_ND)
    rows = selection.fit(csr_matrix((value_L.astype(np.float64), row_L, start_N), (num_samples,) * 2)).ranking
    return [Point("", time.perf_counter() - start_s, _mask(rows, num_samples), table_s)]


def submodlib_dense(problem: Problem) -> list[Point]:
    function = _submodlib()
    start_s = time.perf_counter()
    similarity_NN = (problem.features_ND @ problem.features_ND.T).clamp_(min=0.0).numpy()
    table_s = time.perf_counter() - start_s
    num_samples = len(similarity_NN)
    pairs = function(n=num_samples, mode="dense", sijs=similarity_NN, separate_rep=False).maximize(
        problem.num_selected, optimizer="LazyGreedy", show_progress=False
    )
    return [Point("", time.perf_counter() - start_s, _mask([row for row, _ in pairs], num_samples), table_s)]


def submodlib_sparse(problem: Problem, *, num_neighbors: int) -> list[Point]:
    from scipy.sparse import csr_matrix

    function = _submodlib()
    start_s = time.perf_counter()
    start_N, row_L, value_L = _candidates(problem.features_ND, num_neighbors)
    table_s = time.perf_counter() - start_s
    num_samples = len(problem.features_ND)
    # rows are what is covered there, columns are candidates
    similarity_NN = csr_matrix((value_L, row_L, start_N), (num_samples,) * 2).T.tocsr()
    pairs = function(n=num_samples, mode="sparse", sijs=similarity_NN, num_neighbors=num_neighbors).maximize(
        problem.num_selected, optimizer="LazyGreedy", show_progress=False
    )
    return [Point("", time.perf_counter() - start_s, _mask([row for row, _ in pairs], num_samples), table_s)]


def _candidates(
    features_ND: Tensor, num_neighbors: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """The neighbour table by candidate: entries start_N[i] to start_N[i + 1] are the rows that have i in their list."""
    num_samples = len(features_ND)
    similarity_TV, neighbor_TV = nearest_neighbors(
        lambda rows: features_ND[rows],
        [slice(0, num_samples)],
        range(num_samples),
        num_neighbors=min(num_neighbors, num_samples),
    )
    candidate_L = neighbor_TV.T.reshape(-1).long()
    start_N = torch.zeros(num_samples + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(candidate_L, minlength=num_samples), 0, out=start_N[1:])
    order_L = torch.argsort(candidate_L, stable=True)
    row_L = torch.div(order_L, neighbor_TV.shape[0], rounding_mode="floor").int()
    value_L = similarity_TV.T.reshape(-1)[order_L]
    return start_N.numpy(), row_L.numpy(), value_L.numpy()


@cache
def _compiled_lazy_greedy() -> Callable[..., NDArray[np.int64]]:
    from heapq import heapify, heappop, heappush

    from numba import njit

    @njit
    def lazy_greedy(start_N, row_L, value_L, modular_N, scale, num_selected):  # pragma: no cover
        num_samples = len(modular_N)
        best_N = np.zeros(num_samples, dtype=np.float32)
        evaluated_N = np.zeros(num_samples, dtype=np.int64)
        heap = [(0.0, 0)]
        heap.pop()
        for i in range(num_samples):
            total = 0.0
            for at in range(start_N[i], start_N[i + 1]):
                total += value_L[at]
            heap.append((-(modular_N[i] + scale * total), i))
        heapify(heap)
        chosen = np.empty(num_selected, dtype=np.int64)
        size = 0
        while size < num_selected:
            _, i = heappop(heap)
            if evaluated_N[i] == size:
                chosen[size] = i
                size += 1
                for at in range(start_N[i], start_N[i + 1]):
                    best_N[row_L[at]] = max(best_N[row_L[at]], value_L[at])
            else:
                total = 0.0
                for at in range(start_N[i], start_N[i + 1]):
                    total += max(np.float32(0.0), value_L[at] - best_N[row_L[at]])
                evaluated_N[i] = size
                heappush(heap, (-(modular_N[i] + scale * total), i))
        return chosen

    return lazy_greedy


def _apricot():
    with warnings.catch_warnings():
        # numba warns of its own future changes
        warnings.simplefilter("ignore")
        from apricot import FacilityLocationSelection
    return FacilityLocationSelection


def _submodlib():
    from submodlib.functions.facilityLocation import FacilityLocationFunction

    return FacilityLocationFunction


def _mask(rows, num_samples: int) -> Tensor:
    mask_N = torch.zeros(num_samples, dtype=torch.bool)
    mask_N[torch.as_tensor(np.asarray(rows, dtype=np.int64))] = True
    return mask_N
