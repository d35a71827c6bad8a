"""What `compare` found out, on disk: comparison.csv for tables, comparison.json for `report`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datamask_pl.errors import DataFileError
from datamask_pl.mask.parts import check_kinds

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


@dataclass(frozen=True)
class Row:
    """What one way to choose is worth on one block.

    Attributes:
        block: index of the block.
        name: `mask`; `relearned`, for a part of a block and for a mask that was exported; or that of a competitor.
        f: the run's objective, with its weights and scales.
        quality: mean scaled quality.
        facility_location: see `evidence.measures`, as are the next two; higher is better in each.
        pairwise: minus the mean cosine of two kept samples.
        disf: minus the squared norm of the kept samples' covariance.
        seconds: it took, after a first call for a few samples; of the mask as the run did.
        overlap: with the mask, Jaccard.
        near_duplicates: share of the kept samples with another kept one above the cosine.
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
    """What was found out about one block.

    Attributes:
        index: of the block.
        num_samples: that were compared.
        num_selected: of them that each way keeps.
        formula: f in words.
        notes: what a reader has to know.
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
    """All that was found out.

    Attributes:
        plan_hash: of the mask's data.
        settings: of the mask.
        near_duplicate: cosine above which two samples are near-duplicates.
        seed: of what was random.
        num_threads: of torch, by which the seconds go.
        blocks: that were compared.
    """

    plan_hash: str
    settings: dict[str, Any]
    near_duplicate: float
    seed: int
    num_threads: int
    blocks: list[ComparedBlock]

    def to_csv(self) -> str:
        """A line for each row of each block."""
        rows = [asdict(row) for block in self.blocks for row in block.rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_json(self) -> str:
        """Everything, with a checksum: a digit that has changed would be shown as if it had been measured."""
        content = {"format": COMPARISON_FORMAT, **asdict(self)}
        return json.dumps({**content, "sha256": _sum_of(content)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """What `to_json` made of one.

        Raises:
            DataFileError: If the file cannot be read, is of another version, or has changed since it was written.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            check_kinds(content, {"format": int})
            if content.pop("format") != COMPARISON_FORMAT:
                raise ValueError("it is of another version")
            if content.pop("sha256", None) != _sum_of({"format": COMPARISON_FORMAT, **content}):
                raise ValueError("its checksum is wrong")
            return _parse(content)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataFileError(f"{path} cannot be read ({reason}); run compare again or delete it.") from error


def format_row(row: Row) -> list[str]:
    """The numbers of a row, in the order of TABLE."""
    return [format(getattr(row, name), form) for name, (_, form) in TABLE.items()]


def describe_legend(near_duplicate: float) -> str:
    """What the columns of the table mean."""
    return (
        "quality is scaled; higher is better in f, quality, facility, pairwise and DiSF; overlap: Jaccard, with the "
        f"mask;\nnear-dup.: kept samples with another kept one above a cosine of {near_duplicate:g};\n"
        "seconds: each method was called for a few samples first; what a first call loads and compiles is left out"
    )


def _sum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(content: dict[str, Any]) -> Comparison:
    """Raises a ValueError or TypeError if something is missing, of another kind or too much."""
    check_kinds(content, _ABOUT)
    blocks = []
    for block in content["blocks"]:
        check_kinds(block, _BLOCK)
        for row in block["rows"]:
            check_kinds(row, _ROW)
        blocks.append(ComparedBlock(**{**block, "rows": [Row(**row) for row in block["rows"]]}))
    if not all(block.rows for block in blocks):
        raise ValueError("a block has no rows")
    return Comparison(**{**content, "blocks": blocks})
