"""Makes another mask from the logits of a finished one: another ratio, cost or quota, without training.

Shapes: N samples of a block.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
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
from datamask_pl.io.paths import AnyPath, any_path, full_name, list_names, redact
from datamask_pl.mask.columns import join_columns
from datamask_pl.mask.limits import DEFAULT_ID_COLUMN, OF_RUN, MaskLimits
from datamask_pl.mask.manifest import Manifest, part_schema, read_columns, read_complete
from datamask_pl.mask.parts import BlockEntry, list_parts, part_name, read_part, write_table
from datamask_pl.mask.summary import describe_budgets

_AGAIN = "it is made again from the logits"


def export(
    mask: str,
    output: str,
    *,
    select_ratio: float | Literal["of_run"] = OF_RUN,
    cost_column: str | None = OF_RUN,
    group_column: str | None = OF_RUN,
    group_budget: Literal["of_run", "proportional", "free"] | dict[str, float] = OF_RUN,
    keep_ids: str | list[str] | None = OF_RUN,
    drop_ids: str | list[str] | None = OF_RUN,
    source: str | list[str] | None = None,
    id_column: str | None = None,
) -> None:
    """Makes another mask from the logits of a finished one, block by block, without training.

    Every block keeps the samples of the highest logits that the budget allows. The limits of the mask are those of the
    new one, too, unless another one is passed here; `null` removes one, as in `--drop_ids null`. `apply` takes the new
    mask as any other. A limit that is known before is better passed to `fit`, which learns what is best within it.

    Memory: a part of the mask at a time. With source, all ids of the mask and a table of them, see `apply`, and the
    columns named.

    Args:
        mask: folder of a finished mask, which fit names at its end.
        output: folder for the new mask. If it was begun before, with the same options, it is finished.
        select_ratio: share of each block to keep, above 0 and at most 1; of its cost with cost_column. `of_run`, here
            and below, is the value that the mask was made with.
        cost_column: column of costs, such as numbers of tokens: of the mask's parts, where fit writes its own as
            `cost`, or of source.
        group_column: column of groups that get a budget each: of the mask's parts, where fit writes its own as `group`,
            or of source. A new one also needs its own group_budget if that is not `proportional`.
        group_budget: `proportional` keeps select_ratio of every group; ratios by name, such as {code: 0.3}, keep
            another share of the groups that they name; `free` counts groups and does not limit them.
        keep_ids: parquet files with the id column, or text files with one id per line: samples to always keep.
        drop_ids: the same, of samples to always drop.
        source: parquet files, folders, globs or fsspec URLs that have the columns named, and the ids of all samples of
            the mask once; several as ["one", "two"]. Joined by id.
        id_column: the column of the ids in source, and in parquet files of ids. Default: the one of the run.

    Raises:
        ConfigError: If the mask is not finished, an option cannot be, or the output holds something else.
        BudgetError: If a budget is out of range, or cannot be met by a block; names the numbers.
        SchemaError: If a column is missing or of a type that cannot be used.
        DataFileError: If a file is missing, cannot be read, or cannot be written.
        BadRowError: If a cost or a group cannot be used, or a sample is not in source, or there more than once.
    """
    if source is not None and {cost_column, group_column} <= {None, OF_RUN}:
        raise ConfigError("source is for its columns; name one in cost_column or group_column, or omit it.")
    folder, target = any_path("mask", mask), any_path("output", output)
    if full_name(folder) == full_name(target):
        raise ConfigError(f"output {output} is the mask's own folder; choose another.")
    manifest = read_complete(folder)
    schema = part_schema(folder)
    passed: dict[str, Any] = {
        "select_ratio": select_ratio,
        "cost_column": cost_column,
        "group_column": group_column,
        "group_budget": group_budget,
        "keep_ids": keep_ids,
        "drop_ids": drop_ids,
    }
    limits, taken_over = _resolve(passed, MaskLimits.of(manifest, schema.names), id_column)
    spec = BudgetSpec(limits.select_ratio, limits.group_budget)
    if limits.group_column is None and limits.group_budget != "proportional":
        raise ConfigError("group_budget needs groups; name the column that holds them in group_column.")
    forced = read_forced_ids(
        limits.keep_ids, limits.drop_ids, id_column=limits.id_column, id_type=schema.field("id").type
    )
    settings = _settings(limits, spec, source, forced)
    blocks = _Blocks(folder, manifest, spec, forced, limits, taken_over)
    _check_output(target, manifest, settings, blocks)
    blocks.find_columns(source, limits.id_column)
    # all of them before any file is written
    blocks.check()
    new = replace(manifest, settings=settings, config=limits.written().recorded_in(manifest.config), blocks={})
    for block in range(manifest.num_blocks):
        new.blocks[block] = read_part(target, block, consequence=_AGAIN) or blocks.write(block, target, settings)
    new.write(target)
    print(_describe(new, folder, target, note=blocks.find_unmatched_ids(), limits=limits, taken_over=taken_over))


def _settings(
    limits: MaskLimits, spec: BudgetSpec, source: str | list[str] | None, forced: ForcedIds | None
) -> dict[str, Any]:
    """What decides the new mask, by the name of its option."""
    return {
        "export.select_ratio": limits.select_ratio,
        "export.cost_column": limits.cost_column,
        "export.group_column": limits.group_column,
        "export.group_budget": spec.group_budget,
        "export.source": source,
        **{f"export.{name}": digest for name, digest in ({} if forced is None else forced.digests()).items()},
    }


def _resolve(passed: dict[str, Any], before: MaskLimits, id_column: str | None) -> tuple[MaskLimits, set[str]]:
    """The limits of the new mask, and which options are those of the old one."""
    if passed["group_column"] != OF_RUN and passed["group_budget"] == OF_RUN:
        # quotas are of the groups of another column
        passed = {**passed, "group_budget": "proportional"}
    limits = replace(before, **{name: value for name, value in passed.items() if value != OF_RUN})
    taken_over = {name for name, value in passed.items() if value == OF_RUN}
    return replace(limits, id_column=id_column or before.id_column), taken_over


class _Blocks:
    """The blocks of a mask, and what limits the new one.

    Args:
        folder: of the mask.
        manifest: of the mask.
        spec: how much is kept.
        forced: ids to always keep or drop.
        limits: of the new mask.
        taken_over: which of them are those of the mask.
    """

    def __init__(
        self,
        folder: AnyPath,
        manifest: Manifest,
        spec: BudgetSpec,
        forced: ForcedIds | None,
        limits: MaskLimits,
        taken_over: Collection[str],
    ) -> None:
        self._folder, self._manifest, self._spec, self._forced = folder, manifest, spec, forced
        self._cost_column, self._group_column = limits.cost_column, limits.group_column
        self._taken_over = taken_over
        self._joined: list[pa.Table] | None = None
        self._found: list[NDArray[np.int64]] = []

    def find_columns(self, source: str | list[str] | None, id_column: str) -> None:
        """Looks for the columns named, and joins them if they are the source's."""
        schema = part_schema(self._folder)
        options = self._options(is_of_source=False) | ({} if source is not None else self._options(is_of_source=True))
        if missing := [name for name in options.values() if name not in schema.names]:
            raise SchemaError(
                f"{self._folder / part_name(0)} has no column {missing[0]!r}; its columns are: "
                f"{', '.join(schema.names)}. Pass source, files that have it and the ids."
            )
        self._check_types(part_name(0), {option: schema.field(name).type for option, name in options.items()})
        if source is None:
            return
        options = self._options(is_of_source=True)
        files = with_rows(read_sources(source, id_column), "source")
        for file in files:
            types = {option: find_column(file.schema, file.name, name, option) for option, name in options.items()}
            self._check_types(file.name, types)
        names = list(dict.fromkeys(options.values()))
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

    def _options(self, *, is_of_source: bool) -> dict[str, str]:
        """Columns by option: those that are passed, which a source may have, or those that are taken over."""
        named = {"cost_column": self._cost_column, "group_column": self._group_column}
        return {
            option: name
            for option, name in named.items()
            if name is not None and (option not in self._taken_over) == is_of_source
        }

    def _check_types(self, file_name: str, types: dict[str, pa.DataType]) -> None:
        if self._cost_column is not None and "cost_column" in types:
            check_cost_type(file_name, self._cost_column, types["cost_column"])
        if self._group_column is not None and "group_column" in types:
            check_group_type(file_name, self._group_column, types["group_column"])

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
        batches: dict[str, pa.RecordBatch] = {}
        for is_of_source in (False, True):
            options = self._options(is_of_source=is_of_source)
            if options:
                is_joined = is_of_source and self._joined is not None
                names = list(dict.fromkeys(options.values()))
                table = self._joined[block] if is_joined else self._read(block, names)  # type: ignore[index]
                batches |= dict.fromkeys(options, table.combine_chunks().to_batches()[0])

        def refuse(is_bad_N: NDArray[np.bool_], word: Callable[[int], str]) -> None:
            rows = np.flatnonzero(is_bad_N)
            if rows.size:
                raise BadRowError(
                    f"block {block}, row {rows[0]} of its part: {word(int(rows[0]))}; repair the column, "
                    f"{rows.size - 1} more rows of the block are like it."
                )

        cost_N, groups = None, None
        if self._cost_column is not None:
            cost_N = read_costs(batches["cost_column"], self._cost_column, refuse)
        if self._group_column is not None:
            groups = read_groups(batches["group_column"], self._group_column, refuse)
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


