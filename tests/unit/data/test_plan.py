from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.data.plan import deal_blocks, hash_plan, parse_shard, plan_blocks
from datamask_pl.errors import ConfigError

file_shapes = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6)
block_bys = st.sampled_from(["rows", "row_groups_shuffled", "file"])


def rows_of(block):
    return [(s.file_index, s.row_group, row) for s in block.segments for row in range(s.start, s.stop)]


def all_rows(shapes):
    return [(f, g, row) for f, groups in enumerate(shapes) for g, n in enumerate(groups) for row in range(n)]


@given(file_shapes, block_bys, st.integers(1, 20), st.integers(0, 2**63 - 1))
def test_every_row_is_in_exactly_one_block_whatever_the_shape_of_the_files(shapes, block_by, block_size, seed):
    """datasets #6594, lightning #20404: uneven shards led to repeated samples."""
    blocks = plan_blocks(shapes, block_by=block_by, block_size=block_size, seed=seed)
    assert sorted(row for block in blocks for row in rows_of(block)) == all_rows(shapes)
    assert all(segment.num_rows > 0 for block in blocks for segment in block.segments)


@given(file_shapes, st.sampled_from(["rows", "row_groups_shuffled"]), st.integers(1, 20))
def test_blocks_are_as_few_as_the_size_allows_and_differ_by_at_most_one_row(shapes, block_by, block_size):
    sizes = [block.num_rows for block in plan_blocks(shapes, block_by=block_by, block_size=block_size, seed=1)]
    assert len(sizes) == ceil(len(all_rows(shapes)) / block_size)
    if sizes:
        assert max(sizes) <= block_size
        assert max(sizes) - min(sizes) <= 1


@given(file_shapes, st.integers(1, 20))
def test_block_by_rows_keeps_the_order_of_files_and_rows(shapes, block_size):
    blocks = plan_blocks(shapes, block_by="rows", block_size=block_size, seed=0)
    assert [row for block in blocks for row in rows_of(block)] == all_rows(shapes)


def test_shuffled_row_groups_depend_on_the_seed_alone_and_mix_the_files():
    shapes = [[5] * 8, [5] * 8]

    def plan(seed):
        return plan_blocks(shapes, block_by="row_groups_shuffled", block_size=40, seed=seed)

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)
    assert {segment.file_index for segment in plan(3)[0].segments} == {0, 1}


def test_block_by_file_gives_no_block_to_a_file_without_rows():
    blocks = plan_blocks([[2, 0, 1], [], [0], [4]], block_by="file", block_size=1, seed=0)
    assert [block.num_rows for block in blocks] == [3, 4]
    assert [block.segments[0].file_index for block in blocks] == [0, 3]


def test_an_unknown_block_by_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="rows, row_groups_shuffled or file, got 'size'"):
        plan_blocks([[1]], block_by="size", block_size=1, seed=0)


BASE = {
    "files": [("/a/d/0.parquet", 10, [3]), ("/a/d/1.parquet", 11, [4, 5])],
    "columns": {"id": "i", "quality": {"q": 1.0}, "feature": "f"},
    "options": {"block_size": 5, "block_by": "rows", "seed": 0},
}


@pytest.mark.parametrize(
    "change",
    [
        {"files": [("/a/d/0.parquet", 10, [3]), ("/a/d/2.parquet", 11, [4, 5])]},
        {"files": [("/a/d/0.parquet", 10, [3]), ("/a/d/1.parquet", 12, [4, 5])]},
        {"files": [("/a/d/0.parquet", 10, [3]), ("/a/d/1.parquet", 11, [5, 4])]},
        {"columns": {"id": "i", "quality": {"q": 2.0}, "feature": "f"}},
        {"options": {"block_size": 5, "block_by": "rows", "seed": 1}},
    ],
)
def test_the_hash_changes_with_everything_that_it_covers(change):
    assert hash_plan(**BASE) != hash_plan(**{**BASE, **change})


def test_the_hash_stays_when_the_whole_data_set_is_moved():
    moved = [(name.replace("/a/", "s3://bucket/b/c/"), *rest) for name, *rest in BASE["files"]]
    assert hash_plan(**BASE) == hash_plan(**{**BASE, "files": moved})
    assert len(hash_plan(**BASE)) == 64


def test_the_hash_of_one_file_knows_its_name_but_not_its_folder():
    def digest(name):
        return hash_plan(**{**BASE, "files": [(name, 10, [3])]})

    assert digest("x/0.parquet") == digest("0.parquet") == digest("/y/0.parquet")
    assert digest("0.parquet") != digest("1.parquet")


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 8))
def test_every_block_is_dealt_to_one_group_of_one_job_and_the_counts_are_balanced(num_blocks, num_jobs, num_groups):
    dealt = [
        [deal_blocks(num_blocks, shard=(job, num_jobs), group=(group, num_groups)) for group in range(num_groups)]
        for job in range(num_jobs)
    ]
    assert sorted(block for job in dealt for blocks in job for block in blocks) == list(range(num_blocks))
    for job in dealt:
        counts = [len(blocks) for blocks in job]
        assert max(counts) - min(counts) <= 1
        assert all(blocks == sorted(blocks) for blocks in job)
    totals = [sum(len(blocks) for blocks in job) for job in dealt]
    assert max(totals) - min(totals) <= 1


@given(st.integers(1, 10**6), st.data())
def test_a_shard_is_read_as_it_is_written(count, data):
    index = data.draw(st.integers(0, count - 1))
    assert parse_shard(f"{index}/{count}") == (index, count)


@pytest.mark.parametrize(
    "text", ["", "/", "1", "1/", "/2", "2/2", "3/2", "-1/2", "0/0", "a/b", "1/2/3", "1.0/2", "½/2"]
)
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ConfigError, match=r"data\.shard must be i/n with i from 0 to n - 1, such as 0/4, got"):
        parse_shard(text)
