"""From the paths of a config to a recorded, sorted list of parquet files, and how one of them is opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.errors import ConfigError, DataFileError, DatamaskError
from datamask_pl.io.paths import AnyPath, RemotePath, check_no_secret, redact, remote_faults

_MAGIC = b"PAR1"
# Without a buffer pyarrow holds the whole column chunk of a row group: 3 GB for 1 M rows of 768 float32.
_BUFFER_BYTES = 4 << 20
_TABLE_ROWS = 1 << 16


@dataclass(frozen=True)
class Location:
    """Where a file is.

    Attributes:
        name: what is recorded and shown: the path, or the URL without user, password and query.
        path: what `filesystem`, or the operating system, opens.
        filesystem: the fsspec file system, or None for a local file.
    """

    name: str
    path: str
    filesystem: Any = None

    @classmethod
    def of(cls, path: AnyPath) -> Location:
        """The location of one file."""
        if isinstance(path, RemotePath):
            return cls(str(path), path.path, path.filesystem)
        return cls(str(path), str(path))

    @property
    def as_path(self) -> AnyPath:
        """The same as a path."""
        return Path(self.path) if self.filesystem is None else RemotePath(self.filesystem, self.path)

    @property
    def key(self) -> str:
        """What tells this file from all others, URLs with their protocol."""
        if self.filesystem is None:
            return os.path.abspath(self.path)
        url: str = self.filesystem.unstrip_protocol(self.path)
        return url

    def size(self) -> int:
        """Size in bytes."""
        return os.path.getsize(self.path) if self.filesystem is None else int(self.filesystem.size(self.path))

    def open(self) -> Any:  # noqa: ANN401
        """The file opened for reading, as a context manager."""
        return pa.OSFile(self.path, "rb") if self.filesystem is None else self.filesystem.open(self.path, "rb")


def expand(path: str | Sequence[str], *, option: str = "data.path", wanted: str = "a parquet file") -> list[Location]:
    """Finds the files that a path, or several, stand for.

    A path is a file, a directory (all `*.parquet` below it, but for names that start with `.` or `_`), a glob
    (`**` spans directories), or an fsspec URL of any of these (`s3://`, `hf://`, `gs://`, `memory://`).

    Args:
        path: one path or several; a file that several of them match is taken once.
        option: what the user calls it, for errors.
        wanted: what a file is to be, for errors.

    Returns:
        At least one file, sorted by name as text, so part-10 comes before part-2.

    Raises:
        ConfigError: If no path is given.
        DataFileError: If a path matches nothing, or cannot be listed.
    """
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns or not all(patterns):
        raise ConfigError(f"{option} must name at least one file, directory, glob or URL, got {path!r}.")
    found: dict[str, Location] = {}
    for pattern in patterns:
        is_remote = "://" in pattern and not pattern.startswith("file://")
        if is_remote:
            check_no_secret(option, pattern)
        with _naming(redact(pattern), "listed", is_remote=is_remote):
            locations = _expand_url(pattern) if is_remote else _expand_local(pattern.removeprefix("file://"))
        if not locations:
            raise DataFileError(
                f"{option}: nothing matches {redact(pattern)!r}; give {wanted}, a directory that holds "
                "*.parquet files, a glob or an fsspec URL."
            )
        for location in locations:
            found.setdefault(location.key, location)
    return sorted(found.values(), key=lambda location: location.name)


@contextmanager
def open_bytes(location: Location) -> Iterator[Any]:
    """Opens a file of any kind for reading; what goes wrong is raised as DataFileError.

    Raises:
        DataFileError: If the file is missing, or a part of it cannot be read.
    """
    with _naming(location.name, "read", is_remote=location.filesystem is not None), location.open() as source:
        yield source


@contextmanager
def open_parquet(location: Location) -> Iterator[pq.ParquetFile]:
    """Opens a file for streaming; pyarrow's and the file system's faults are raised as DataFileError.

    Raises:
        DataFileError: If the file is missing, empty, cut off or no parquet file, or a part of it cannot be read.
    """
    with _naming(location.name, "read", is_remote=location.filesystem is not None), location.open() as source:
        try:
            parquet = pq.ParquetFile(
                source, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
            )
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataFileError(_diagnose(location, str(error))) from error
        with parquet:
            _check_footer(parquet.metadata, location.name)
            yield parquet


def row_group_rows(footer: pq.FileMetaData) -> tuple[int, ...]:
    """Rows of each row group of a file."""
    return tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))


def iterate_batches(
    parquet: pq.ParquetFile,
    name: str,
    *,
    batch_rows: int,
    columns: list[str] | None = None,
    row_group: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some at a time. A header that is damaged makes pyarrow leave out a page without a word.

    Args:
        parquet: from `open_parquet`.
        name: of the file, for errors.
        batch_rows: rows of a batch, at most.
        columns: which; all if left out.
        row_group: the rows of one; of all if left out.

    Raises:
        DataFileError: If there are more or fewer rows than the footer says.
    """
    groups = range(parquet.metadata.num_row_groups) if row_group is None else [row_group]
    expected, seen = sum(parquet.metadata.row_group(group).num_rows for group in groups), 0
    for batch in parquet.iter_batches(batch_rows, row_groups=list(groups), columns=columns, use_threads=False):
        seen += len(batch)
        if seen > expected:
            break
        yield batch
    if seen != expected:
        raise DataFileError(
            f"{name} is damaged: its footer says that there are {expected} rows, and {seen} were read; write or copy "
            "it again."
        )


