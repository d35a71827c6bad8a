"""Makes another mask from the logits of a finished one: another ratio, cost or quota, without training.

Shapes: N samples of a block.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamask_pl.data.forced_ids import ForcedIds, describe_unmatched_ids, read_forced_ids
from datamask_pl.data.limits import LimitsBuilder
from datamask_pl.data.rows import read_costs, read_groups
from datamask_pl.data.schema import check_cost_type, check_group_type
from datamask_pl.data.shards import read_sources
from datamask_pl.data.types import Limits
from datamask_pl.errors import BadRowError, BudgetError, ConfigError, SchemaError, program
from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.io.parquet import find_column, with_rows
from datamask_pl.io.paths import AnyPath, any_path, full_name, list_names
from datamask_pl.mask.join import join_columns
from datamask_pl.mask.manifest import Manifest, part_schema, read_columns, read_complete
from datamask_pl.mask.parts import BlockEntry, list_parts, part_name, read_part, write_table
from datamask_pl.mask.summary import describe_budgets

_AGAIN = "it is made again from the logits"


def export(
    mask: str,
    output: str,
    *,
    select_ratio: float = 0.1,
    cost_column: str | None = None,
    group_column: str | None = None,
    group_budget: Literal["proportional", "free"] | dict[str, float] = "proportional",
    keep_ids: str | list[str] | None = None,
    drop_ids: str | list[str] | None = None,
    source: str | list[str] | None = None,
    id_column: str = "chunk_id",
) -> None:
    """Makes another mask from the logits of a finished one, block by block, without training.

    Every block keeps the samples of the highest logits that the budget allows. Only the logits of the old mask are
    used: pass all limits of the new one here. `apply` takes it as any other. A limit that is known before is better
    passed to `fit`, which learns what is best within it.

    Memory: a part of the mask at a time. With source, all ids of the mask and a table of them, see `apply`, and the
    columns named.

    Args:
        mask: folder of a finished mask, which fit names at its end.
        output: folder for the new mask. If it was begun before, with the same options, it is finished.
        select_ratio: share of each block to keep, above 0 and at most 1; of its cost with cost_column.
        cost_column: column of costs, such as numbers of tokens: of the mask's parts, where fit writes the one that it
            is given as `cost`, or of source.
        group_column: column of groups that get a budget each: of the mask's parts, where fit writes the one that it is
            given as `group`, or of source.
        group_budget: `proportional` keeps select_ratio of every group; ratios by name, such as {code: 0.3}, keep
            another share of the groups that they name; `free` counts groups and does not limit them.
        keep_ids: parquet files with the id column, or text files with one id per line: samples to always keep.
        drop_ids: the same, of samples to always drop.
        source: parquet files, folders, globs or fsspec URLs that have the columns named, and the ids of all samples of
            the mask once; several as ["one", "two"]. Joined by id.
        id_column: the column of the ids in source, and in parquet files of ids.

    Raises:
        ConfigError: If the mask is not finished, an option cannot be, or the output holds something else.
        BudgetError: If a budget is out of range, or cannot be met by a block; names the numbers.
        SchemaError: If a column is missing or of a type that cannot be used.
        DataFileError: If a file is missing, cannot be read, or cannot be written.
        BadRowError: If a cost or a group cannot be used, or a sample is not in source, or there more than once.
    """
    spec = BudgetSpec(select_ratio, group_budget)
    if group_column is None and group_budget != "proportional":
        raise ConfigError("group_budget needs groups; name the column that holds them in group_column.")
    if source is not None and cost_column is None and group_column is None:
        raise ConfigError("source is for its columns; name one in cost_column or group_column, or omit it.")
    folder, target = any_path("mask", mask), any_path("output", output)
    if full_name(folder) == full_name(target):
        raise ConfigError(f"output {output} is the mask's own folder; choose another.")
    manifest = read_complete(folder)
    id_type = part_schema(folder).field("id").type
    forced = read_forced_ids(keep_ids, drop_ids, id_column=id_column, id_type=id_type)
    settings = {
        "export.select_ratio": select_ratio,
        "export.cost_column": cost_column,
        "export.group_column": group_column,
        "export.group_budget": spec.group_budget,
        "export.source": source,
        **{f"export.{name}": digest for name, digest in ({} if forced is None else forced.digests()).items()},
    }
    blocks = _Blocks(folder, manifest, spec, forced, cost_column, group_column)
    _check_output(target, manifest, settings, blocks)
    blocks.find_columns(source, id_column)
    # all of them before any file is written
    blocks.check()
    new = Manifest(
        plan_hash=manifest.plan_hash,
        files=manifest.files,
        num_blocks=manifest.num_blocks,
        settings=settings,
        versions=manifest.versions,
        config=manifest.config,
    )
    for block in range(manifest.num_blocks):
        new.blocks[block] = read_part(target, block, consequence=_AGAIN) or blocks.write(block, target, settings)
    new.write(target)
    print(_describe(new, folder, target, note=blocks.find_unmatched_ids()))


class _Blocks:
    """The blocks of a mask, and what limits the new one.

    Args:
        folder: of the mask.
        manifest: of the mask.
        spec: how much is kept.
        forced: ids to always keep or drop.
        cost_column: see `export`.
        group_column: see `export`.
    """

    def __init__(
        self,
        folder: AnyPath,
        manifest: Manifest,
        spec: BudgetSpec,
        forced: ForcedIds | None,
        cost_column: str | None,
        group_column: str | None,
    ) -> None:
        self._folder, self._manifest, self._spec, self._forced = folder, manifest, spec, forced
        self._cost_column, self._group_column = cost_column, group_column
        self._joined: list[pa.Table] | None = None
        self._found: list[NDArray[np.int64]] = []

    def find_columns(self, source: str | list[str] | None, id_column: str) -> None:
        """Looks for the columns named, and joins them if they are the source's."""
        names = [name for name in dict.fromkeys((self._cost_column, self._group_column)) if name is not None]
        if source is None:
            schema = part_schema(self._folder)
            if missing := [name for name in names if name not in schema.names]:
                raise SchemaError(
                    f"{self._folder / part_name(0)} has no column {missing[0]!r}; its columns are: "
                    f"{', '.join(schema.names)}. Give source, files that have it and the ids."
                )
            self._check_types(part_name(0), {name: schema.field(name).type for name in names})
            return
        files = with_rows(read_sources(source, id_column), "source")
        options = {self._cost_column: "cost_column", self._group_column: "group_column"}
        for file in files:
            types = {name: find_column(file.schema, file.name, name, options[name]) for name in names}
            self._check_types(file.name, types)
        self._joined = join_columns(self._folder, self._manifest, files, names, id_column=id_column)

    def check(self) -> None:
        """Raises what `write` would of costs, groups and budgets."""
        names: set[str] = set()
        for block in range(self._manifest.num_blocks):
            budget, limits, _ = self._limit(block)
            names |= set(budget.totals.names)
            self._found.append(limits.forced_F)
        if unknown := sorted(set(self._spec.named_ratios) - names):
            raise ConfigError(
                f"group_budget names {', '.join(unknown)}; the groups of the mask are: {', '.join(sorted(names)[:20])}."
            )

    def find_unmatched_ids(self) -> str | None:
        """A text that names ids to keep or to drop that match no sample, if any, once all were checked."""
        return None if self._forced is None else describe_unmatched_ids(self._forced, self._found)

    def logits(self, block: int) -> Tensor:
        """The logits of a block: float32 (N,)."""
        column = self._read(block, ["logit"])["logit"]
        return torch.from_numpy(column.to_numpy().copy())

    def write(self, block: int, target: AnyPath, settings: dict[str, Any]) -> BlockEntry:
        """Writes the new part of a block, and returns its entry."""
        table, logits_N = self._read(block, None), self.logits(block)
        budget, limits, groups = self._limit(block)
        mask_N = budget.fill(logits_N)
        columns = {
            "selected": pa.array(mask_N.numpy()),
            "probability": pa.array(budget.probabilities(logits_N).float().numpy()),
        }
        if limits.cost_N is not None:
            columns["cost"] = pa.array(limits.cost_N.numpy())
        if groups is not None:
            columns["group"] = groups.cast(pa.string()).dictionary_encode()
        for name, column in columns.items():
            index = table.schema.get_field_index(name)
            table = table.append_column(name, column) if index < 0 else table.set_column(index, name, column)
        before = self._manifest.blocks[block]
        entry = BlockEntry(
            part=part_name(block),
            num_samples=table.num_rows,
            num_selected=int(mask_N.sum()),
            num_dropped=before.num_dropped,
            budgets=budget.spent(mask_N),
            made_from={"mask": str(self._folder), "logits": hash_logits(logits_N)},
            # of the run, so that `compare` knows what f is
            scales=before.scales,
            num_steps=before.num_steps,
            seconds=before.seconds,
        )
        write_table(target, block, table, plan_hash=self._manifest.plan_hash, settings=settings, entry=entry)
        return entry

    def _check_types(self, file_name: str, types: dict[str, pa.DataType]) -> None:
        if self._cost_column is not None:
            check_cost_type(file_name, self._cost_column, types[self._cost_column])
        if self._group_column is not None:
            check_group_type(file_name, self._group_column, types[self._group_column])

    def _read(self, block: int, columns: list[str] | None) -> pa.Table:
        columns = part_schema(self._folder).names if columns is None else columns
        return read_columns(self._folder, block, self._manifest, columns)

    def _limit(self, block: int) -> tuple[Constrained, Limits, pa.Array | None]:
        """The budget of a block, what it goes by, and the groups' names where there are any."""
        ids = self._read(block, ["id"])["id"]
        cost_N, groups = self._columns(block)
        builder = LimitsBuilder(self._forced)
        builder.add(cost_N, groups)
        limits = builder.limits(ids.chunks)
        try:
            return Constrained(limits.holdings(), self._spec), limits, groups
        except BudgetError as error:
            raise BudgetError(f"block {block}: {error}") from error

    def _columns(self, block: int) -> tuple[NDArray[np.float64] | None, pa.Array | None]:
        """Costs and groups of a block."""
        names = [name for name in dict.fromkeys((self._cost_column, self._group_column)) if name is not None]
        if not names:
            return None, None
        table = self._read(block, names) if self._joined is None else self._joined[block]
        batch = table.combine_chunks().to_batches()[0]

        def refuse(is_bad_N: NDArray[np.bool_], word: Callable[[int], str]) -> None:
            rows = np.flatnonzero(is_bad_N)
            if rows.size:
                raise BadRowError(
                    f"block {block}, row {rows[0]} of its part: {word(int(rows[0]))}; repair the column, "
                    f"{rows.size - 1} more rows of the block are like it."
                )

        cost_N = None if self._cost_column is None else read_costs(batch, self._cost_column, refuse)
        groups = None if self._group_column is None else read_groups(batch, self._group_column, refuse)
        return cost_N, groups


