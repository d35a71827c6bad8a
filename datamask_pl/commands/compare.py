"""A mask beside other ways to choose as many samples.

Shapes: N samples of a block, M of them that are compared, R masks.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from datamask_pl.errors import ConfigError
from datamask_pl.evidence import measures
from datamask_pl.evidence.baselines.catalog import BaselineName, baseline_mask
from datamask_pl.evidence.comparison import (
    COMPARISON_CSV,
    COMPARISON_JSON,
    TABLE,
    ComparedBlock,
    Comparison,
    Row,
    describe_legend,
    format_row,
)
from datamask_pl.evidence.competitors import DEFAULT_COMPETITORS, check_competitors, quality_weight_of
from datamask_pl.evidence.run import FinishedRun, find_mask, ground_set, open_run, read_block
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.io.atomic import atomic_path
from datamask_pl.learner.module import COMPARISON
from datamask_pl.learner.solve import calibrate, draw_uniform_masks, value_of
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

# Samples that every method is tried on before it is timed.
NUM_FIRST = 500
MASK, RELEARNED = "mask", "relearned"
# Relative difference of f here to the manifest's from which on the data are taken to have changed.
_F_TOLERANCE = 1e-3


def compare(
    run: str | None = None,
    *,
    mask: str | None = None,
    source: str | list[str] | None = None,
    output: str | None = None,
    blocks: int | list[int] | None = None,
    competitors: list[str] | None = None,
    max_samples: int = 25_000,
    near_duplicate: float = 0.95,
    seed: int = 0,
) -> None:
    """Puts a mask beside other ways to choose as many samples: random, top quality, greedy and others.

    Prints a table and writes comparison.csv and comparison.json. f is the run's objective with its weights and scales;
    each greedy maximises quality with the same pull and one kind of diversity. Of a mask that `export` made it is the
    objective of the run whose logits it was made from, and what that run's method learns for the new budget is shown
    beside it.

    Args:
        run: folder of the run, which fit names at its end.
        mask: folder of the mask, instead of the run; such as one that export made.
        source: the files that the mask was learned from, where they have moved since.
        output: folder for the tables; the run's, or, of a mask elsewhere, one beside it: NAME-evidence.
        blocks: which blocks, as 3 or [0, 3]; the first that is finished if left out.
        competitors: which, as [random, semdedup]: random, top_quality, greedy_facility_location, greedy_pairwise,
            greedy_disf, disf_batches, disf_published, leverage_score, semdedup, semdedup_quality; all but disf_batches
            and disf_published if left out.
        max_samples: of a larger block, so many random samples are compared: the mask restricted to them, and relearned
            for them. Greedy needs the square of this number of floats: 2.5 GB for 25,000.
        near_duplicate: cosine above which two samples are near-duplicates.
        seed: of the random samples and of what is random in the competitors, but `random`: of a whole block that is
            the mask that fit drew.

    Raises:
        ConfigError: If an option is out of range, or the files are not those that the mask was learned from.
        DataFileError: If there is no mask, or a file is missing or has changed.
        SchemaError: If a column is missing.
        ObjectiveError: If the run's objective is not finite on a competitor.
    """
    _check_options(max_samples=max_samples, near_duplicate=near_duplicate, seed=seed)
    found, folder = find_mask(run, mask, output)
    finished = open_run(found, folder, source=source)
    wanted = _wanted_blocks(finished, blocks)
    sizes = [finished.manifest.blocks[index]["num_samples"] for index in wanted]
    chosen = DEFAULT_COMPETITORS if competitors is None else competitors
    names = check_competitors(chosen, num_samples=min(max(sizes), max_samples))
    # begun now, so that a folder that cannot be written to is noticed before the work
    with atomic_path(folder / COMPARISON_CSV) as csv_path:
        with tqdm(total=len(wanted) * len(names), disable=None, leave=False, unit="mask") as bar:
            compared = [
                _compare_block(
                    finished,
                    index,
                    names,
                    max_samples=max_samples,
                    cosine=near_duplicate,
                    seed=seed,
                    advance=bar.update,
                )
                for index in wanted
            ]
        comparison = Comparison(
            plan_hash=finished.manifest.plan_hash,
            settings=finished.manifest.settings,
            near_duplicate=near_duplicate,
            seed=seed,
            num_threads=torch.get_num_threads(),
            blocks=compared,
        )
        csv_path.write_text(comparison.to_csv(), encoding="utf-8")
        # apart, so that an error names the file that it is of
        with atomic_path(folder / COMPARISON_JSON) as json_path:
            json_path.write_text(comparison.to_json(), encoding="utf-8")
    for block in compared:
        print(_describe(block))
    print(describe_legend(near_duplicate))
    print(f"written {folder / COMPARISON_CSV}, {folder / COMPARISON_JSON}")
    print(f"next    python cli.py report --{'run' if run else 'mask'} {shlex.quote(run or str(mask))}")


def _compare_block(
    run: FinishedRun,
    index: int,
    names: Sequence[BaselineName],
    *,
    max_samples: int,
    cosine: float,
    seed: int,
    advance: Callable[[int], object],
) -> ComparedBlock:
    about = run.manifest.blocks[index]
    ground, mask_N, notes = _read_samples(run, index, max_samples=max_samples, seed=seed)
    scale_by_name = run.scales(index)
    scales = torch.tensor(list(scale_by_name.values()), dtype=torch.float64)
    masks, seconds = {MASK: mask_N}, {MASK: float(about.get("seconds", 0.0))}
    is_whole = ground.num_samples == about["num_samples"]
    few = _few_of(ground)
    if (run.is_exported or not is_whole) and run.can_learn_block:
        masks[RELEARNED], seconds[RELEARNED] = _timed(partial(run.learn_block, scales=scales), few, ground)
    scale_of = cache(partial(_scale, run, ground, scale_by_name, seed=derive_seed(seed, index, 1)))
    for name in names:
        quality_weight = quality_weight_of(name, run.quality_weight, scale_of=scale_of)
        choose = partial(_choose, name, quality_weight=quality_weight, seed=derive_seed(seed, index, 2))
        if name == "random":  # the draw of fit itself, so that a report has one number for it
            choose = partial(_draw_one, seed=derive_seed(run.data.seed, index, COMPARISON))
        masks[name], seconds[name] = _timed(choose, few, ground)
        advance(1)
    values = value_of(torch.stack(list(masks.values())), objective=run.objective, ground=ground, scales=scales)
    rows = [
        _measure(index, name, masks, ground, f=value.f, seconds=seconds[name], cosine=cosine)
        for name, value in zip(masks, values, strict=True)
    ]
    notes += _notes(run, about, rows[0].f, is_whole=is_whole)
    return ComparedBlock(index, len(mask_N), ground.num_selected, _formula(run.objective, scales), notes, rows)


def _notes(run: FinishedRun, about: Mapping[str, Any], f: float, *, is_whole: bool) -> list[str]:
    """What is to be said of a block's numbers, beside of which samples they are."""
    notes = []
    if is_whole and "mask" in about and abs(f - about["mask"]["f"]) > _F_TOLERANCE * abs(about["mask"]["f"]):
        notes.append(
            f"f of the mask is {f:.6g} here and {about['mask']['f']:.6g} in the manifest: the features or qualities in "
            "the files have changed since the run, or the objective has."
        )
    if run.limits:
        notes.append(
            f"the mask keeps to {', '.join(run.limits)}; the others keep as many samples, whatever these say: they "
            "have more to choose from."
        )
    if run.is_exported:
        note = "the mask was made by export from the logits of a run; f, its scales and the seconds are the run's."
        beside = f" {RELEARNED} is what its method learns for this budget." if run.can_learn_block else ""
        return [*notes, note + beside]
    notes.append(
        "the mask's seconds are those of the run: the whole block, on its machine, first calls included, reading not."
    )
    return notes