def read_table(parquet: pq.ParquetFile, name: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a file. Arguments and errors as `iterate_batches`."""
    batches = list(iterate_batches(parquet, name, batch_rows=_TABLE_ROWS, columns=columns))
    if batches:
        return pa.Table.from_batches(batches)
    empty = parquet.schema_arrow.empty_table()
    return empty if columns is None else empty.select(columns)


def _expand_local(pattern: str) -> list[Location]:
    pattern = os.path.expanduser(pattern)
    matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    paths = [path for match in matches for path in (_walk(match) if os.path.isdir(match) else [match])]
    return [Location(name=os.path.normpath(path), path=path) for path in paths]


def _walk(directory: str) -> list[str]:
    paths = []
    for folder, subfolders, names in os.walk(directory, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "_"))]
        paths += [os.path.join(folder, name) for name in names if _is_shard(name)]
    return paths


def _is_shard(name: str) -> bool:
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def _expand_url(url: str) -> list[Location]:
    filesystem, path = fsspec.core.url_to_fs(url)
    if filesystem.isfile(path):
        matches = [path]
    elif filesystem.isdir(path):
        matches = [match for match in filesystem.find(path) if _is_shard(match.rsplit("/", 1)[-1])]
    else:
        matches = [match for match in filesystem.glob(path) if filesystem.isfile(match)]
    return [Location(redact(filesystem.unstrip_protocol(match)), match, filesystem) for match in matches]


def _raise(error: OSError) -> None:
    """os.walk leaves out what it may not list, and rows with it, unless it is told to raise."""
    raise error


def _check_footer(footer: pq.FileMetaData, name: str) -> None:
    """Raises a DataFileError if a footer contradicts itself; it has no checksum."""
    in_groups = row_group_rows(footer)
    if sum(in_groups) != footer.num_rows or any(num_rows < 0 for num_rows in in_groups):
        raise DataFileError(
            f"{name} is damaged: its footer says that there are {footer.num_rows} rows, and {sum(in_groups)} in its "
            "row groups; write or copy it again."
        )


def _diagnose(location: Location, cause: str) -> str:
    """Says in words that name the fault why a file has no footer that could be read."""
    if location.size() == 0:
        return f"{location.name} is empty (0 bytes); write it again or leave it out."
    with location.open() as source:
        head = source.read(len(_MAGIC))
        if head != _MAGIC:
            return f"{location.name} is not a parquet file: it starts with {head!r} instead of {_MAGIC!r}."
        source.seek(max(0, location.size() - len(_MAGIC)))
        if source.read() != _MAGIC or location.size() < 3 * len(_MAGIC):
            return f"{location.name} is cut off: its footer is missing; write or copy it again."
    return f"{location.name} is damaged, its footer cannot be read ({cause.rstrip('.')}); write or copy it again."


@contextmanager
def _naming(name: str, verb: str, *, is_remote: bool) -> Iterator[None]:
    """Turns what pyarrow and file systems raise into an error that names the file.

    Args:
        name: file or pattern, as it may be shown.
        verb: what could not be done to it.
        is_remote: the cause may then be of any class.
    """
    if is_remote:
        with remote_faults(name, verb):
            yield
        return
    try:
        yield
    except DatamaskError:
        raise
    except FileNotFoundError:
        raise DataFileError(f"{name} does not exist.") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a damaged name
        raise DataFileError(f"{name} cannot be {verb}: {str(error).rstrip('.')}.") from error