def hash_logits(logits_N: Tensor) -> str:
    """SHA-256 of the logits that a mask was made from."""
    return hashlib.sha256(logits_N.numpy().tobytes()).hexdigest()


def _check_output(target: AnyPath, manifest: Manifest, settings: dict[str, Any], blocks: _Blocks) -> None:
    """Refuses a folder that holds anything but parts of this very mask.

    Raises:
        ConfigError: If it does.
    """
    try:
        others = [name for name in list_names(target) if not name.startswith((".", "_"))]
    except NotADirectoryError:
        raise ConfigError(f"output {target} is a file; pass the path of a folder.") from None
    parts = list_parts(target)
    if others and not parts:
        raise ConfigError(f"output {target} holds other things, such as {min(others)}; pass a new or empty folder.")
    for block in parts:
        try:
            entry = read_part(target, block, plan_hash=manifest.plan_hash, settings=settings, consequence=_AGAIN)
        except ConfigError as error:
            reason = str(error).split("; pass another")[0].split(". Pass the same")[0]
            raise ConfigError(f"output {target} holds another mask ({reason}); pass another folder.") from error
        if entry is not None and (entry.made_from or {}).get("logits") != hash_logits(blocks.logits(block)):
            raise ConfigError(f"output {target} was made from other logits than {part_name(block)}'s; pass another.")


def _describe(manifest: Manifest, folder: AnyPath, target: AnyPath, *, note: str | None) -> str:
    blocks = list(manifest.blocks.values())
    kept, whole = sum(entry.num_selected for entry in blocks), sum(entry.num_samples for entry in blocks)
    lines = [
        f"kept {kept:,} of {whole:,} samples in {len(blocks)} block{'s' * (len(blocks) > 1)}, by the logits of {folder}"
    ]
    lines += [*describe_budgets(blocks), *([] if note is None else [f"note    {note}"]), f"mask    {target}"]
    shown = shlex.quote(str(target))
    lines.append(f"next    {program()} apply --mask {shown} --source SHARDS --output FOLDER")
    lines.append(f"show    {program()} compare --mask {shown} && {program()} report --mask {shown}")
    return "\n".join(lines)
