"""Wherever a write fails, every file is the old one, the new one, or absent; the error says why; and the same goes on.

lightning #19970: a truncated checkpoint or output.
"""

import multiprocessing
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from faults import KILLS, WRITE_FAULTS, write_fault
from writers import WRITERS

from datamask_pl.errors import DataFileError


def contents(folder="."):
    """Every file by its name, without temporary ones."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".tmp"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def leftovers():
    return [path.name for path in Path().rglob("*.tmp")]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What each writer leaves behind where nothing fails, by its name."""
    here, found = Path.cwd(), {}
    for name, (prepare, write) in WRITERS.items():
        os.chdir(tmp_path_factory.mktemp("undisturbed"))
        prepare()
        write()
        found[name] = contents()
    os.chdir(here)
    return found


def assert_whole_or_absent(expected):
    for name, content in contents().items():
        # the record of what has been written grows as files are written; each of its states is a whole one
        assert content == expected[name] or (name.endswith("_apply.json") and content.endswith(b"}\n")), name


@pytest.mark.parametrize("fault", WRITE_FAULTS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_leaves_whole_files_says_why_and_can_be_repeated(workplace, undisturbed, name, fault):
    prepare, write = WRITERS[name]
    prepare()
    point, number = WRITE_FAULTS[fault]
    with write_fault(point, name, number), pytest.raises(DataFileError) as caught:
        write()
    assert os.strerror(number) in str(caught.value)
    assert "cannot be written" in str(caught.value)
    assert name in str(caught.value) or point == "mkdir"
    assert leftovers() == []
    assert_whole_or_absent(undisturbed[name])
    write()
    assert contents() == undisturbed[name]


@pytest.mark.parametrize("fault", ["a short write", "no room when it is forced to disk", "no rename"])
@pytest.mark.parametrize(
    "name", ["part-00000.parquet", "block-00000-step-000001.ckpt", "text.parquet", "features.parquet"]
)
def test_a_failed_write_leaves_the_file_that_was_there(workplace, undisturbed, name, fault):
    prepare, write = WRITERS[name]
    prepare()
    path = next(path for path in undisturbed[name] if path.endswith(name))
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(b"the old one")
    point, number = WRITE_FAULTS[fault]
    with write_fault(point, name, number), pytest.raises(DataFileError, match="cannot be written"):
        write()
    assert Path(path).read_bytes() == b"the old one"
    write()
    assert contents() == undisturbed[name]


def _write_and_die(folder, name, point):
    os.chdir(folder)
    with write_fault(point, name):
        WRITERS[name][1]()


@pytest.mark.parametrize("name", ["part-00000.parquet", "block-00000-step-000001.ckpt", "_manifest.json", "b.parquet"])
def test_a_process_killed_while_it_writes_leaves_whole_files_and_the_same_goes_on(workplace, undisturbed, name):
    prepare, write = WRITERS[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datamask_pl.fit", "torch.utils.tensorboard", "forked_ranks"])
    for point in KILLS:
        folder = workplace / point
        folder.mkdir()
        os.chdir(folder)
        prepare()
        before = set(contents())
        process = context.Process(target=_write_and_die, args=(folder, name, point))
        process.start()
        process.join(60)
        assert -process.exitcode == (signal.SIGXFSZ if point.startswith("bytes") else signal.SIGKILL)
        assert_whole_or_absent(undisturbed[name])
        assert any(path.endswith(name) for path in set(contents()) - before) == (point == "renamed")
        write()
        assert contents() == undisturbed[name]


@pytest.fixture
def disk(workplace):
    """A disk of 64 kB of its own, in which the current folder is."""
    folder = workplace / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a disk can be mounted by root alone")
    os.chdir(folder)
    yield folder
    os.chdir(workplace)
    subprocess.run(["umount", str(folder)], check=True)


def fill_disk():
    with suppress(OSError), Path("filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_and_once_there_is_room_the_same_goes_on(disk, undisturbed, name):
    prepare, write = WRITERS[name]
    prepare()
    fill_disk()
    with pytest.raises(DataFileError, match="cannot be written: No space left on device; free some space"):
        write()
    assert leftovers() == []
    Path("filler").unlink()
    assert_whole_or_absent(undisturbed[name])
    write()
    assert contents() == undisturbed[name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_is_read_only_is_named_and_once_it_is_not_the_same_goes_on(disk, undisturbed, name):
    prepare, write = WRITERS[name]
    prepare()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = contents()
    with pytest.raises(DataFileError, match="Read-only file system; choose a folder that you may write to"):
        write()
    assert contents() == before
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    write()
    assert contents() == undisturbed[name]
