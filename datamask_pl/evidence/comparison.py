"""Which baselines a mask is compared with, and the record of a comparison.

`compare` writes the record as comparison.csv for tables and comparison.json for `report`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.evidence.baselines.catalog import BASELINES, BaselineName
from datamask_pl.io.records import DAMAGES, check_kinds, decode, encode
from datamask_pl.objectives import DiversityName

# Quick ones, one of each kind.
DEFAULT_BASELINES: list[BaselineName] = [
    "random",
    "top_quality",
    "greedy_facility_location",
    "greedy_pairwise",
    "greedy_disf",
    "leverage_score",
    "semdedup",
    "semdedup_quality",
]
# The diversity term that a baseline maximises together with quality.
DIVERSITY_OF: dict[BaselineName, DiversityName] = {
    "greedy_facility_location": "facility_location",
    "greedy_pairwise": "pairwise",
    "greedy_disf": "disf",
    "disf_batches": "disf",
}
# Limit of the similarities of all pairs, which greedy_facility_location holds.
MAX_SIMILARITY_BYTES = 4_000_000_000
COMPARISON_CSV, COMPARISON_JSON = "comparison.csv", "comparison.json"
COMPARISON_FORMAT = 2
TABLE = {
    "f": ("f", ".6g"),
    "quality": ("quality", ".4f"),
    "facility_location": ("facility", ".4f"),
    "pairwise": ("pairwise", ".5f"),
    "disf": ("DiSF", ".5f"),
    "seconds": ("seconds", ".2f"),
    "overlap": ("overlap", ".1%"),
    "near_duplicates": ("near-dup.", ".1%"),
}
HIGHER_IS_BETTER = ("f", "quality", "facility_location", "pairwise", "disf")
_ABOUT = {"plan_hash": str, "settings": dict, "near_duplicate": float, "seed": int, "num_threads": int, "blocks": list}
_BLOCK = {"index": int, "num_samples": int, "num_selected": int, "formula": str, "notes": list, "rows": list}
_ROW = {"block": int, "name": str, **dict.fromkeys(TABLE, float)}


def quality_weight_of(name: BaselineName, quality_weight: float, *, scale_of: Callable[[str], float]) -> float:
    """The quality weight of a baseline at which quality counts as much as in the run.

    Greedy maximises raw terms. w Q / a + (1 - w) D / b is, up to a factor, v Q + (1 - v) D with
    v = (w / a) / (w / a + (1 - w) / b). `leverage_score` has quality and diversity on one scale, and takes w itself.
    DiSF as published has no quality.

    Args:
        name: of the baseline.
        quality_weight: w, in [0, 1].
        scale_of: scale by which the run divides a term, `quality` or a diversity term; 0 if the term is constant and
            does not count.

    Returns:
        In [0, 1]; w where neither term counts.

    Example:
        >>> quality_weight_of("greedy_disf", 0.5, scale_of={"quality": 3.0, "disf": 1.0}.__getitem__)
        0.25
    """
    if name == "disf_published":
        return 0.0
    if name not in DIVERSITY_OF:
        return quality_weight
    quality_scale, diversity_scale = scale_of("quality"), scale_of(DIVERSITY_OF[name])
    quality = quality_weight / quality_scale if quality_scale > 0 else 0.0
    diversity = (1.0 - quality_weight) / diversity_scale if diversity_scale > 0 else 0.0
    return quality / (quality + diversity) if quality + diversity > 0 else quality_weight


def check_baselines(names: Sequence[str], *, num_samples: int) -> list[BaselineName]:
    """Checks that the baselines exist and fit into memory.

    Args:
        names: of baselines.
        num_samples: of the largest problem.

    Returns:
        The names.

    Raises:
        ConfigError: If a name is unknown or repeated, or there are too many samples.
    """
    known = [name for name in BASELINES if name in names]
    if len(known) < len(names):
        raise ConfigError(f"baselines must be distinct names of: {', '.join(BASELINES)}; got {list(names)}.")
    num_bytes = 4 * num_samples**2
    if "greedy_facility_location" in names and num_bytes > MAX_SIMILARITY_BYTES:
        raise ConfigError(
            f"max_samples: greedy_facility_location holds the similarities of all pairs, {num_bytes / 1e9:.1f} GB for "
            f"{num_samples:,} samples; lower max_samples to {int((MAX_SIMILARITY_BYTES / 4) ** 0.5):,} or remove it "
            "from baselines."
        )
    return known


@dataclass(frozen=True)
class Row:
    """The measures of one method on one block.

    Attributes:
        block: index of the block.
        name: `mask`; `relearned`, for a sample of a block and for an exported mask; or of a baseline.
        f: the run's objective, with its weights and scales.
        quality: mean scaled quality.
        facility_location: see `evidence.measures`, as are the next two; higher is better in each.
        pairwise: minus the mean cosine of two kept samples.
        disf: minus the squared norm of the kept samples' covariance.
        seconds: time taken, after a first call on a few samples; for `mask` the time of the run.
        overlap: Jaccard index with the mask.
        near_duplicates: share of kept samples that have another kept sample above the cosine.
    """

    block: int
    name: str
    f: float
    quality: float
    facility_location: float
    pairwise: float
    disf: float
    seconds: float
    overlap: float
    near_duplicates: float


@dataclass(frozen=True)
class ComparedBlock:
    """The methods compared on one block.

    Attributes:
        index: of the block.
        num_samples: samples compared.
        num_selected: samples that each method keeps.
        formula: f as text.
        notes: caveats for the reader.
        rows: the mask first.
    """

    index: int
    num_samples: int
    num_selected: int
    formula: str
    notes: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Comparison:
    """The record of a comparison.

    Attributes:
        plan_hash: of the mask's data.
        settings: of the mask.
        near_duplicate: cosine above which two samples are near-duplicates.
        seed: of the random choices.
        num_threads: torch threads, on which the seconds depend.
        blocks: the blocks compared.
    """

    plan_hash: str
    settings: dict[str, Any]
    near_duplicate: float
    seed: int
    num_threads: int
    blocks: list[ComparedBlock]

    def to_csv(self) -> str:
        """One line per row of each block."""
        rows = [asdict(row) for block in self.blocks for row in block.rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_json(self) -> str:
        """The record with a checksum, so that a changed digit is not shown as a measurement."""
        return encode(asdict(self), version=COMPARISON_FORMAT, has_sum=True)

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Reads what `to_json` wrote.

        Raises:
            DataFileError: If the file cannot be read, has another version, or was changed.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return _parse(decode(text, _ABOUT, version=COMPARISON_FORMAT, has_sum=True))
        except DAMAGES as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataFileError(f"{path} cannot be read ({reason}); run compare again or delete it.") from error


def format_row(row: Row) -> list[str]:
    """The numbers of a row, in the order of TABLE."""
    return [format(getattr(row, name), form) for name, (_, form) in TABLE.items()]


def describe_legend(near_duplicate: float) -> str:
    """Explains the columns of the table."""
    return (
        "quality is scaled; higher is better in f, quality, facility, pairwise and DiSF; overlap: Jaccard index with "
        f"the mask;\nnear-dup.: share of kept samples with another kept sample above a cosine of {near_duplicate:g};\n"
        "seconds: without loading and compiling, which a first call on a few samples does"
    )


def _parse(content: dict[str, Any]) -> Comparison:
    """Raises ValueError or TypeError if a key is missing, unknown or of another type."""
    blocks = []
    for block in content["blocks"]:
        check_kinds(block, _BLOCK)
        for row in block["rows"]:
            check_kinds(row, _ROW)
        blocks.append(ComparedBlock(**{**block, "rows": [Row(**row) for row in block["rows"]]}))
    if not all(block.rows for block in blocks):
        raise ValueError("a block has no rows")
    return Comparison(**{**content, "blocks": blocks})
