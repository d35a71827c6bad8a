"""A block's mask as a parquet file: its columns, and in its footer the entry that the manifest repeats.

A part has one row per sample of the block: the id in its exact type, where the sample came from, whether it is kept,
its logit, inclusion probability and quality, and its cost and group where it has them. It is written whole or not at
all.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datamask_pl.errors import ConfigError, warn
from datamask_pl.functional.values import GroupBudget, Values
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.paths import AnyPath, list_names, read_footer
from datamask_pl.io.records import DAMAGES, check_kinds, checksum, decode, differences

if TYPE_CHECKING:
    from datamask_pl.data.types import BlockResult

FORMAT_VERSION = 1
MANIFEST_NAME = "_manifest.json"
_PART = re.compile(r"part-(\d{5,})\.parquet")
_METADATA_KEY = b"datamask_pl"
_SUM_KEY = b"datamask_pl_sha256"
_PLAIN_TYPES = {
    "source_file": pa.dictionary(pa.int32(), pa.string()),
    "source_row": pa.int64(),
    "selected": pa.bool_(),
    "logit": pa.float32(),
    "probability": pa.float32(),
    "quality": pa.float32(),
    "cost": pa.float64(),
    "group": pa.dictionary(pa.int32(), pa.string()),
}


@dataclass(frozen=True, kw_only=True)
class BlockEntry:
    """What is recorded of a block, in its part and in the manifest. What is None is not written.

    Attributes:
        part: file name of its part.
        num_samples: of the block.
        num_selected: kept of them.
        num_dropped: bad rows that were dropped.
        mask: value of the mask; None, as the next two are, for a mask that `export` made.
        random: value of a random mask of the same budget.
        top_quality: value of the mask of the highest quality.
        scales: what each term was divided by, by name.
        num_steps: steps taken.
        seconds: wall-clock time from the block's first step.
        budgets: what was kept of each group, where there are limits.
        made_from: folder of the mask whose logits `export` took, and their hash.
    """

    part: str | None = None
    num_samples: int
    num_selected: int
    num_dropped: int
    mask: Values | None = None
    random: Values | None = None
    top_quality: Values | None = None
    scales: dict[str, float] | None = None
    num_steps: int | None = None
    seconds: float | None = None
    budgets: list[GroupBudget] | None = None
    made_from: dict[str, str] | None = None

    @classmethod
    def of(cls, result: BlockResult) -> BlockEntry:
        """The entry of a block that was learned."""
        return cls(
            part=part_name(result.block.index),
            num_samples=result.block.num_samples,
            num_selected=result.num_selected,
            num_dropped=result.block.num_dropped,
            mask=result.mask,
            random=result.random,
            top_quality=result.top_quality,
            scales=result.scales,
            num_steps=result.num_steps,
            seconds=round(result.seconds, 3),
            budgets=result.budgets or None,
        )

    @classmethod
    def parse(cls, content: Any) -> BlockEntry:  # noqa: ANN401
        """The entry that `to_json` made an object of. Names that it does not know are ignored.

        Raises:
            Exception: One of `DAMAGES` if it is of another form.
        """
        check_kinds(content, {"num_samples": int, "num_selected": int, "num_dropped": int})
        known = {field.name: content[field.name] for field in fields(cls) if content.get(field.name) is not None}
        for name in {"mask", "random", "top_quality"} & set(known):
            check_kinds(known[name], {"f": float, "terms": dict})
            known[name] = Values(**known[name])
        if "budgets" in known:
            known["budgets"] = [GroupBudget(**budget) for budget in known["budgets"]]
        kinds = {"scales": dict, "made_from": dict, "num_steps": int, "seconds": float}
        check_kinds(known, {name: kind for name, kind in kinds.items() if name in known})
        entry = cls(**known)
        if not 0 <= entry.num_selected <= entry.num_samples or entry.num_dropped < 0:
            raise ValueError(f"{entry.num_selected} of {entry.num_samples} samples are selected")
        return entry

    def to_json(self) -> dict[str, Any]:
        """Plain types by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def part_name(block: int) -> str:
    """File name of a block's part.

    Example:
        >>> part_name(12)
        'part-00012.parquet'
    """
    return f"part-{block:05d}.parquet"


def list_parts(folder: AnyPath) -> list[int]:
    """Blocks whose parts are in a mask folder, in order; empty if there is no such folder."""
    names = list_names(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _PART.fullmatch(name)))


def write_part(
    folder: AnyPath, result: BlockResult, *, files: list[str], plan_hash: str, settings: dict[str, Any]
) -> BlockEntry:
    """Writes the part of a block, with its entry: a part stands for itself.

    Args:
        folder: the mask folder.
        result: what was learned.
        files: names of the source files, by `Block.source_file_N`.
        plan_hash: of the data module.
        settings: of the learner.

    Returns:
        The block's entry.

    Raises:
        DataFileError: If it cannot be written.
    """
    block = result.block
    columns = {
        "id": block.ids,
        "source_file": pa.DictionaryArray.from_arrays(
            pa.array(block.source_file_N.numpy(), pa.int32()), pa.array(files, pa.string())
        ),
        "source_row": pa.array(block.source_row_N.numpy(), pa.int64()),
        "selected": pa.array(result.mask_N.numpy()),
        "logit": pa.array(result.logits_N.numpy().astype(np.float32, copy=False)),
        "probability": pa.array(result.probability_N.numpy().astype(np.float32, copy=False)),
        "quality": pa.array(block.quality_N.cpu().numpy()),
    }
    if block.limits is not None and block.limits.cost_N is not None:
        columns["cost"] = pa.array(block.limits.cost_N.numpy())
    if block.limits is not None and block.limits.group_N is not None:
        columns["group"] = pa.DictionaryArray.from_arrays(
            pa.array(block.limits.group_N.numpy(), pa.int32()), pa.array(block.limits.names, pa.string())
        )
    entry = BlockEntry.of(result)
    write_table(folder, block.index, pa.table(columns), plan_hash=plan_hash, settings=settings, entry=entry)
    return entry


