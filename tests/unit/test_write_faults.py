"""Wherever a write fails, every file is the old one, the new one, or absent; the error says why; and the same goes on.

lightning #19970: a truncated checkpoint or output.
"""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from datamask_pl.errors import DataFileError
from tests.support.faults import KILLS, WRITE_FAULTS, write_fault
from tests.support.forked_ranks import fork_context
from tests.support.tiers import only
from tests.support.writers import WRITERS


def contents(folder="."):
    """Every file by its name, without temporary ones."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".tmp"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def leftovers():
    return [path.name for path in Path().rglob("*.tmp")]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What each writer leaves behind where nothing fails."""
    here, found = Path.cwd(), {}
    for what, writer in WRITERS.items():
        os.chdir(tmp_path_factory.mktemp("undisturbed"))
        writer.prepare()
        writer.write()
        found[what] = contents()
    os.chdir(here)
    return found


def assert_whole_or_absent(expected):
    for name, content in contents().items():
        # records of what has been written grow as files are written; each of their states is a whole one
        assert content == expected[name] or (name.endswith(".json") and json.loads(content)), name


def spread(kinds, writers=tuple(WRITERS)):
    """Every writer with every kind of fault; in the first tier each writer has one, and each fault some writer."""
    return [
        pytest.param(what, kind, marks=() if index % len(kinds) == number else pytest.mark.slow)
        for index, what in enumerate(writers)
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("what", "fault"), spread(WRITE_FAULTS))
def test_a_failed_write_leaves_whole_files_says_why_and_can_be_repeated(workplace, undisturbed, what, fault):
    prepare, write, name = WRITERS[what]
    prepare()
    point, number = WRITE_FAULTS[fault]
    with write_fault(point, name, number), pytest.raises(DataFileError) as caught:
        write()
    assert os.strerror(number) in str(caught.value)
    assert "cannot be written" in str(caught.value)
    assert name in str(caught.value) or point == "mkdir"
    assert leftovers() == []
    assert_whole_or_absent(undisturbed[what])
    write()
    assert contents() == undisturbed[what]


@pytest.mark.parametrize(
    ("what", "fault"),
    spread(
        ["a short write", "no room when it is forced to disk", "no rename"],
        ["a mask's part", "a checkpoint", "sample's texts", "embed's features", "compare's table", "report's page"],
    ),
)
def test_a_failed_write_leaves_the_file_that_was_there(workplace, undisturbed, what, fault):
    prepare, write, name = WRITERS[what]
    prepare()
    path = next(path for path in undisturbed[what] if path.endswith(name))
    Path(path).parent.mkdir(exist_ok=True)
    # what these write is only replaced where it is known to be theirs
    is_marked = what in ("sample's texts", "embed's features", "compare's table", "report's page")
    old = undisturbed[what][path] if is_marked else b"the old one"
    Path(path).write_bytes(old)
    point, number = WRITE_FAULTS[fault]
    with write_fault(point, name, number), pytest.raises(DataFileError, match="cannot be written"):
        write()
    assert Path(path).read_bytes() == old
    write()
    assert contents() == undisturbed[what]


def _write_and_die(folder, what, point):
    os.chdir(folder)
    torch.set_num_threads(1)
    with write_fault(point, WRITERS[what].file):
        WRITERS[what].write()


@pytest.mark.parametrize(("what", "point"), spread(KILLS))
def test_a_process_killed_while_it_writes_leaves_whole_files_and_the_same_goes_on(workplace, undisturbed, what, point):
    prepare, write, name = WRITERS[what]
    prepare()
    before = set(contents())
    process = fork_context().Process(target=_write_and_die, args=(str(workplace), what, point))
    process.start()
    process.join(60)
    assert -process.exitcode == (signal.SIGXFSZ if point.startswith("bytes") else signal.SIGKILL)
    assert_whole_or_absent(undisturbed[what])
    assert any(path.endswith(name) for path in set(contents()) - before) == (point == "renamed")
    write()
    assert contents() == undisturbed[what]


@pytest.fixture
def disk(workplace):
    """A disk of 2 MB of its own, in which the current folder is."""
    folder = workplace / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
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


@pytest.mark.parametrize("what", only(*list(WRITERS)[1::3], of=WRITERS))
def test_a_full_disk_is_named_and_once_there_is_room_the_same_goes_on(disk, undisturbed, what):
    prepare, write, _ = WRITERS[what]
    prepare()
    fill_disk()
    with pytest.raises(DataFileError, match="cannot be written: No space left on device; free some space"):
        write()
    assert leftovers() == []
    Path("filler").unlink()
    assert_whole_or_absent(undisturbed[what])
    write()
    assert contents() == undisturbed[what]


@pytest.mark.parametrize("what", only(*list(WRITERS)[0::3], of=WRITERS))
def test_a_disk_that_is_read_only_is_named_and_once_it_is_not_the_same_goes_on(disk, undisturbed, what):
    prepare, write, _ = WRITERS[what]
    prepare()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = contents()
    with pytest.raises(DataFileError, match="Read-only file system; choose a folder that you may write to"):
        write()
    assert contents() == before
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    write()
    assert contents() == undisturbed[what]
