"""Paths on this machine and in object stores behind one small interface, and which of them may be written to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.errors import ConfigError, DataFileError, DatamaskError

# Stores in which a file appears whole or not at all, when its upload is complete.
STORES = ("s3", "s3a", "gs", "gcs", "hf", "memory")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}
_NEEDS = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface-hub"}

# user@ or user:secret@, where a secret may hold slashes but host:port/ is not one.
_USER = re.compile(r"(?<=://)(?:[^/@]*@|[^/@:]+:(?!\d+/)[^@]*@)")
# A lone ? is a wildcard; a query has an equals sign. In an object store # is a letter like any other.
_QUERY = re.compile(r"\?[^/:]*=.*$")


@dataclass(frozen=True)
class RemotePath:
    """A file or folder in an object store, with the part of `pathlib.Path` that this package uses.

    Attributes:
        filesystem: the fsspec file system.
        path: what it opens.
    """

    filesystem: Any
    path: str

    def __str__(self) -> str:
        return redact(self.filesystem.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The part behind the last slash."""
        return self.path.rstrip("/").rpartition("/")[2]

    def exists(self) -> bool:
        """Whether there is such a file, or a file below such a folder."""
        with faults(str(self), "looked up"):
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.exists(self.path))

    def is_dir(self) -> bool:
        """Whether there is a file below it."""
        with faults(str(self), "looked up"):
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.isdir(self.path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole file."""
        with faults(str(self), "read"):
            content: bytes = self.filesystem.cat_file(self.path)
        return content.decode(encoding)


AnyPath = Path | RemotePath


def any_path(option: str, value: str, *, is_read: bool = False) -> AnyPath:
    """Returns the value of an option as a path on this machine or in an object store.

    Args:
        option: what the user calls it, for errors.
        value: a path or a URL.
        is_read: nothing is to be written there, so that any file system will do.

    Raises:
        ConfigError: If it is empty, holds credentials, or is the address of something other than an object store.
        DataFileError: If the package for the store is missing.

    Example:
        >>> any_path("output", "sftp://host/mask")
        Traceback (most recent call last):
        datamask_pl.errors.ConfigError: output must be a path on this machine or in an object store (s3, s3a, gs, gcs, hf), got 'sftp://host/mask'; write it here and copy it there.
    """  # noqa: E501
    if "://" not in value or value.startswith("file://"):
        if not value.removeprefix("file://"):
            raise ConfigError(f"{option} must be a path, got {value!r}.")
        return Path(value.removeprefix("file://"))
    check_no_secret(option, value)
    if not is_read and value.partition("://")[0] not in STORES:
        raise ConfigError(
            f"{option} must be a path on this machine or in an object store ({', '.join(STORES[:-1])}), got {value!r}; "
            "write it here and copy it there."
        )
    with faults(value, "opened"):
        filesystem, path = fsspec.core.url_to_fs(value)
    return RemotePath(filesystem, path.rstrip("/"))


def list_names(folder: AnyPath) -> list[str]:
    """Names of the entries of a folder, sorted; none if there is no such folder.

    Raises:
        NotADirectoryError: If it is a file.
        DataFileError: If it cannot be listed.
    """
    if isinstance(folder, Path):
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []
    with faults(str(folder), "listed"):
        folder.filesystem.invalidate_cache()
        try:
            found = folder.filesystem.ls(folder.path, detail=False)
        except FileNotFoundError:
            return []
    # of a file, fsspec lists the file itself
    paths = [path.rstrip("/") for path in found]
    if folder.path.strip("/") in [path.strip("/") for path in paths]:
        raise NotADirectoryError(str(folder))
    return sorted(path.rpartition("/")[2] for path in paths)


def full_name(path: AnyPath) -> str:
    """What tells a path from all others: without links here, with the protocol in a store; parts end in slashes.

    Example:
        >>> full_name(any_path("output", "memory://bucket/mask/"))
        'memory:///bucket/mask'
    """
    if isinstance(path, Path):
        return Path(os.path.realpath(path)).as_posix()
    name: str = path.filesystem.unstrip_protocol(path.path)
    return name.rstrip("/")


def is_below(name: str, folder: str) -> bool:
    """Whether a full name names a folder or something in it.

    Example:
        >>> is_below("/a/b", "/a"), is_below("/ab", "/a")
        (True, False)
    """
    return name == folder or name.startswith(folder.rstrip("/") + "/")


def file_size(path: AnyPath, *, is_fresh: bool = True) -> int:
    """Bytes of a file.

    Args:
        path: the file.
        is_fresh: asks the store anew; otherwise what it said when its folder was listed will do.

    Raises:
        OSError: If it is missing.
    """
    if isinstance(path, Path):
        return path.stat().st_size
    with faults(str(path), "looked up"):
        if is_fresh:
            path.filesystem.invalidate_cache()
        return int(path.filesystem.size(path.path))


def read_footer(path: AnyPath) -> pq.FileMetaData:
    """The footer of a parquet file. Raises OSError or pyarrow's exceptions if the file is not whole."""
    with readable(path) as source:
        return pq.read_metadata(source)


@contextmanager
def readable(path: AnyPath) -> Iterator[Any]:
    """A binary file opened for reading: pyarrow's on this machine, fsspec's in an object store.

    Faults of this machine are raised as they are, those of a store as DataFileError.
    """
    if isinstance(path, Path):
        with pa.OSFile(os.fspath(path), "rb") as source:
            yield source
        return
    with faults(str(path), "read"), path.filesystem.open(path.path, "rb") as source:
        yield source


def upload(source: Path, target: RemotePath) -> None:
    """Copies a file to an object store in one put, under its final name, and compares the size that is there.

    A put, and a multipart upload alike, shows the file when all of it has arrived; until then what was there stays.

    Raises:
        DataFileError: If it did not arrive.
    """
    with faults(str(target), "written"):
        target.filesystem.put_file(os.fspath(source), target.path)
    expected, seen = source.stat().st_size, file_size(target)
    if seen != expected:
        raise DataFileError(f"{target} cannot be written: {expected} bytes were sent, {seen} arrived; start again.")


def redact(url: str) -> str:
    """Removes user, password, query and fragment from a URL; a local path stays as it is.

    Example:
        >>> redact("s3://key:secret@bucket/part-*.parquet?token=1")
        's3://bucket/part-*.parquet'
    """
    if "://" not in url:
        return url
    for pattern in (_USER, _QUERY):
        url = pattern.sub("", url)
    return url


def check_no_secret(option: str, url: str) -> None:
    """Refuses a URL with a user or query: options are recorded, and shown by whoever lists the processes.

    Raises:
        ConfigError: Without what was refused.

    Example:
        >>> check_no_secret("source", "s3://key:secret@bucket/a")
        Traceback (most recent call last):
        datamask_pl.errors.ConfigError: source: s3://bucket/a was given with a user, password or query, which would be written into config and manifest; remove them, and pass credentials by the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    """  # noqa: E501
    if redact(url) != url:
        raise ConfigError(
            f"{option}: {redact(url)} was given with a user, password or query, which would be written into config and "
            "manifest; remove them, and pass credentials by the environment, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY."
        )


def missing_package(url: str, error: ImportError) -> str:
    """Says which package a URL needs.

    Example:
        >>> missing_package("s3://bucket/a", ImportError("Install s3fs"))
        "it needs s3fs; pip install 'datamask_pl[s3]'"
    """
    extra = _EXTRAS.get(url.partition("://")[0])
    return str(error) if extra is None else f"it needs {_NEEDS[extra]}; pip install 'datamask_pl[{extra}]'"


@contextmanager
def faults(name: str, verb: str, *, is_remote: bool = True) -> Iterator[None]:
    """Turns exceptions of pyarrow and file systems into a DataFileError that names the file.

    A remote cause may be of any class, and is not quoted, for it may hold a URL with its credentials.

    Args:
        name: file or pattern, as it may be shown.
        verb: what could not be done to it.
        is_remote: whether the file is in an object store.
    """
    try:
        yield
    except (DatamaskError, AssertionError):
        raise
    except FileNotFoundError:
        if verb == "written":
            raise DataFileError(f"{name} cannot be written: there is no such bucket; make it first.") from None
        raise DataFileError(f"{name} does not exist.") from None
    except Exception as error:
        if is_remote and isinstance(error, ImportError):
            raise DataFileError(f"{name} cannot be {verb}: {missing_package(name, error)}.") from None
        if is_remote:
            raise DataFileError(
                f"{name} cannot be {verb} ({type(error).__name__}); check the URL, its protocol and the credentials."
            ) from None
        if isinstance(error, (pa.ArrowException, OSError, UnicodeDecodeError)):  # the last of a damaged name
            raise DataFileError(f"{name} cannot be {verb}: {str(error).rstrip('.')}.") from error
        raise