def _describe(
    manifest: Manifest,
    folder: AnyPath,
    target: AnyPath,
    *,
    note: str | None,
    limits: MaskLimits,
    taken_over: Collection[str],
) -> str:
    blocks = list(manifest.blocks.values())
    kept, whole = sum(entry.num_selected for entry in blocks), sum(entry.num_samples for entry in blocks)
    lines = [
        f"kept {kept:,} of {whole:,} samples in {len(blocks)} block{'s' * (len(blocks) > 1)}, by the logits of {folder}"
    ]
    shown_limits = [
        f"{name} {value}"
        for name, value in limits.named().items()
        if name in taken_over and value not in (None, "proportional")
    ]
    lines += [*describe_budgets(blocks), *([] if note is None else [f"note    {note}"])]
    lines.append(f"limits  of the mask, taken over: {', '.join(shown_limits) or 'none'}")
    lines.append(f"mask    {target}")
    shown = shlex.quote(str(target))
    lines.append(f"next    {_apply_command(manifest, target)}")
    lines.append(f"show    {program()} compare --mask {shown} && {program()} report --mask {shown}")
    return "\n".join(lines)


def _apply_command(manifest: Manifest, target: AnyPath) -> str:
    """The command that makes the filtered data set."""
    data = (manifest.config or {}).get("data") or {}
    path, id_column = data.get("path", "SHARDS"), data.get("id_column", DEFAULT_ID_COLUMN)
    source = redact(path) if isinstance(path, str) else json.dumps([redact(item) for item in path])
    output = f"{str(target).rstrip('/')}-filtered"
    words = [*program().split(), "apply", "--mask", str(target), "--source", source, "--output", output]
    return shlex.join(words if id_column == DEFAULT_ID_COLUMN else [*words, "--id_column", id_column])
