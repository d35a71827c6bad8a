"""One rule of which files belong to a data set, for every kind of path."""

import os
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.errors import DataFileError
from datamask_pl.io.dataset import expand

FILES = (
    "d/a.parquet",
    "d/sub/b.parquet",
    "d/sub/deep/c.parquet",
    "d/_temporary/0/t.parquet",
    "d/.hidden/h.parquet",
    "d/_SUCCESS",
    "d/.e.parquet",
    "d/_f.parquet",
    "d/note.txt",
    "d/k#x=1/g.parquet",
    "d2/z.parquet",
    "d/mask/part-00000.parquet",
    "d/mask/_manifest.json",
)
VISIBLE = ["d/a.parquet", "d/k#x=1/g.parquet", "d/sub/b.parquet", "d/sub/deep/c.parquet"]
CASES = {
    "d": VISIBLE,
    "d/": VISIBLE,
    "d/**": VISIBLE,
    "d/**/*.parquet": VISIBLE,
    "d/*": sorted([*VISIBLE, "d/note.txt"]),
    "d/*.parquet": ["d/a.parquet"],
    "d/s*": ["d/sub/b.parquet", "d/sub/deep/c.parquet"],
    "d/*/b.parquet": ["d/sub/b.parquet"],
    "d/**/c.parquet": ["d/sub/deep/c.parquet"],
    "d?": ["d2/z.parquet"],
    "d*": [*VISIBLE, "d2/z.parquet"],
    "d/_temporary": ["d/_temporary/0/t.parquet"],
    "d/_temp*/**/*.parquet": ["d/_temporary/0/t.parquet"],
    "d/_*.parquet": ["d/_f.parquet"],
    "d/.e.parquet": [".e"],
    "d/k#x=1/*": ["d/k#x=1/g.parquet"],
    "d/mask": ["d/mask/part-00000.parquet"],
    "d/mask/part-*": ["d/mask/part-00000.parquet"],
}


def content_of(name):
    return b'{"format": 1, "plan_hash": "00"}' if name.endswith(".json") else b"x"


@pytest.fixture(params=["local", "memory"])
def base(request, workplace):
    if request.param == "local":
        for name in FILES:
            path = workplace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content_of(name))
        yield f"{workplace}/"
        return
    store = fsspec.filesystem("memory")
    for name in FILES:
        store.pipe_file(f"/dataset/{name}", content_of(name))
    yield "memory://dataset/"
    store.rm("/dataset", recursive=True)


@pytest.mark.parametrize("pattern", CASES)
def test_every_kind_of_path_has_one_rule(base, pattern):
    expected = ["d/.e.parquet"] if CASES[pattern] == [".e"] else CASES[pattern]
    found = [str(path).replace("memory:///", "memory://").removeprefix(base) for path in expand(base + pattern)]
    assert found == expected


@pytest.mark.parametrize("pattern", ["data", "data/**/*.parquet", "data/*"])
def test_linked_folders_are_entered_and_every_file_is_taken_once(workplace, pattern):
    for name in ("data/a.parquet", "elsewhere/b.parquet"):
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / name).touch()
    for link, target in {
        "data/0-same": "a.parquet",
        "data/0-same.parquet": "a.parquet",
        "data/linked": "../elsewhere",
        "data/linked-again": "../elsewhere",
        "data/loop": ".",
        "data/up": "..",
    }.items():
        (workplace / link).symlink_to(target)
    assert [str(path) for path in expand(pattern)] == ["data/a.parquet", "data/linked/b.parquet"]
    assert [str(path) for path in expand(["data/0-same.parquet", "data/a.parquet"])] == ["data/a.parquet"]


def test_a_pipe_is_refused_instead_of_waited_for(workplace):
    Path("data").mkdir()
    os.mkfifo("data/a.parquet")
    for path in ("data", "data/a.parquet", "data/*"):
        with pytest.raises(DataFileError, match=r"data/a\.parquet is a pipe or a device"):
            expand(path)


def test_a_run_below_its_own_source_is_not_read(workplace):
    pq.write_table(pa.table({"a": [1]}), "a.parquet")
    mask = Path("runs/datamask/version_0/mask")
    mask.mkdir(parents=True)
    (mask / "part-00000.parquet").touch()
    (mask / "_manifest.json").write_bytes(content_of(".json"))
    assert expand(".") == expand("**/*.parquet") == [Path("a.parquet")]
