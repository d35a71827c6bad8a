"""The pictures of a report, from what a run left behind. Needs matplotlib.

Shapes: N samples of a block, M of them that are clustered, P that are drawn, J clusters.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from datamask_pl.evidence import clusters, figures
from datamask_pl.evidence.baselines.semdedup import cluster_by_cosine
from datamask_pl.evidence.curves import of_block, read_scalars
from datamask_pl.evidence.histograms import Histogram, finite_range, histogram
from datamask_pl.evidence.run import FinishedRun, ground_set, read_block
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.mask.manifest import read_columns
from datamask_pl.mask.summary import COMPARED, summarize

NUM_BINS = 40
NUM_ROUNDS = 25
MAX_CURVES = 4


def part_pictures(run: FinishedRun) -> dict[str, str]:
    """Quality and inclusion probability over all finished blocks, one part in memory at a time."""
    ranges = [finite_range(_column(run, block, "quality")) for block in run.manifest.blocks]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    counted: dict[str, list[Histogram]] = {"all": [], "kept": [], "probability": []}
    for block in run.manifest.blocks:
        quality_N, kept_N = _column(run, block, "quality"), _column(run, block, "selected").bool()
        count = partial(histogram, num_bins=NUM_BINS, low=low, high=high)
        counted["all"].append(count(quality_N))
        counted["kept"].append(count(quality_N[kept_N]))
        probability_N = _column(run, block, "probability")
        counted["probability"].append(histogram(probability_N, num_bins=NUM_BINS, low=0.0, high=1.0))
    whole = {name: Histogram.merged(parts) for name, parts in counted.items()}
    return {
        "quality": figures.to_svg(
            lambda: figures.draw_quality(whole["all"], whole["kept"]),
            label="Histogram of quality, of the kept samples and of all",
        ),
        "probability": figures.to_svg(
            lambda: figures.draw_probability(whole["probability"]), label="Histogram of inclusion probabilities"
        ),
    }


def _column(run: FinishedRun, block: int, name: str) -> Tensor:
    column = read_columns(run.mask, block, run.manifest, [name])[name]
    return torch.from_numpy(np.array(column.to_numpy()))


def feature_pictures(
    run: FinishedRun, index: int, *, max_samples: int, max_points: int, num_clusters: int, seed: int
) -> dict[str, str]:
    """What was kept by cluster and quality, and in the plane of largest variance; of one block."""
    block, mask_N = read_block(run, index)
    ground = ground_set(block, int(mask_N.sum()))
    generator = torch.Generator().manual_seed(derive_seed(seed, index, 0))
    order_N = torch.randperm(block.num_samples, generator=generator)
    top_N, random_N = torch.zeros_like(mask_N), torch.zeros_like(mask_N)
    top_N[block.quality_N.argsort(descending=True, stable=True)[: ground.num_selected]] = True
    random_N[torch.randperm(block.num_samples, generator=generator)[: ground.num_selected]] = True

    rows_M = order_N[:max_samples].sort().values
    features_MD = ground.features(rows_M)
    labels_M, _ = cluster_by_cosine(
        features_MD, num_clusters=min(num_clusters, len(rows_M)), num_rounds=NUM_ROUNDS, generator=generator
    )
    decile_M = clusters.deciles(block.quality_N)[rows_M]
    share_J10, count_J10 = clusters.share_kept(mask_N[rows_M], labels_M, decile_M, num_clusters=num_clusters)
    size_J = count_J10.sum(dim=1)
    kept_J = (share_J10.nan_to_num() * count_J10).sum(dim=1) / size_J.clamp(min=1)
    order_J = [row for row in kept_J.argsort(descending=True, stable=True).tolist() if size_J[row]]

    rows_P = order_N[: min(max_points, max_samples)]
    points_P2, share_2 = clusters.principal_plane(ground.features(rows_P))
    masks = {"the mask": mask_N[rows_P], "top quality": top_N[rows_P], "chance": random_N[rows_P]}
    return {
        "heat_map": figures.to_svg(
            lambda: figures.draw_heat_map(share_J10[order_J], count_J10[order_J]),
            label="Share kept by cluster and tenth of quality",
        ),
        "map": figures.to_svg(
            lambda: figures.draw_map(points_P2, share_2, masks),
            label="Kept and left samples in two dimensions, for the mask, top quality and chance",
        ),
    }


def curves(run: FinishedRun) -> tuple[str, str] | None:
    """What was logged while the mask was learned, of a few blocks, and words about it; None if nothing was."""
    num_steps = run.learner.num_steps
    blocks = sorted(run.manifest.blocks)
    blocks = blocks[:: -(-len(blocks) // MAX_CURVES)]
    scalars = read_scalars(run.folder, is_wanted=lambda step: (step - 1) // num_steps in blocks)
    terms = [term.name for term in run.objective.terms if term.weight > 0]
    wanted = {"objective/f": "f", **{f"objective/{name}": name for name in terms}}
    wanted |= {
        "policy/churn": "share changed since the step before",
        "policy/undecided": "undecided share of the budget",
    }
    panels: dict[str, list[figures.Curve]] = {}
    for tag, title in wanted.items():
        for block in blocks:
            values = of_block(scalars.get(tag, {}), block, num_steps)
            if values:
                label = f"block {block}" if len(blocks) > 1 else ""
                panels.setdefault(title, []).append(figures.Curve(label, list(values), list(values.values())))
    if not panels:
        return None
    marks: dict[str, dict[str, float]] = {}
    text = "f and its terms as they were expected of a mask drawn at that step."
    values_of = summarize(run.manifest.blocks).values
    if len(blocks) == 1 and values_of and run.learner.method.is_whole_block:
        marks = {"f": {label: values_of[key].f for key, label in COMPARED.items()}}
        for name in terms:
            marks[name] = {label: values_of[key].terms[name] for key, label in COMPARED.items()}
        text += " Dashed: the finished mask, a random one, and that of highest quality."
    return figures.to_svg(partial(figures.draw_curves, panels, marks), label="Objective and policy over steps"), text
