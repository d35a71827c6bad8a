"""What was kept by group and by length: a mask must not be a filter for long texts in disguise.

Shapes: N rows, M rows of a piece, K kept rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MAX_GROUPS = 25
Pieces = Iterable[tuple[pa.Array, NDArray[np.bool_]]]
"""A column piece by piece, each with which of its rows are kept."""


@dataclass(frozen=True)
class Share:
    """Rows that have something in common.

    Attributes:
        label: what.
        num_rows: how many.
        num_kept: of them.
    """

    label: str
    num_rows: int
    num_kept: int

    @property
    def share(self) -> float:
        """Kept of them, in [0, 1]."""
        return self.num_kept / self.num_rows


def by_group(pieces: Pieces) -> list[Share]:
    """What was kept of each group, the largest first; of more than 25, the smallest are put together.

    Args:
        pieces: a column of any plain type; null is a group.

    Example:
        >>> by_group([(pa.array(["a", "b", "a"]), np.array([True, False, False]))])
        [Share(label='a', num_rows=2, num_kept=1), Share(label='b', num_rows=1, num_kept=0)]
    """
    num_rows: Counter[Any] = Counter()
    num_kept: Counter[Any] = Counter()
    for values, keep_M in pieces:
        for counter, part in ((num_rows, values), (num_kept, values.filter(pa.array(keep_M)))):
            for entry in pc.value_counts(part):
                counter[entry["values"].as_py()] += entry["counts"].as_py()
    # among groups of one size by name, so that two reports show one table
    ordered = sorted(num_rows, key=lambda name: (-num_rows[name], str(name)))
    shares = [
        Share("(none)" if name is None else str(name), num_rows[name], num_kept[name]) for name in ordered[:MAX_GROUPS]
    ]
    if rest := ordered[MAX_GROUPS:]:
        kept = sum(num_kept[name] for name in rest)
        shares.append(Share(f"{len(rest):,} smaller groups", sum(num_rows[name] for name in rest), kept))
    return shares


@dataclass(frozen=True)
class Lengths:
    """What was kept by length.

    Attributes:
        unit: what was counted.
        tenths: of the rows, from the shortest to the longest.
        median: over all rows.
        median_kept: over those that are kept.
        num_null: rows without a length.
    """

    unit: str
    tenths: list[Share]
    median: float
    median_kept: float
    num_null: int


def by_length(pieces: Pieces) -> Lengths | None:
    """What was kept of each tenth of the rows by length.

    Args:
        pieces: a column of numbers, or of texts, whose characters are counted.

    Returns:
        None if no row has a length.

    Example:
        >>> by_length([(pa.array(["a", "bbb", None]), np.array([True, False, False]))]).tenths
        [Share(label='1', num_rows=1, num_kept=1), Share(label='3', num_rows=1, num_kept=0)]
    """
    lengths, keeps = [np.zeros(0)], [np.zeros(0, dtype=bool)]
    is_text, num_null = False, 0
    for values, keep_M in pieces:
        is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        numbers = pc.cast(pc.utf8_length(values) if is_text else values, pa.float64(), safe=False)
        length_M = numbers.to_numpy(zero_copy_only=False)
        is_known_M = np.isfinite(length_M)
        num_null += int((~is_known_M).sum())
        lengths.append(length_M[is_known_M])
        keeps.append(keep_M[is_known_M])
    length_N, keep_N = np.concatenate(lengths), np.concatenate(keeps)
    if not length_N.size:
        return None
    # the longest of each tenth; equal lengths are in one
    upper = np.unique(np.quantile(length_N, np.arange(1, 11) / 10, method="inverted_cdf"))
    tenth_N = np.searchsorted(upper, length_N, side="left")
    tenths = []
    for index in np.unique(tenth_N):
        is_in_N = tenth_N == index
        low, high = length_N[is_in_N].min(), length_N[is_in_N].max()
        label = f"{low:,.6g}" + (f" to {high:,.6g}" if high > low else "")
        tenths.append(Share(label, int(is_in_N.sum()), int(keep_N[is_in_N].sum())))
    median_kept = float(np.median(length_N[keep_N])) if keep_N.any() else float("nan")
    return Lengths(
        "characters" if is_text else "as the column counts", tenths, float(np.median(length_N)), median_kept, num_null
    )
