"""What limited a mask: the budget, quotas and forced ids that another mask made from it takes over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from datamask_pl.mask.manifest import Manifest

DEFAULT_ID_COLUMN = "chunk_id"
# Default of an option of `export`: what the mask was made with.
OF_RUN: Literal["of_run"] = "of_run"
# Where `export` records its limits in the configuration.
_KEY = "export"


@dataclass(frozen=True)
class MaskLimits:
    """The limits of a mask, by the names of the options of `export`.

    Attributes:
        select_ratio: share of each block that is kept.
        cost_column: column of costs in the parts of the mask, None without costs.
        group_column: column of groups in the parts of the mask, None without groups.
        group_budget: see `BudgetSpec`.
        keep_ids: files of ids to always keep.
        drop_ids: files of ids to always drop.
        id_column: column of the ids in these files.
    """

    select_ratio: float = 0.1
    cost_column: str | None = None
    group_column: str | None = None
    group_budget: str | Mapping[str, float] = "proportional"
    keep_ids: str | list[str] | None = None
    drop_ids: str | list[str] | None = None
    id_column: str = DEFAULT_ID_COLUMN

    @classmethod
    def of(cls, manifest: Manifest, columns: Collection[str]) -> MaskLimits:
        """The limits of a mask.

        Args:
            manifest: of the mask. One that was made from Python does not record its forced ids.
            columns: of the mask's parts.
        """
        config = manifest.config or {}
        if isinstance(recorded := config.get(_KEY), dict):
            names = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in recorded.items() if name in names})
        data, model = (config.get(name) or {} for name in ("data", "model"))
        settings = manifest.settings
        return cls(
            select_ratio=float(settings.get("model.select_ratio", model.get("select_ratio", 0.1))),
            # `fit` writes the columns under these names
            cost_column="cost" if "cost" in columns else None,
            group_column="group" if "group" in columns else None,
            group_budget=settings.get("model.group_budget", "proportional"),
            keep_ids=data.get("keep_ids"),
            drop_ids=data.get("drop_ids"),
            id_column=id_column_of(manifest),
        )

    def written(self) -> MaskLimits:
        """The same, with columns by the names that they have in the parts of the new mask."""
        cost, group = self.cost_column and "cost", self.group_column and "group"
        return replace(self, cost_column=cost, group_column=group)

    def named(self) -> dict[str, Any]:
        """Values by option."""
        return {name: value for name, value in vars(self).items() if name != "id_column"}

    def recorded_in(self, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """The configuration of a run, with the limits of another mask made from its logits; None without one."""
        return None if config is None else {**config, _KEY: asdict(self)}


def id_column_of(manifest: Manifest) -> str:
    """The column in which the run found its ids."""
    data = (manifest.config or {}).get("data") or {}
    return str(data.get("id_column", DEFAULT_ID_COLUMN))
