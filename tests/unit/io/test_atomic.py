"""A file that is written is the old one or the new one, whole."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from datamask_pl.errors import BadRowError, ConfigError, DataFileError
from datamask_pl.io.atomic import atomic_path, local_path
from tests.support.faults import without_root_powers


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _python(code: str, *args: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_target_appears_only_at_the_end_and_folders_are_made(tmp_path):
    target = tmp_path / "new" / "folder" / "mask.parquet"
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
        assert not target.exists()
        assert temporary.parent == target.parent
        assert temporary.name.startswith(".")
        assert temporary.name.endswith(".tmp")
        assert str(os.getpid()) in temporary.name
    assert target.read_bytes() == b"new"
    assert _names(target.parent) == ["mask.parquet"]


def test_bytes_are_on_disk_before_the_name_is_and_the_name_before_it_goes_on(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("folder" if path == tmp_path else f"{path.stat().st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("name") or replace(*paths))
    with atomic_path(tmp_path / "mask") as temporary:
        temporary.write_bytes(b"new")
    assert done == ["3 bytes", "name", "folder"]


def test_the_file_has_the_mode_that_open_would_give(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with atomic_path(tmp_path / "atomic") as temporary:
        temporary.write_bytes(b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_two_writers_of_one_target_do_not_share_a_temporary(tmp_path):
    target = tmp_path / "mask"
    with atomic_path(target) as first, atomic_path(target) as second:
        assert first != second
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert target.read_bytes() == b"first"  # the outer one ends last
    assert _names(tmp_path) == ["mask"]


@pytest.mark.parametrize("error", [RuntimeError("x"), BadRowError("x"), DataFileError("x"), KeyboardInterrupt()])
def test_a_failure_inside_leaves_the_target_as_it_was_and_passes_on(tmp_path, error):
    target = tmp_path / "mask"
    target.write_bytes(b"old")

    def write():
        with atomic_path(target) as temporary:
            temporary.write_bytes(b"ne")
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert target.read_bytes() == b"old"
    assert _names(tmp_path) == ["mask"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; free some space, or choose a path on another disk."),
        (errno.EACCES, "Permission denied; choose a folder that you may write to."),
        (errno.EROFS, "Read-only file system; choose a folder that you may write to."),
        (errno.EIO, "Input/output error; choose another path."),
    ],
)
def test_an_os_error_names_file_reason_and_remedy(tmp_path, number, words):
    target = tmp_path / "mask"
    target.write_bytes(b"old")
    with pytest.raises(DataFileError) as caught, atomic_path(target):
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == f"{target} cannot be written: {words}"
    assert target.read_bytes() == b"old"
    assert _names(tmp_path) == ["mask"]


def test_a_failed_rename_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "mask"
    target.write_bytes(b"old")

    def refuse(*_):
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(DataFileError, match="cannot be written"), atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"old"
    assert _names(tmp_path) == ["mask"]


def test_a_body_that_removes_the_temporary_is_an_error(tmp_path):
    with pytest.raises(DataFileError, match="No such file"), atomic_path(tmp_path / "mask") as temporary:
        temporary.unlink()
    assert _names(tmp_path) == []


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(DataFileError, match="it is a folder, not a file"), atomic_path(tmp_path):
        pytest.fail("the body must not run")


def test_a_device_is_not_replaced():
    with pytest.raises(DataFileError, match="it is a device or pipe"), atomic_path(Path(os.devnull)):
        pytest.fail("the body must not run")


def test_a_path_through_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    for target in (tmp_path / "file" / "mask", tmp_path / "file" / "folder" / "mask"):
        with pytest.raises(DataFileError, match="a part of the path is a file"), atomic_path(target):
            pytest.fail("the body must not run")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_folder_without_permission_is_noticed_before_the_body_runs(tmp_path):
    tmp_path.chmod(0o500)
    with (
        without_root_powers(),
        pytest.raises(DataFileError, match="choose a folder that you may write to"),
        atomic_path(tmp_path / "mask"),
    ):
        pytest.fail("the body must not run")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "mask")
    for text in ("first", "second"):
        with atomic_path(tmp_path / "link") as temporary:
            temporary.write_text(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "mask").read_text() == text


def test_a_killed_writer_leaves_the_target_whole(tmp_path):
    target = tmp_path / "mask"
    target.write_bytes(b"old")
    code = """
        import sys, time
        from pathlib import Path
        from datamask_pl.io.atomic import atomic_path
        with atomic_path(Path(sys.argv[1])) as temporary:
            temporary.write_bytes(b"ne")
            print("writing", flush=True)
            time.sleep(60)
    """
    with _python(code, target) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert target.read_bytes() == b"old"
    with atomic_path(target) as temporary:  # what the killed one left behind is not in the way
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"new"


def test_a_write_that_the_system_refuses_names_the_file(tmp_path):
    """A limit on file size stands in for a full disk: pyarrow gets its error from the system's `write`."""
    target = tmp_path / "mask"
    code = """
        import resource, sys
        from pathlib import Path
        import pyarrow as pa, pyarrow.parquet as pq
        from datamask_pl.io.atomic import atomic_path
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with atomic_path(Path(sys.argv[1])) as temporary:
            pq.write_table(pa.table({"a": list(range(100_000))}), temporary)
    """
    with _python(code, target) as process:
        _, errors = process.communicate(timeout=300)
    last = errors.strip().splitlines()[-1]
    assert last == (
        f"datamask_pl.errors.DataFileError: {target} cannot be written: File too large; "
        "free some space, or choose a path on another disk."
    )
    assert _names(tmp_path) == []


@pytest.mark.parametrize("value", ["", "s3://bucket/mask", "hf://datasets/a/b.parquet"])
def test_an_output_elsewhere_is_refused(value):
    with pytest.raises(ConfigError, match=r"^output must be a path on this machine, got '"):
        local_path("output", value)
    assert local_path("output", "runs/a:b") == Path("runs/a:b")