def write_table(
    folder: AnyPath, block: int, table: pa.Table, *, plan_hash: str, settings: dict[str, Any], entry: BlockEntry
) -> None:
    """Writes a part from its columns and its entry.

    Raises:
        DataFileError: If it cannot be written.
    """
    record = {"format": FORMAT_VERSION, "plan_hash": plan_hash, "settings": settings, "about": entry.to_json()}
    text = json.dumps(record).encode()
    table = table.replace_schema_metadata({_METADATA_KEY: text, _SUM_KEY: checksum(text).encode()})
    with atomic_path(folder / part_name(block)) as temporary:
        # no dictionaries: page headers have no checksum, and a damaged one of a dictionary can change all values
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True, use_dictionary=False)


def read_part(
    folder: AnyPath,
    block: int,
    *,
    plan_hash: str | None = None,
    settings: dict[str, Any] | None = None,
    consequence: str = "its block is learned again",
) -> BlockEntry | None:
    """The entry of a block, from the footer of its part.

    Args:
        folder: the mask folder.
        block: index of the block.
        plan_hash: of the data that it must belong to, if given: the caller may replace it if it is damaged.
        settings: that it must have been made with, if given.
        consequence: of a part that is damaged, as text.

    Returns:
        The entry; None if there is no such part, or it is damaged, which a warning says.

    Raises:
        ConfigError: If it is the mask of other data, or was made with other settings, which are named; or, with
            plan_hash, if nothing says that it is a part of a mask.
    """
    path = folder / part_name(block)
    try:
        footer = read_part_footer(path)
    except FileNotFoundError:
        return None
    except DAMAGES as error:
        if plan_hash is not None and not _is_damaged_part(folder, path):
            raise ConfigError(
                f"{path} exists and is not a part of a mask; it is never replaced: pass another folder or move it."
            ) from error
        warn(f"{path} is damaged ({error}); {consequence}.")
        return None
    if plan_hash is not None and footer.plan_hash != plan_hash:
        raise ConfigError(
            f"{path} is the mask of other data (plan {footer.plan_hash[:12]}, here {plan_hash[:12]}); "
            "pass another --run_name or mask.output."
        )
    if settings is not None and (differing := differences(footer.settings, settings)):
        raise ConfigError(
            f"{path} was made with other options: {'; '.join(differing)}. Pass the same ones to continue, or another "
            "--run_name or mask.output."
        )
    return footer.entry


def _is_damaged_part(folder: AnyPath, path: AnyPath) -> bool:
    """Whether a file that cannot be read as a part was one: by its footer or, without one, by the folder's manifest."""
    try:
        return _METADATA_KEY in (read_footer(path).metadata or {})
    except DAMAGES:
        return (folder / MANIFEST_NAME).exists()


@dataclass(frozen=True)
class PartFooter:
    """What a part says of itself.

    Attributes:
        plan_hash: of the data that it belongs to.
        settings: that it was made with.
        entry: of its block.
    """

    plan_hash: str
    settings: dict[str, Any]
    entry: BlockEntry


def read_part_footer(path: AnyPath) -> PartFooter:
    """Reads the footer of a part. Raises one of `DAMAGES` if the part is not whole."""
    footer = read_footer(path)
    metadata = footer.metadata or {}
    text = metadata[_METADATA_KEY]
    if metadata.get(_SUM_KEY, checksum(text).encode()) != checksum(text).encode():
        raise ValueError("the checksum of its block's entry is wrong")
    record = decode(text, {"plan_hash": str, "settings": dict}, version=FORMAT_VERSION)
    entry = BlockEntry.parse(record["about"])
    if footer.num_rows != entry.num_samples:
        raise ValueError(f"{footer.num_rows} rows instead of {entry.num_samples}")
    if entry.part not in (None, path.name):
        raise ValueError(f"it is {entry.part} under another name")
    return PartFooter(record["plan_hash"], record["settings"], entry)


def check_columns(table: pa.Table, entry: BlockEntry, files: list[str]) -> None:
    """Raises a ValueError, or an exception of arrow, if a value cannot be one that `write_part` wrote."""
    if table.num_rows != entry.num_samples:
        raise ValueError(f"{table.num_rows} rows instead of {entry.num_samples}")
    for name in table.column_names:
        if table[name].null_count or not table[name].type.equals(_PLAIN_TYPES.get(name, table[name].type)):
            raise ValueError(f"column {name} is of type {table[name].type} with {table[name].null_count} nulls")
        table[name].validate(full=True)
    if "selected" in table.column_names:
        num_selected = pc.sum(table["selected"]).as_py() or 0
        if num_selected != entry.num_selected:
            raise ValueError(f"{num_selected} samples are selected instead of {entry.num_selected}")
    if "source_row" in table.column_names and (pc.min(table["source_row"]).as_py() or 0) < 0:
        raise ValueError("a source_row is negative")
    if "source_file" in table.column_names:
        names = pc.unique(table["source_file"].cast(pa.string()))
        if not pc.all(pc.is_in(names, value_set=pa.array(files, pa.string())), min_count=0).as_py():
            raise ValueError("a source_file is none of the manifest's files")
