"""What the footers say: files, columns and types, checked before a single row is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from datamask_pl.data.shards import plain_type
from datamask_pl.errors import ConfigError, SchemaError
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import Shard, find_column, read_shards, with_rows


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and no others.

    Attributes:
        id_column: name of the column that identifies a sample.
        quality_columns: weight of each quality column, by name; at least one.
        feature_column: name of the column of vectors.
        cost_column: name of the column of costs, if a budget is of costs.
        group_column: name of the column of groups, if they are told apart.

    Raises:
        ConfigError: If there is no quality column, or a weight is not finite.
    """

    id_column: str
    quality_columns: dict[str, float]
    feature_column: str
    cost_column: str | None = None
    group_column: str | None = None

    def __post_init__(self) -> None:
        if not self.quality_columns:
            raise ConfigError("data.quality_columns must name at least one column, got {}.")
        for name, weight in self.quality_columns.items():
            if not math.isfinite(weight):
                raise ConfigError(f"data.quality_columns: the weight of {name!r} must be finite, got {weight}.")

    @property
    def by_option(self) -> list[tuple[str, str]]:
        """Every column, with the option that names it."""
        named = [
            ("data.id_column", self.id_column),
            *(("data.quality_columns", name) for name in self.quality_columns),
            ("data.feature_column", self.feature_column),
            ("data.cost_column", self.cost_column),
            ("data.group_column", self.group_column),
        ]
        return [(option, name) for option, name in named if name is not None]

    @property
    def names(self) -> list[str]:
        """Every column once."""
        return list(dict.fromkeys(name for _, name in self.by_option))


@dataclass(frozen=True)
class FeatureType:
    """How a vector is stored.

    Attributes:
        value_type: float16, float32 or float64.
        list_size: length of every vector if the type fixes it, otherwise None.
    """

    value_type: pa.DataType
    list_size: int | None

    def __str__(self) -> str:
        return f"list<{self.value_type}>" if self.list_size is None else f"list<{self.value_type}>[{self.list_size}]"


@dataclass(frozen=True)
class Dataset:
    """Files that agree on the columns that are read.

    Attributes:
        files: sorted by name; files without rows included.
        columns: what is read.
        id_type: type of the id column in every file that has rows; the plain one where files store ids in several ways.
        feature_type: type of the feature column; of fixed length if that of a file is.
        has_mixed_ids: True if files store ids in several ways, which are then read as `id_type`.
    """

    files: tuple[Shard, ...]
    columns: Columns
    id_type: pa.DataType
    feature_type: FeatureType
    has_mixed_ids: bool = False


def read_dataset(path: str | Sequence[str], columns: Columns) -> Dataset:
    """Expands the path, reads every footer and checks the columns.

    Args:
        path: see `io.parquet.expand`.
        columns: what is to be read; other columns do not matter, and may differ from file to file. In a file without
            rows no column matters.

    Returns:
        The data set. No row of it has been read.

    Raises:
        DataFileError: If nothing matches, a file cannot be read, or there are no rows at all.
        SchemaError: If a column is missing or of a type that cannot be used, or two files disagree about its type.
    """
    files = read_shards(expand(path))
    footers = [_Footer(file.name, _column_types(file, columns)) for file in with_rows(files, "data.path")]
    sized = footers[0]
    for footer in footers:
        _check_types(footer, columns)
        _check_agreement(sized, footer, columns)
        # the first whose type fixes the length of a vector, where one does
        if _feature_type(sized, columns.feature_column).list_size is None:
            sized = footer
    id_types = {footer.types[columns.id_column] for footer in footers}
    id_type = footers[0].types[columns.id_column]
    return Dataset(
        files=tuple(files),
        columns=columns,
        id_type=id_type if len(id_types) == 1 else plain_type(id_type),
        feature_type=_feature_type(sized, columns.feature_column),
        has_mixed_ids=len(id_types) > 1,
    )


class _Footer(NamedTuple):
    """Types of the columns that are read, by name, in the file of a name."""

    name: str
    types: dict[str, pa.DataType]


def _column_types(file: Shard, columns: Columns) -> dict[str, pa.DataType]:
    return {column: find_column(file.schema, file.name, column, option) for option, column in columns.by_option}


