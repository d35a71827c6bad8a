"""A run in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from datamask_pl.data.types import Values

# What a manifest says of each block, and what it is called.
COMPARED = {"mask": "mask", "random": "random", "top_quality": "top quality"}


@dataclass(frozen=True)
class Summary:
    """Finished blocks taken together.

    Attributes:
        num_blocks: how many.
        num_samples: of them all.
        num_selected: kept of them.
        num_dropped: bad rows left out.
        seconds: sum over the blocks.
        values: of the mask, a random one and that of the highest quality, by the keys of COMPARED; means over the
            blocks, weighted by their samples. None where a block says nothing of them, as `export` does not.
    """

    num_blocks: int
    num_samples: int
    num_selected: int
    num_dropped: int
    seconds: float
    values: dict[str, Values]


def summarize(blocks: Mapping[int, Mapping[str, Any]]) -> Summary:
    """Takes together what a manifest says of its blocks, at least one."""
    about = list(blocks.values())
    values = {}
    for key in COMPARED if all(COMPARED.keys() <= block.keys() for block in about) else ():
        terms = {
            name: _mean((block[key]["terms"][name], block["num_samples"]) for block in about)
            for name in about[0][key]["terms"]
        }
        values[key] = Values(_mean((block[key]["f"], block["num_samples"]) for block in about), terms)
    return Summary(
        num_blocks=len(about),
        num_samples=sum(block["num_samples"] for block in about),
        num_selected=sum(block["num_selected"] for block in about),
        num_dropped=sum(block["num_dropped"] for block in about),
        seconds=sum(block.get("seconds", 0.0) for block in about),
        values=values,
    )


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    values = list(pairs)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
