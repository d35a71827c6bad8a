"""Files in an object store: whole or not there, and no secret is shown or written."""

import subprocess
import sys
import textwrap
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.io.atomic import atomic_path
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import open_parquet
from datamask_pl.io.paths import any_path, file_size, list_names, read_footer, redact


@pytest.fixture
def memory():
    """The file system of memory://, empty."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@host:80/x.parquet?sig=a/b", "https://host:80/x.parquet"),
        ("nosuch://key:very/secret@bucket/a.parquet", "nosuch://bucket/a.parquet"),
        ("memory://very_secret@x/*?token=secret", "memory://x/*"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("hf://datasets/u/n@main/*.parquet", "hf://datasets/u/n@main/*.parquet"),
        ("http://host:8080/a@b/c", "http://host:8080/a@b/c"),
        ("dir/a@b.parquet", "dir/a@b.parquet"),
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url, shown):
    assert redact(url) == shown
    if url == shown:
        return
    for use in (lambda: expand(url), lambda: any_path("data.path", url)):
        with pytest.raises(ConfigError, match="was given with a user, password or query") as caught:
            use()
        assert str(caught.value).startswith(f"data.path: {shown} was given")
        assert "secret" not in str(caught.value)
        assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("value", ["sftp://host/a", "https://host/a", "nosuch://a", "ftp://a/b"])
def test_only_stores_that_show_whole_files_are_written_to(value):
    with pytest.raises(ConfigError, match=r"^output must be a path on this machine or in an object store \(s3, "):
        any_path("output", value)


@pytest.mark.parametrize("value", ["", "file://"])
def test_an_empty_path_is_refused(value):
    with pytest.raises(ConfigError, match=r"^output must be a path, got"):
        any_path("output", value)


def test_paths_on_this_machine_stay_what_they_are():
    assert any_path("output", "runs/a:b") == Path("runs/a:b")
    assert any_path("output", "file:///runs/a") == Path("/runs/a")


def test_a_remote_file_appears_whole_at_the_end(memory):
    target = any_path("output", "memory://bucket/new") / "a.txt"
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"whole")
        assert not target.exists()
        assert list_names(any_path("output", "memory://bucket/new")) == []
    assert not temporary.parent.exists()
    assert target.read_text() == "whole"
    assert (file_size(target), target.name, str(target)) == (5, "a.txt", "memory:///bucket/new/a.txt")
    assert list_names(any_path("output", "memory://bucket/new")) == ["a.txt"]


@pytest.mark.parametrize("error", [RuntimeError("x"), DataFileError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_the_remote_file_as_it_was(memory, error):
    memory.pipe_file("/bucket/a", b"old")

    def write():
        with atomic_path(any_path("output", "memory://bucket/a")) as temporary:
            temporary.write_bytes(b"ne")
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert memory.cat_file("/bucket/a") == b"old"


def test_what_did_not_arrive_whole_is_an_error(memory, monkeypatch):
    monkeypatch.setattr(type(memory), "put_file", lambda self, source, target, **_: self.pipe_file(target, b"hal"))
    with (
        pytest.raises(DataFileError, match=r"^memory:///bucket/a cannot be written: 4 bytes were sent, 3 arrived"),
        atomic_path(any_path("output", "memory://bucket/a")) as temporary,
    ):
        temporary.write_bytes(b"half")


def test_what_the_store_says_is_not_quoted(memory, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("https://key:secret@store")

    monkeypatch.setattr(type(memory), "put_file", refuse)
    with (
        pytest.raises(DataFileError) as caught,
        atomic_path(any_path("output", "memory://bucket/a")) as temporary,
    ):
        temporary.write_bytes(b"")
    assert str(caught.value) == (
        "memory:///bucket/a cannot be written (RuntimeError); check the URL, its protocol and the credentials."
    )
    assert caught.value.__suppress_context__


def test_a_missing_package_is_named_with_the_extra_that_installs_it():
    """In a process of its own, since fsspec keeps the classes that it has imported."""
    code = """
        import sys
        sys.modules.update(dict.fromkeys(["s3fs", "gcsfs", "huggingface_hub"]))
        from datamask_pl.io.dataset import expand
        from datamask_pl.errors import DataFileError
        from datamask_pl.io.paths import any_path
        for protocol in ("s3", "gs", "hf"):
            for use in (expand, lambda url: any_path("output", url)):
                try:
                    use(f"{protocol}://bucket/a.parquet")
                except DataFileError as error:
                    print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        f"{protocol}://bucket/a.parquet cannot be {verb}: it needs {package}; pip install 'datamask_pl[{protocol}]'."
        for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs"), ("hf", "huggingface-hub"))
        for verb in ("listed", "opened")
    ]


def test_footers_and_folders_of_a_store_are_read(memory):
    folder = any_path("mask", "memory://bucket/mask/")
    assert not folder.is_dir()
    with atomic_path(folder / "part.parquet") as temporary:
        pq.write_table(pa.table({"a": [1, 2]}), temporary)
    assert folder.is_dir()
    assert folder.exists()
    assert read_footer(folder / "part.parquet").num_rows == 2
    (location,) = expand("memory://bucket/mask")
    with open_parquet(location) as parquet:
        assert parquet.read()["a"].to_pylist() == [1, 2]
    with pytest.raises(NotADirectoryError):
        list_names(folder / "part.parquet")
