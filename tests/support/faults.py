"""Faults of disks: at each of the calls with which a file is written or read, or in the middle of its bytes."""

import builtins
import ctypes
import errno
import io
import os
import resource
import signal
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Where a write can fail, in order: its folder, the temporary file, its bytes, forcing them to disk, its name.
WRITE_FAULTS = {
    "no folder": ("mkdir", errno.EROFS),
    "a folder that may not be written to": ("create", errno.EACCES),
    "no room for the name": ("create", errno.ENOSPC),
    "no room at all": ("bytes 0", errno.EFBIG),
    "a short write": ("bytes 100", errno.EFBIG),
    "no room when it is forced to disk": ("sync", errno.ENOSPC),
    "a bad disk when it is forced to disk": ("sync", errno.EIO),
    "no rename": ("rename", errno.EIO),
}
KILLS = ["bytes 100", "sync", "rename", "renamed"]


@contextmanager
def write_fault(point, name, number=None):
    """Makes the writing of files whose name matches fail, or, without a number of an error, kills the process.

    The short write is the system's own: a limit on the size of files, which pyarrow's and torch's writers meet too.
    """
    touch, mkdir, replace, fsync = Path.touch, Path.mkdir, os.replace, os.fsync

    def is_meant(path):
        path = Path(path)
        return fnmatch(path.name, name) or fnmatch(path.name, f".{name}.*.tmp")

    def strike(path):
        lift_limit()
        if number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(number, os.strerror(number), str(path))

    def failing_mkdir(path, *args, **kwargs):
        strike(path) if point == "mkdir" else mkdir(path, *args, **kwargs)

    def failing_touch(path, *args, **kwargs):
        if point == "create" and is_meant(path):
            strike(path)
        touch(path, *args, **kwargs)
        if point.startswith("bytes") and is_meant(path):
            limit(int(point.split()[1]))

    def failing_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_meant(path):
            strike(path) if point == "sync" else lift_limit()
        fsync(descriptor)

    def failing_replace(source, target):
        if point == "rename" and is_meant(target):
            strike(target)
        replace(source, target)
        if point == "renamed" and is_meant(target):
            strike(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "touch", failing_touch)
        patch.setattr(Path, "mkdir", failing_mkdir)
        patch.setattr(os, "replace", failing_replace)
        patch.setattr(os, "fsync", failing_fsync)
        if number is None:  # then the system kills a process that writes beyond the limit
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            yield
        finally:
            lift_limit()


def limit(num_bytes):
    """No file of this process may grow beyond so many bytes. Python ignores the signal; writers get an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def lift_limit():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


class BadFile(io.RawIOBase):
    """A file on a disk that cannot read a part of it.

    Args:
        path: of the file.
        bad: "all", "footer" for its last 8 bytes, or "data" for its first half, where only a read that begins within
            it fails: of a small file pyarrow reads all at once, for the footer.
    """

    def __init__(self, path, bad):
        self._file = io.FileIO(path)
        self._size = os.path.getsize(path)
        self._bad = bad

    def readinto(self, buffer):
        start = self._file.tell()
        is_footer = start <= self._size and start + len(buffer) > self._size - 8
        is_data = 0 < start < self._size // 2
        if self._bad == "all" or (is_footer if self._bad == "footer" else is_data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._file.readinto(buffer)

    def seek(self, offset, whence=0):
        return self._file.seek(offset, whence)

    def tell(self):
        return self._file.tell()

    def readable(self):
        return True

    def seekable(self):
        return True

    def close(self):
        self._file.close()
        super().close()


@contextmanager
def read_fault(name, bad="all"):
    """Makes the reading of files fail whose name, or folder and name, matches, through whichever library it is done."""
    opened = builtins.open

    def is_meant(path):
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        parts = Path(os.fsdecode(path)).parts
        return fnmatch("/".join(parts[-1 - name.count("/") :]), name)

    def open_bad(path, mode="r", *args, **kwargs):
        if not is_meant(path) or set(mode) & set("wxa+"):
            return opened(path, mode, *args, **kwargs)
        file = io.BufferedReader(BadFile(path, bad))
        return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

    def failing(function):
        def call(path, *args, **kwargs):
            return function(BadFile(path, bad) if is_meant(path) else path, *args, **kwargs)

        return call

    os_file = pa.OSFile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", open_bad)
        patch.setattr(io, "open", open_bad)
        patch.setattr(pa, "OSFile", lambda path, *args: BadFile(path, bad) if is_meant(path) else os_file(path, *args))
        for function in ("read_metadata", "ParquetFile"):
            patch.setattr(pq, function, failing(getattr(pq, function)))
        yield


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Words(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def without_root_powers():
    """Permissions of files hold for root, too: takes CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from this thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = _Header(0x20080522, 0), (_Words * 2)()  # the third version of the call, for this thread
    assert libc.capget(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
    effective = words[0].effective
    words[0].effective = effective & ~0b110
    assert libc.capset(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        words[0].effective = effective
        assert libc.capset(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