def _check_types(footer: _Footer, columns: Columns) -> None:
    id_type = footer.types[columns.id_column]
    storage_type = id_type.storage_type if isinstance(id_type, pa.BaseExtensionType) else id_type
    if pa.types.is_nested(storage_type):
        raise SchemaError(
            f"{footer.name}: id column {columns.id_column!r} must hold one plain value a row, it is {id_type}."
        )
    for name in columns.quality_columns:
        if not _is_numeric(footer.types[name]):
            raise SchemaError(
                f"{footer.name}: quality column {name!r} must be a float, integer, decimal or bool column, "
                f"it is {footer.types[name]}."
            )
    _feature_type(footer, columns.feature_column)
    if columns.cost_column is not None:
        check_cost_type(footer.name, columns.cost_column, footer.types[columns.cost_column])
    if columns.group_column is not None:
        check_group_type(footer.name, columns.group_column, footer.types[columns.group_column])


def check_cost_type(file_name: str, column: str, data_type: pa.DataType) -> None:
    """Raises a SchemaError if costs cannot be of this type."""
    if not _is_numeric(data_type) or pa.types.is_boolean(data_type):
        raise SchemaError(
            f"{file_name}: cost column {column!r} must be a float, integer or decimal column, it is {data_type}."
        )


def check_group_type(file_name: str, column: str, data_type: pa.DataType) -> None:
    """Raises a SchemaError if groups cannot be of this type."""
    plain = group_type(data_type)
    is_string = pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)
    # a column of nulls alone, as writers infer it: its rows are bad, not its type
    if not (is_string or pa.types.is_integer(plain) or pa.types.is_null(plain)):
        raise SchemaError(
            f"{file_name}: group column {column!r} must be a string or integer column, or a dictionary of either, "
            f"it is {data_type}."
        )


def group_type(data_type: pa.DataType) -> pa.DataType:
    """The type of a group's name, however it is encoded."""
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


def _is_numeric(data_type: pa.DataType) -> bool:
    checks: list[Callable[[pa.DataType], bool]] = [
        pa.types.is_floating,
        pa.types.is_integer,
        pa.types.is_decimal,
        pa.types.is_boolean,
    ]
    return any(check(data_type) for check in checks)


def _feature_type(footer: _Footer, column: str) -> FeatureType:
    data_type = footer.types[column]
    is_fixed = pa.types.is_fixed_size_list(data_type)
    is_list = is_fixed or pa.types.is_list(data_type) or pa.types.is_large_list(data_type)
    if is_list and pa.types.is_floating(data_type.value_type) and not (is_fixed and data_type.list_size == 0):
        return FeatureType(data_type.value_type, data_type.list_size if is_fixed else None)
    message = (
        f"{footer.name}: feature column {column!r} must be a list, large_list or fixed_size_list of float16, "
        f"float32 or float64, and not of length 0; it is {data_type}."
    )
    if is_list and pa.types.is_uint16(data_type.value_type):
        message += " If these are the bits of bfloat16 numbers, write them as float32 first."
    raise SchemaError(message)


def _check_agreement(first: _Footer, footer: _Footer, columns: Columns) -> None:
    for name in columns.names:
        expected: Any = first.types[name]
        actual: Any = footer.types[name]
        if name == columns.feature_column:
            # The kind of list and the name of its field depend on the writer alone.
            expected, actual = _feature_type(first, name), _feature_type(footer, name)
            if None in (expected.list_size, actual.list_size):
                # every row of a list that fixes no length is checked when it is read
                expected, actual = expected.value_type, actual.value_type
        elif name == columns.id_column and name not in columns.quality_columns:
            expected = actual if plain_type(expected) == plain_type(actual) else expected
        elif name == columns.group_column and name not in (columns.id_column, *columns.quality_columns):
            expected, actual = group_type(expected), group_type(actual)
            if pa.types.is_null(expected) or pa.types.is_null(actual):
                continue
        if actual != expected:
            raise SchemaError(
                f"column {name!r} is {expected} in {first.name} and {actual} in {footer.name}; "
                "write all files with one type."
            )
