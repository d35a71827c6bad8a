"""A page that pyarrow leaves out, for one altered bit of its header, gives the rows after it those of others."""

import pyarrow.parquet as pq
import pytest

from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.errors import DataFileError
from tests.support.shards import COLUMNS, damage_page, make_table, write_pages


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """A block ends well before its row group does."""
    monkeypatch.setattr("datamask_pl.data.reader._MAX_CHUNK_ROWS", 10)


def open_blocks(path, block_size):
    """A reader that has read nothing yet, and the blocks."""
    dataset = read_dataset(path, Columns(**COLUMNS))
    plan = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=block_size, seed=0)
    return BlockReader(dataset, quality_scaling="rank", on_bad_row="error"), plan


@pytest.mark.parametrize("way", ["read", "check"])
@pytest.mark.parametrize("page", [0, 1, -1])
@pytest.mark.parametrize("column", ["chunk_id", "quality_score", "feature_arr"])
def test_no_block_of_its_row_group_is_used_wherever_the_block_ends(tmp_path, column, page, way):
    name = write_pages(tmp_path / "a.parquet", 400)
    damage_page(name, column, page)
    for block_size in (400, 110, 7):
        for index in range(len(open_blocks(name, block_size)[1])):
            reader, plan = open_blocks(name, block_size)
            with pytest.raises(DataFileError, match=r"a\.parquet (cannot be read|is damaged)"):
                getattr(reader, way)(plan[index], index)


def test_a_block_of_other_row_groups_is_read_as_it_is(tmp_path):
    names = [write_pages(tmp_path / f"{name}.parquet", 400) for name in "ab"]
    damage_page(names[0], "chunk_id", 1)
    reader, plan = open_blocks(str(tmp_path), 200)
    for index in (2, 3):
        block, _ = reader.read(plan[index], index)
        assert block.ids.to_pylist() == block.source_row_N.tolist()


def test_a_row_group_is_read_on_to_its_end_once_however_many_blocks_cut_it(tmp_path, monkeypatch):
    seen = []
    iterate = pq.ParquetFile.iter_batches

    def spy(self, *args, **kwargs):
        for batch in iterate(self, *args, **kwargs):
            seen[-1] += len(batch)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    reader, plan = open_blocks(write_pages(tmp_path / "a.parquet", 100), 25)
    for way in (reader.check, reader.read):
        for index in range(4):
            seen.append(0)
            way(plan[index], index)
    assert seen == [100, 50, 80, 100, 30, 50, 80, 100]


def test_row_groups_that_change_their_sizes_between_plan_and_reading_are_an_error(tmp_path):
    name, table = str(tmp_path / "a.parquet"), make_table(100)
    pq.write_table(table, name, row_group_size=60)
    reader, plan = open_blocks(name, 50)
    pq.write_table(table, name, row_group_size=70)
    with pytest.raises(DataFileError, match="100 rows in 2 row groups and has 100 in 2, or groups of other sizes"):
        reader.read(plan[0], 0)
