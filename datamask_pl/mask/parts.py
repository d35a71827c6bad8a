"""What a part of a mask says of itself in its footer, and what may stand in its columns."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from datamask_pl.io.paths import AnyPath, read_footer

FORMAT_VERSION = 1
# What comes of reading a part that is not whole.
DAMAGES = (OSError, pa.ArrowException, ValueError, KeyError, TypeError, RecursionError)
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


def encode_footer(*, plan_hash: str, settings: dict[str, Any], about: dict[str, Any]) -> dict[bytes, bytes]:
    """What is written into the footer of a part.

    Args:
        plan_hash: of the data that it belongs to.
        settings: that it was made with.
        about: what the manifest says of its block.
    """
    text = json.dumps({"format": FORMAT_VERSION, "plan_hash": plan_hash, "settings": settings, "about": about}).encode()
    return {_METADATA_KEY: text, _SUM_KEY: _sum_of(text)}


def read_part_footer(path: AnyPath) -> dict[str, Any]:
    """What was written into it by `encode_footer`. Raises one of `DAMAGES` if the part is not whole."""
    footer = read_footer(path)
    entries = footer.metadata or {}
    text = entries[_METADATA_KEY]
    if entries.get(_SUM_KEY, _sum_of(text)) != _sum_of(text):
        raise ValueError("the checksum of what it says of its block is wrong")
    metadata: dict[str, Any] = json.loads(text)
    check_kinds(metadata, {"plan_hash": str, "settings": dict, "about": dict})
    about = check_about(metadata["about"])
    if footer.num_rows != about["num_samples"]:
        raise ValueError(f"{footer.num_rows} rows instead of {about['num_samples']}")
    if about.get("part", path.name) != path.name:
        raise ValueError(f"it is {about['part']} under another name")
    return metadata


def _sum_of(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def check_about(about: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns what is said of a block if it is of the form of `describe_block`; raises a ValueError if not."""
    check_kinds(about, {"num_samples": int, "num_selected": int, "num_dropped": int})
    checked: dict[str, Any] = about
    if not 0 <= checked["num_selected"] <= checked["num_samples"] or checked["num_dropped"] < 0:
        raise ValueError(f"{checked['num_selected']} of {checked['num_samples']} samples are selected")
    return checked


def check_kinds(content: Any, kinds: dict[str, type]) -> None:  # noqa: ANN401
    """Raises a ValueError if an entry of a JSON object is missing or of another kind."""
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} instead of an object")
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{name} is {type(content.get(name)).__name__} instead of {kind.__name__}")


def check_rows(table: pa.Table, about: dict[str, Any], files: list[str]) -> None:
    """Raises a ValueError, or what arrow raises, if a column holds what cannot be."""
    if table.num_rows != about["num_samples"]:
        raise ValueError(f"{table.num_rows} rows instead of {about['num_samples']}")
    for name in table.column_names:
        if table[name].null_count or not table[name].type.equals(_PLAIN_TYPES.get(name, table[name].type)):
            raise ValueError(f"column {name} is of type {table[name].type} with {table[name].null_count} nulls")
        table[name].validate(full=True)
    if "selected" in table.column_names:
        num_selected = pc.sum(table["selected"]).as_py() or 0
        if num_selected != about["num_selected"]:
            raise ValueError(f"{num_selected} samples are selected instead of {about['num_selected']}")
    if "source_row" in table.column_names and (pc.min(table["source_row"]).as_py() or 0) < 0:
        raise ValueError("a source_row is negative")
    if "source_file" in table.column_names:
        names = pc.unique(table["source_file"].cast(pa.string()))
        if not pc.all(pc.is_in(names, value_set=pa.array(files, pa.string())), min_count=0).as_py():
            raise ValueError("a source_file is none of the manifest's files")
