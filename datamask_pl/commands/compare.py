"""The `compare` command: a mask against baselines that keep as many samples.

Shapes: N samples of a block, M samples compared, R masks.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from tqdm import tqdm

from datamask_pl.errors import ConfigError, program
from datamask_pl.evidence import measures
from datamask_pl.evidence.baselines.catalog import BaselineName, baseline_mask
from datamask_pl.evidence.comparison import (
    COMPARISON_CSV,
    COMPARISON_JSON,
    DEFAULT_BASELINES,
    TABLE,
    ComparedBlock,
    Comparison,
    Row,
    check_baselines,
    describe_legend,
    format_row,
    quality_weight_of,
)
from datamask_pl.evidence.run import FinishedRun, find_mask, ground_set, open_run, read_block
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.io.atomic import atomic_path, check_replaceable, has_mark
from datamask_pl.io.paths import AnyPath
from datamask_pl.learner.solve import COMPARISON, calibrate, draw_uniform_masks, value_of
from datamask_pl.mask.parts import BlockEntry
from datamask_pl.mask.summary import format_table
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective

# Samples of the untimed first call of every method.
NUM_FIRST = 500
MASK, RELEARNED = "mask", "relearned"
# Relative difference between f now and f in the manifest above which the data are assumed to have changed.
_F_TOLERANCE = 1e-3


def compare(
    run: str | None = None,
    *,
    mask: str | None = None,
    source: str | list[str] | None = None,
    output: str | None = None,
    blocks: int | list[int] | None = None,
    baselines: list[str] | None = None,
    max_samples: int = 25_000,
    near_duplicate: float = 0.95,
    seed: int = 0,
) -> None:
    """Compares a mask with random, top quality, greedy and other baselines that keep as many samples.

    Prints a table and writes comparison.csv and comparison.json. f is the run's objective with its weights and scales;
    each greedy maximises quality with the same weight and one diversity term. For an exported mask, f is the objective
    of the run whose logits it was made from, and the run's method is rerun for the new budget (row `relearned`).

    Args:
        run: folder of the run, as fit prints it at the end.
        mask: folder of a mask, instead of the run, such as one that export made.
        source: the files from which the mask was learned, if they have moved.
        output: folder for the tables. Default: the run's folder, or NAME-evidence next to a mask outside a run.
        blocks: block indices, as 3 or [0, 3]. Default: the first finished block.
        baselines: which to compare with, as [random, semdedup]: random, top_quality, greedy_facility_location,
            greedy_pairwise, greedy_disf, disf_batches, disf_published, leverage_score, semdedup, semdedup_quality.
            Default: all but disf_batches and disf_published.
        max_samples: for larger blocks, a random subset of this size is compared, and the run's method is rerun on it
            (row `relearned`). Greedy needs the square of this number of floats: 2.5 GB for 25,000.
        near_duplicate: cosine above which two samples are near-duplicates.
        seed: of the random subset and of random choices in the baselines. For a whole block, `random` is the mask that
            fit drew.

    Raises:
        ConfigError: If an option is out of range, or the mask was learned from other files.
        DataFileError: If there is no mask, or a file is missing or has changed.
        SchemaError: If a column is missing.
        ObjectiveError: If the run's objective is not finite on a baseline.
    """
    _check_options(max_samples=max_samples, near_duplicate=near_duplicate, seed=seed)
    found, folder = find_mask(run, mask, output)
    finished = open_run(found, folder, source=source)
    wanted = _wanted_blocks(finished, blocks)
    sizes = [finished.manifest.blocks[index].num_samples for index in wanted]
    chosen = DEFAULT_BASELINES if baselines is None else baselines
    names = check_baselines(chosen, num_samples=min(max(sizes), max_samples))
    check_replaceable("output", folder / COMPARISON_JSON, _is_comparison)
    check_replaceable("output", folder / COMPARISON_CSV, _is_comparison)
    # opened first, so that a read-only folder is noticed before the work
    with atomic_path(folder / COMPARISON_CSV) as csv_path:
        compared = _compare_blocks(finished, wanted, names, max_samples=max_samples, cosine=near_duplicate, seed=seed)
        comparison = Comparison(
            plan_hash=finished.manifest.plan_hash,
            settings=finished.manifest.settings,
            near_duplicate=near_duplicate,
            seed=seed,
            num_threads=torch.get_num_threads(),
            blocks=compared,
        )
        csv_path.write_text(comparison.to_csv(), encoding="utf-8")
        # separately, so that an error names its own file
        with atomic_path(folder / COMPARISON_JSON) as json_path:
            json_path.write_text(comparison.to_json(), encoding="utf-8")
    for block in compared:
        print(_describe(block))
    print(describe_legend(near_duplicate))
    print(f"written {folder / COMPARISON_CSV}, {folder / COMPARISON_JSON}")
    print(f"next    {program()} report --{'run' if run else 'mask'} {shlex.quote(run or str(mask))}")


def _is_comparison(path: AnyPath) -> bool:
    """Whether a file begins as the table or the record that `compare` writes."""
    return has_mark(path, "block,name,f,") or (has_mark(path, '"format": ') and has_mark(path, '"plan_hash": '))


def _compare_blocks(
    run: FinishedRun,
    wanted: Sequence[int],
    names: Sequence[BaselineName],
    *,
    max_samples: int,
    cosine: float,
    seed: int,
) -> list[ComparedBlock]:
    with tqdm(total=len(wanted) * len(names), disable=None, leave=False, unit="mask") as bar:
        return [
            _compare_block(run, index, names, max_samples=max_samples, cosine=cosine, seed=seed, advance=bar.update)
            for index in wanted
        ]


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
    entry = run.manifest.blocks[index]
    ground, mask_N, notes = _read_samples(run, index, max_samples=max_samples, seed=seed)
    scale_by_name = run.scales(index)
    scales = torch.tensor(list(scale_by_name.values()), dtype=torch.float64)
    masks, seconds = {MASK: mask_N}, {MASK: entry.seconds or 0.0}
    is_whole = ground.num_samples == entry.num_samples
    few = _sample_of(ground)
    if (run.is_exported or not is_whole) and run.can_relearn:
        masks[RELEARNED], seconds[RELEARNED] = _timed(partial(run.relearn, scales=scales), few, ground)
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
    notes += _notes(run, entry, rows[0].f, is_whole=is_whole)
    return ComparedBlock(index, len(mask_N), ground.num_selected, _formula(run.objective, scales), notes, rows)


def _notes(run: FinishedRun, entry: BlockEntry, f: float, *, is_whole: bool) -> list[str]:
    """Caveats of a block's numbers, other than its subset of samples."""
    notes = []
    if is_whole and entry.mask is not None and abs(f - entry.mask.f) > _F_TOLERANCE * abs(entry.mask.f):
        notes.append(
            f"f of the mask is {f:.6g} now and {entry.mask.f:.6g} in the manifest: features, qualities or the "
            "objective have changed since the run."
        )
    if run.limits:
        notes.append(
            f"the mask respects {', '.join(run.limits)}; the baselines ignore them and only keep the same number of "
            "samples, so they have more freedom."
        )
    if run.is_exported:
        note = "the mask was exported from the logits of a run, whose objective, scales and seconds are shown."
        rerun = f" {RELEARNED}: the run's method for this budget." if run.can_relearn else ""
        return [*notes, note + rerun]
    return [
        *notes,
        "the mask's seconds are those of the run: the whole block on its machine, with first calls, without reading.",
    ]