def _choose(name: BaselineName, ground: GroundSet, *, quality_weight: float, seed: int) -> Tensor:
    """The mask of a competitor."""
    return baseline_mask(
        name,
        ground.features(slice(None)),
        ground.quality_N,
        num_selected=ground.num_selected,
        quality_weight=quality_weight,
        seed=seed,
    )


def _draw_one(ground: GroundSet, *, seed: int) -> Tensor:
    return draw_uniform_masks(1, ground, seed=seed)[0]


def _timed(choose: Callable[[GroundSet], Tensor], few: GroundSet, ground: GroundSet) -> tuple[Tensor, float]:
    """A mask, and how long it took once the same had been done for a few samples: a first call loads and compiles."""
    choose(few)
    started_s = time.perf_counter()
    mask_N = choose(ground)
    return mask_N, time.perf_counter() - started_s


def _few_of(ground: GroundSet) -> GroundSet:
    """The first samples, with as large a share of them to keep."""
    num_few = min(ground.num_samples, NUM_FIRST)
    num_selected = max(1, num_few * ground.num_selected // ground.num_samples)
    rows = slice(0, num_few)
    return GroundSet(features_ND=ground.features(rows), quality_N=ground.quality_N[rows], num_selected=num_selected)


def _read_samples(run: FinishedRun, index: int, *, max_samples: int, seed: int) -> tuple[GroundSet, Tensor, list[str]]:
    """The samples of a block that are compared, the mask of them, and what is to be said of the choice."""
    block, mask_N = read_block(run, index)
    if block.num_samples <= max_samples:
        return ground_set(block, int(mask_N.sum())), mask_N, []
    generator = torch.Generator().manual_seed(derive_seed(seed, index, 0))
    rows_M = torch.randperm(block.num_samples, generator=generator)[:max_samples].sort().values
    mask_M = mask_N[rows_M]
    if not mask_M.any():
        raise ConfigError(
            f"max_samples: the mask keeps none of {max_samples:,} random samples of block {index}; raise it."
        )
    note = (
        f"{max_samples:,} random samples of {block.num_samples:,}, see max_samples. The mask was learned for all of "
        "them and is restricted to these, for which the others choose: its f here is lower than it could be. "
    )
    if run.can_learn_block:
        note += f"{RELEARNED} is what the run's method learns for these samples: compare that with the others."
    else:
        note += "Only whole blocks are fair."
    return ground_set(block, int(mask_M.sum()), rows_M), mask_M, [note]


def _measure(
    index: int, name: str, masks: dict[str, Tensor], ground: GroundSet, *, f: float, seconds: float, cosine: float
) -> Row:
    mask_N, features_ND = masks[name], ground.features(slice(None))
    return Row(
        block=index,
        name=name,
        f=f,
        quality=float(ground.quality_N[mask_N].double().mean()),
        facility_location=measures.facility_location(mask_N, features_ND),
        pairwise=measures.pairwise_similarity(mask_N, features_ND),
        disf=measures.disf(mask_N, features_ND),
        seconds=seconds,
        overlap=measures.jaccard(mask_N, masks[MASK]),
        near_duplicates=measures.near_duplicate_share(mask_N, features_ND, cosine=cosine),
    )


def _scale(run: FinishedRun, ground: GroundSet, scales: dict[str, float], name: str, *, seed: int) -> float:
    """What the run divides a term by; of a kind of diversity that it does not have, measured as the run does."""
    if name in scales:
        return scales[name]
    if not run.learner.calibrate:
        return 1.0
    return float(calibrate(JointObjective(quality_weight=0.0, diversity=name), ground, seed=seed)[1])


def _wanted_blocks(run: FinishedRun, blocks: int | list[int] | None) -> list[int]:
    finished = sorted(run.manifest.blocks)
    if blocks is None:
        return finished[:1]
    wanted = [blocks] if isinstance(blocks, int) else sorted(set(blocks))
    missing = [index for index in wanted if index not in run.manifest.blocks]
    if missing or not wanted:
        raise ConfigError(
            f"blocks must be of those that are finished, {len(finished)} of {run.manifest.num_blocks}, the first "
            f"{finished[0]} and the last {finished[-1]}; got {missing or wanted}."
        )
    return wanted


def _check_options(*, max_samples: int, near_duplicate: float, seed: int) -> None:
    if max_samples < 1:
        raise ConfigError(f"max_samples must be at least 1, got {max_samples}.")
    if not 0.0 < near_duplicate < 1.0:
        raise ConfigError(f"near_duplicate must be a cosine above 0 and below 1, got {near_duplicate}.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2^63, got {seed}.")


def _describe(block: ComparedBlock) -> str:
    """The table of a block, for the terminal."""
    lines = [
        "",
        f"block {block.index}: {block.num_selected:,} of {block.num_samples:,} samples, {block.formula}",
        f"{'':<25}" + "".join(f"{title:>10}" for title, _ in TABLE.values()),
    ]
    for row in block.rows:
        lines.append(f"{row.name:<25}" + "".join(f"{cell:>10}" for cell in format_row(row)))
    return "\n".join([*lines, *(f"note: {note}" for note in block.notes)])


def _formula(objective: JointObjective, scales: Tensor) -> str:
    parts = [
        f"{term.weight:g} {term.name}" + (f" / {scale:.4g}" if scale != 1.0 else "")
        for term, scale in zip(objective.terms, scales.tolist(), strict=True)
        if term.weight > 0 and scale > 0
    ]
    return f"f = {' + '.join(parts) or '0'}"
