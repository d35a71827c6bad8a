"""What masks keep of each group, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from datamask_pl.mask.manifest import MANIFEST_NAME


def describe_budgets(blocks: Iterable[dict[str, Any]], *, max_groups: int = 20) -> list[str]:
    """Lines that say what is kept of each group over all blocks, where there are limits; of the largest groups."""
    groups: dict[str, list[float]] = {}
    keys = ("num_selected", "num_samples", "kept_cost", "budget", "cost")
    for group in (group for block in blocks for group in block.get("budgets", [])):
        before = groups.get(group["name"], [0.0] * len(keys))
        # groups that are not limited by themselves have no budget
        groups[group["name"]] = [old + (group[key] or 0.0) for old, key in zip(before, keys, strict=True)]
    if not groups:
        return []
    largest = sorted(groups, key=lambda name: -groups[name][-1])[:max_groups]
    width = max(12, *(len(name) + 2 for name in largest))
    lines = ["", f"{'group':<{width}}{'kept':>14}{'of':>14}{'cost kept':>16}{'budget':>16}{'of':>16}"]
    for name in largest:
        kept, whole, *costs = groups[name]
        lines.append(
            f"{name or 'all':<{width}}{kept:>14,.0f}{whole:>14,.0f}" + "".join(f"{cost:>16,.6g}" for cost in costs)
        )
    if len(groups) > max_groups:
        lines.append(f"and {len(groups) - max_groups} more groups, in {MANIFEST_NAME}")
    return lines
