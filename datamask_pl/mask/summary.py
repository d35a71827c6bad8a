"""A mask in a few numbers, and text tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from datamask_pl.functional.values import Values
from datamask_pl.mask.parts import MANIFEST_NAME, BlockEntry

# The masks whose values a manifest records per block, and their labels.
COMPARED = {"mask": "mask", "random": "random", "top_quality": "top quality"}


@dataclass(frozen=True)
class Summary:
    """Totals over the finished blocks.

    Attributes:
        num_blocks: number of finished blocks.
        num_samples: their samples.
        num_selected: kept samples.
        num_dropped: dropped bad rows.
        seconds: sum over the blocks.
        values: of the mask, a random one and the one of highest quality, by the keys of COMPARED; means over the
            blocks, weighted by their samples. Empty if a block has none, as after `export`.
    """

    num_blocks: int
    num_samples: int
    num_selected: int
    num_dropped: int
    seconds: float
    values: dict[str, Values]


def summarize(blocks: Mapping[int, BlockEntry]) -> Summary:
    """Totals of the manifest's blocks, at least one."""
    entries = list(blocks.values())
    values = {key: _mean_values([(getattr(entry, key), entry.num_samples) for entry in entries]) for key in COMPARED}
    return Summary(
        num_blocks=len(entries),
        num_samples=sum(entry.num_samples for entry in entries),
        num_selected=sum(entry.num_selected for entry in entries),
        num_dropped=sum(entry.num_dropped for entry in entries),
        seconds=sum(entry.seconds or 0.0 for entry in entries),
        values={key: value for key, value in values.items() if value is not None} if all(values.values()) else {},
    )


def _mean_values(pairs: Sequence[tuple[Values | None, int]]) -> Values | None:
    """The weighted mean; None if a block has no value."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    if len(known) < len(pairs):
        return None
    terms = {name: _mean((value.terms[name], weight) for value, weight in known) for name in known[0][0].terms}
    return Values(_mean((value.f, weight) for value, weight in known), terms)


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    values = list(pairs)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def format_table(rows: Sequence[Sequence[str]], *, name_width: int = 12, cell_width: int = 14) -> list[str]:
    """Lines of a text table: names on the left, numbers right-aligned, columns two wider than their longest cell.

    Example:
        >>> format_table([["", "f"], ["mask", "0.5"]], name_width=6, cell_width=5)
        ['          f', 'mask    0.5']
    """
    widths = [max(cell_width, *(len(cell) + 2 for cell in column)) for column in zip(*rows, strict=True)]
    widths[0] = max(name_width, *(len(row[0]) + 2 for row in rows))
    return [
        f"{row[0]:<{widths[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def describe_budgets(blocks: Iterable[BlockEntry], *, max_groups: int = 20) -> list[str]:
    """Table of the samples and costs kept per group over all blocks, largest groups first; empty without limits.

    Its last row is the sum of all groups, if there are several. A group whose name is empty is shown as quotes.
    """
    groups: dict[str, list[float]] = {}
    for group in (group for block in blocks for group in block.budgets or ()):
        # groups without a limit of their own have no budget
        numbers = [group.num_selected, group.num_samples, group.kept_cost, group.budget or 0.0, group.cost]
        groups[group.name] = [old + new for old, new in zip(groups.get(group.name, [0.0] * 5), numbers, strict=True)]
    if not groups:
        return []
    largest = sorted(groups, key=lambda name: -groups[name][-1])[:max_groups]
    shown = [(name or ("''" if len(groups) > 1 else "all"), groups[name]) for name in largest]
    if len(groups) > 1:
        shown.append(("all", [sum(numbers) for numbers in zip(*groups.values(), strict=True)]))
    rows = [["group", "kept", "of", "cost kept", "budget", "of"]]
    for label, numbers in shown:
        rows.append([label, *(f"{count:,.0f}" for count in numbers[:2]), *(f"{cost:,.6g}" for cost in numbers[2:])])
    more = [f"and {len(groups) - max_groups} more groups, in {MANIFEST_NAME}"] if len(groups) > max_groups else []
    return ["", *format_table(rows), *more]
