"""JSON records: what the package writes to know its own files again, with a format's version and a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

# Exceptions of reading a file that is not whole, or holds other things than its format says.
DAMAGES = (OSError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_SUM = "sha256"


def encode(content: Mapping[str, Any], *, version: int, has_sum: bool = False) -> str:
    """The text of a record.

    Args:
        content: JSON types by name.
        version: of the record's format.
        has_sum: adds a checksum, for records whose numbers are shown as they stand.
    """
    record = {"format": version, **content}
    if has_sum:
        record[_SUM] = checksum(json.dumps(record, sort_keys=True).encode())
    return json.dumps(record, indent=2) + "\n"


def decode(text: str | bytes, kinds: Mapping[str, type], *, version: int, has_sum: bool = False) -> dict[str, Any]:
    """The content of a record.

    Args:
        text: from `encode`.
        kinds: entries that it must have, and of which kind.
        version: that it must be of.
        has_sum: whether it must have a checksum.

    Raises:
        Exception: One of `DAMAGES` if it is of another format, or not what was written.

    Example:
        >>> decode(encode({"a": 1}, version=2), {"a": int}, version=2)
        {'a': 1}
    """
    content: dict[str, Any] = json.loads(text)
    check_kinds(content, {})
    found = content.pop("format", version)
    if found != version:
        raise ValueError(f"it has format {found}, this version reads {version}")
    if has_sum:
        found_sum = content.pop(_SUM, None)
        if found_sum != checksum(json.dumps({"format": version, **content}, sort_keys=True).encode()):
            raise ValueError("its checksum is wrong")
    check_kinds(content, kinds)
    return content


def checksum(text: bytes) -> str:
    """SHA-256 as hex digits."""
    return hashlib.sha256(text).hexdigest()


def check_kinds(content: Any, kinds: Mapping[str, type]) -> None:  # noqa: ANN401
    """Raises a ValueError if an entry of a JSON object is missing or of another kind."""
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} instead of an object")
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{name} is {type(content.get(name)).__name__} instead of {kind.__name__}")


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Options that differ between a record and this run, as text.

    Example:
        >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
        ['b is 2 there and 3 here']
    """
    same = json.loads(json.dumps(current))
    names = [name for name in {**saved, **same} if saved.get(name) != same.get(name)]
    return [f"{name} is {saved.get(name)} there and {same.get(name)} here" for name in names]
