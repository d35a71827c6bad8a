"""Whoever reads a file of which pyarrow leaves out a page says so, and writes nothing of it."""

import re
import shutil
from pathlib import Path

import pytest

from datamask_pl.cli import main
from tests.support.fits import fit
from tests.support.shards import damage_page, write_pages

OPTIONS = ("--data.path", "corpus.parquet", "--data.block_size", "100", "--model.num_steps", "2",
           "--model.diversity", "pairwise", "--run_name", "mine")  # fmt: skip
OTHERS = {
    "apply": ("--mask", "runs/datamask/mine/mask", "--source", "corpus.parquet", "--output", "kept"),
    "compare": ("--run", "runs/datamask/mine"),
    "report": ("--run", "runs/datamask/mine", "--group_column", "text"),
    "embed": ("--source", "corpus.parquet", "--output", "vectors.parquet", "--feature_column", "other"),
}


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """A block ends well before its row group does."""
    monkeypatch.setattr("datamask_pl.data.reader._MAX_CHUNK_ROWS", 10)


def assert_refused(capsys, call, *args):
    """One line that names the file."""
    with pytest.raises(SystemExit) as ended:
        call(*args)
    assert ended.value.code == 2
    assert re.fullmatch(r"error: corpus\.parquet (cannot be read|is damaged): .*\n", capsys.readouterr().err)


def list_files():
    """All but the record in which `apply` keeps what is done."""
    return sorted(path for path in Path().rglob("*") if path.is_file() and path.name != "_apply.json")


@pytest.mark.parametrize("options", [(), ("--data.shard", "0/2"), ("--data.check_rows", "false"),
                                     ("--data.shard", "1/4", "--data.check_rows", "false")])  # fmt: skip
@pytest.mark.parametrize("column", ["chunk_id", "quality_score", "feature_arr"])
def test_no_part_of_a_mask_is_written(workplace, capsys, column, options):
    write_pages(workplace / "corpus.parquet", 400)
    damage_page("corpus.parquet", column, 1)
    assert_refused(capsys, fit, *OPTIONS, *options)
    assert not list(workplace.rglob("part-*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of four blocks of one row group."""
    folder = tmp_path_factory.mktemp("finished")
    write_pages(folder / "corpus.parquet", 400)
    fit(*OPTIONS, folder=folder)
    return folder


@pytest.mark.parametrize("options", [(), ("--data.check_rows", "false")])
def test_nor_where_the_block_that_ends_with_the_row_group_is_finished(workplace, finished, capsys, options):
    shutil.copytree(finished, workplace, dirs_exist_ok=True)
    for name in ("mask/part-00000.parquet", "mask/part-00001.parquet", "mask/_manifest.json"):
        (workplace / "runs/datamask/mine" / name).unlink()
    damage_page("corpus.parquet", "chunk_id", 1)
    assert_refused(capsys, fit, *OPTIONS, *options)
    assert sorted(path.name for path in workplace.rglob("part-*")) == ["part-00002.parquet", "part-00003.parquet"]


@pytest.mark.parametrize(
    ("command", "column"),
    [
        *(("apply", column) for column in ("chunk_id", "feature_arr", "text")),
        *(("compare", column) for column in ("chunk_id", "quality_score", "feature_arr")),
        ("report", "text"),
        *(("embed", column) for column in ("chunk_id", "text")),
    ],
)
def test_nor_by_another_command_that_reads_the_column(workplace, finished, capsys, command, column):
    shutil.copytree(finished, workplace, dirs_exist_ok=True)
    damage_page("corpus.parquet", column, 1)
    before = list_files()
    assert_refused(capsys, main, [command, *OTHERS[command]])
    assert list_files() == before
