"""Writes a file so that a reader sees the old one or the new one, whole, and never a part of either."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.paths import AnyPath, RemotePath, file_size, readable, upload
from datamask_pl.io.records import DAMAGES

_MARK_BYTES = 4096
_DISK_FULL = "free some space, or choose a path on another disk"
_NOT_ALLOWED = "choose a folder that you may write to"
_REMEDIES = {
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EFBIG: _DISK_FULL,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another path",
    errno.EEXIST: "a part of the path is a file, not a folder; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextmanager
def atomic_path(target: AnyPath) -> Iterator[Path]:
    """Yields a temporary path next to `target`, which becomes `target` if the body ends without an exception.

    The folder is created if need be. The temporary exists, empty, when the body starts, so that a folder that cannot
    be written to is noticed before the work. At the end its bytes are forced to disk before it takes the target's
    name, and the folder's entry after. If anything fails, the temporary is removed and the target is as it was; after
    a SIGKILL a `.{name}.{pid}-{token}.tmp` may be left over, which no later run reads and which can be deleted.

    The body does nothing but make the bytes: every OSError or exception of pyarrow that leaves it is taken for a failed
    write, except a DatamaskError, which passes as it is. `torch.save` to a path reports a full disk as a RuntimeError;
    save to a `BytesIO` and `write_bytes` that instead.

    Object stores have no rename. There the temporary is a file of this machine, in the system's folder for such
    (`TMPDIR`), and is uploaded whole at the end, under the target's name.

    Args:
        target: file to make or to replace. A symbolic link is followed, so that the file it names is replaced.

    Yields:
        The temporary path, in the target's own folder if that is on this machine.

    Raises:
        DataFileError: If the target is there but is not a regular file, or if it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_path(Path(folder) / "a.txt") as temporary:
        ...         _ = temporary.write_text("whole")
        ...     [(path.name, path.read_text()) for path in Path(folder).iterdir()]
        [('a.txt', 'whole')]
    """
    if isinstance(target, RemotePath):
        with _uploaded(target) as temporary:
            yield temporary
        return
    # Renaming over a link would replace the link and leave the file that it names behind.
    final = Path(os.path.realpath(target))
    if os.path.exists(final) and not os.path.isfile(final):
        kind = "a folder" if os.path.isdir(final) else "a device or pipe"
        raise DataFileError(f"{target} cannot be written: it is {kind}, not a file; pass the path of a file.")
    # The process id tells a reader of the folder whose it is; the token keeps hosts of a shared disk apart.
    temporary = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        yield temporary
        _fsync(temporary)
        os.replace(temporary, final)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, (OSError, pa.ArrowException)) and not isinstance(error, DataFileError):
            raise write_error(target, error) from error
        raise
    if os.name == "posix":
        # The file is whole under its name by now; some network file systems cannot fsync a folder.
        with suppress(OSError):
            _fsync(final.parent)


@contextmanager
def _uploaded(target: RemotePath) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="datamask_pl-") as folder:
        temporary = Path(folder) / target.name
        try:
            temporary.touch()
            yield temporary
        except DataFileError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise write_error(f"{temporary}, to be uploaded to {target},", error) from error
        upload(temporary, target)


def check_replaceable(option: str, path: AnyPath, is_ours: Callable[[AnyPath], bool]) -> None:
    """Refuses to replace a file of someone else.

    Args:
        option: what the user calls the path.
        path: to be written.
        is_ours: whether the file there was written by the same command; any exception of reading it counts as no.

    Raises:
        ConfigError: If there is a file, not empty, that is not ours.
    """
    if not path.exists() or path.is_dir():  # of a folder, `atomic_path` says more
        return
    try:
        is_replaceable = file_size(path) == 0 or is_ours(path)
    except DAMAGES:
        is_replaceable = False
    if not is_replaceable:
        raise ConfigError(
            f"{option}: {path} exists and was not written by this command; it is never replaced: pass another path or "
            "move it."
        )


def has_mark(path: AnyPath, mark: str) -> bool:
    """Whether a file of text contains a mark among its first characters."""
    with readable(path) as source:
        return mark.encode() in source.read(_MARK_BYTES)


def local_path(option: str, value: str) -> Path:
    """Returns the value of an option as a path, if it is one on this machine.

    Raises:
        ConfigError: If it is empty or the address of a remote file.

    Example:
        >>> local_path("output", "s3://bucket/mask")
        Traceback (most recent call last):
        datamask_pl.errors.ConfigError: output must be a path on this machine, got 's3://bucket/mask'; write it here and copy it there.
    """  # noqa: E501
    if not value or "://" in value:
        raise ConfigError(f"{option} must be a path on this machine, got {value!r}; write it here and copy it there.")
    return Path(value)


def write_error(path: AnyPath | str, error: Exception) -> DataFileError:
    """Says that a file cannot be written, why, and what to do about it.

    Example:
        >>> write_error("mask/part.parquet", OSError(errno.ENOSPC, "No space left on device"))
        DataFileError('mask/part.parquet cannot be written: No space left on device; free some space, or choose a path on another disk.')
    """  # noqa: E501
    # pyarrow's own text repeats the errno and its name; the system's is enough.
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else str(error).rstrip(".") or type(error).__name__
    remedy = _REMEDIES.get(number or 0, "choose another path")
    return DataFileError(f"{path} cannot be written: {reason}; {remedy}.")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