def _choose(name: BaselineName, ground: GroundSet, *, quality_weight: float, seed: int) -> Tensor:
    """The mask of a baseline."""
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
    """A mask and its seconds, after a first call on a few samples, which loads and compiles."""
    choose(few)
    started_s = time.perf_counter()
    mask_N = choose(ground)
    return mask_N, time.perf_counter() - started_s


def _sample_of(ground: GroundSet) -> GroundSet:
    """The first samples of the block, with the same share to keep."""
    num_few = min(ground.num_samples, NUM_FIRST)
    num_selected = max(1, num_few * ground.num_selected // ground.num_samples)
    rows = slice(0, num_few)
    return GroundSet.of(features_ND=ground.features(rows), quality_N=ground.quality_N[rows], budget=num_selected)


def _read_samples(run: FinishedRun, index: int, *, max_samples: int, seed: int) -> tuple[GroundSet, Tensor, list[str]]:
    """The compared samples of a block, their mask, and notes on the subset."""
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
        f"{max_samples:,} random samples of {block.num_samples:,} (max_samples). The mask was learned for the whole "
        "block and is restricted to these samples, for which the baselines choose, so its f is too low. "
    )
    if run.can_relearn:
        note += f"Compare the baselines with {RELEARNED}: the run's method on these samples."
    else:
        note += "Only whole blocks give a fair comparison."
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
    """The run's scale of a term; measured as the run does for a diversity term that the run lacks."""
    if name in scales:
        return scales[name]
    if not run.learner.method.calibrate:
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
            f"blocks must be finished ones: {len(finished)} of {run.manifest.num_blocks}, from {finished[0]} to "
            f"{finished[-1]}; got {missing or wanted}."
        )
    return wanted


def _check_options(*, max_samples: int, near_duplicate: float, seed: int) -> None:
    if max_samples < 1:
        raise ConfigError(f"max_samples must be at least 1, got {max_samples}.")
    if not 0.0 < near_duplicate < 1.0:
        raise ConfigError(f"near_duplicate must be a cosine above 0 and below 1, got {near_duplicate}.")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be 0 <= seed < 2^63, got {seed}.")


def _describe(block: ComparedBlock) -> str:
    """The table of a block, for the terminal."""
    head = f"block {block.index}: {block.num_selected:,} of {block.num_samples:,} samples, {block.formula}"
    rows = [["", *(title for title, _ in TABLE.values())], *([row.name, *format_row(row)] for row in block.rows)]
    notes = [f"note: {note}" for note in block.notes]
    return "\n".join(["", head, *format_table(rows, name_width=25, cell_width=10), *notes])


def _formula(objective: JointObjective, scales: Tensor) -> str:
    parts = [
        f"{term.weight:g} {term.name}" + (f" / {scale:.4g}" if scale != 1.0 else "")
        for term, scale in zip(objective.terms, scales.tolist(), strict=True)
        if term.weight > 0 and scale > 0
    ]
    return f"f = {' + '.join(parts) or '0'}"
