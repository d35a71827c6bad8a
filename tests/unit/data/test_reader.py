import decimal
import os
import subprocess
import sys
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader, _concat_ids
from datamask_pl.data.rows import check_rows
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, SchemaError
from tests.support.shards import COLUMNS, make_table, vectors, write

columns = Columns(**COLUMNS)
LIST, FIXED = pa.list_(pa.float32()), pa.list_(pa.float32(), 2)


def make_reader(path, *, on_bad_row="error", columns=columns):
    return BlockReader(read_dataset(str(path), columns), quality_scaling="rank", on_bad_row=on_bad_row)


def plan_for(reader, *, block_by="rows", block_size=10**6, seed=0):
    row_group_rows = [file.row_group_rows for file in reader.dataset.files]
    return plan_blocks(row_group_rows, block_by=block_by, block_size=block_size, seed=seed)


def read_all(path, *, on_bad_row="error", columns=columns, **plan_options):
    reader = make_reader(path, on_bad_row=on_bad_row, columns=columns)
    return [reader.read(plan, index) for index, plan in enumerate(plan_for(reader, **plan_options))]


def read_one(path, **options):
    ((block, _),) = read_all(path, **options)
    return block


def write_rows(path, rows, feature_type=LIST, **replaced):
    """Rows of features with ids from 0 and ascending quality."""
    table = make_table(
        len(rows),
        feature_arr=vectors(rows, feature_type),
        **{"quality_score": pa.array(np.arange(len(rows), dtype=np.float32)), **replaced},
    )
    return write(path, table)


@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list, lambda value_type: pa.list_(value_type, 4)])
@pytest.mark.parametrize("value_type", [pa.float16(), pa.float32(), pa.float64()])
def test_a_block_holds_the_rows_as_they_are_stored(tmp_path, make_list, value_type):
    tables = [make_table(n, first_id=first, feature_type=make_list(value_type)) for first, n in ((0, 7), (7, 5))]
    for name, table in zip("ab", tables, strict=True):
        write(tmp_path / f"{name}.parquet", table, row_group_size=3)
    block = read_one(tmp_path)
    whole = pa.concat_tables(tables)
    stored = np.array(whole["feature_arr"].to_pylist())
    assert block.features_ND.dtype == (torch.float16 if value_type == pa.float16() else torch.float32)
    np.testing.assert_array_equal(block.features_ND.numpy(), stored.astype(block.features_ND.numpy().dtype))
    np.testing.assert_allclose(block.inv_norm_N, 1 / np.linalg.norm(block.features_ND.double(), axis=1), rtol=1e-6)
    assert block.inv_norm_N.dtype == block.quality_N.dtype == block.scaled_quality_N.dtype == torch.float32
    assert block.ids.equals(pa.array(range(12)))
    assert block.source_file_N.tolist() == [0] * 7 + [1] * 5
    assert block.source_file_N.dtype == torch.int32
    assert block.source_row_N.tolist() == [*range(7), *range(5)]
    assert block.quality_N.tolist() == whole["quality_score"].to_pylist()


@settings(max_examples=settings().max_examples // 2)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=4),
    block_by=st.sampled_from(["rows", "row_groups_shuffled", "file"]),
    block_size=st.integers(1, 15),
    seed=st.integers(0, 3),
)
def test_every_id_is_read_once_with_its_own_features(tmp_path_factory, shapes, block_by, block_size, seed):
    """datasets #6594, lightning #20404: uneven shards lead to repeated samples."""
    if not any(num_rows for num_rows, _ in shapes):
        return
    folder = tmp_path_factory.mktemp("shapes")
    first_id, features = 0, []
    for index, (num_rows, group_rows) in enumerate(shapes):
        table = make_table(num_rows, first_id=first_id)
        write(folder / f"{index}.parquet", table, row_group_size=group_rows)
        features += table["feature_arr"].to_pylist()
        first_id += num_rows
    blocks = [block for block, _ in read_all(folder, block_by=block_by, block_size=block_size, seed=seed)]
    ids = [sample_id for block in blocks for sample_id in block.ids.to_pylist()]
    assert sorted(ids) == list(range(first_id))
    read = torch.cat([block.features_ND for block in blocks])
    assert read.tolist() == [features[sample_id] for sample_id in ids]
    first_ids = np.cumsum([0] + [num_rows for num_rows, _ in shapes])
    where = [(f, r) for b in blocks for f, r in zip(b.source_file_N.tolist(), b.source_row_N.tolist(), strict=True)]
    assert [first_ids[file] + row for file, row in where] == ids


@pytest.mark.parametrize("chunk_rows", [1, 3, 7])
def test_rows_keep_their_numbers_however_few_are_read_at_a_time(tmp_path, monkeypatch, chunk_rows):
    monkeypatch.setattr("datamask_pl.data.reader._MAX_CHUNK_ROWS", chunk_rows)
    table = make_table(40)
    write(tmp_path / "a.parquet", table.slice(0, 23), row_group_size=11)
    write(tmp_path / "b.parquet", table.slice(23))
    blocks = [block for block, _ in read_all(tmp_path, block_size=14)]
    ids = [sample_id for block in blocks for sample_id in block.ids.to_pylist()]
    assert ids == list(range(40))
    assert [row for block in blocks for row in block.source_row_N.tolist()] == [*range(23), *range(17)]
    assert [row for block in blocks for row in block.features_ND.tolist()] == table["feature_arr"].to_pylist()


@pytest.mark.parametrize("feature_type", [LIST, FIXED, pa.large_list(pa.float32())])
def test_a_slice_of_a_list_array_gives_its_own_rows(feature_type):
    """arrow #37733, #41672: `.values` ignores the offset, so features go to the wrong rows."""
    rows = [[i, 1] for i in range(1, 7)]
    table = make_table(6, feature_arr=vectors(rows, feature_type)).combine_chunks()
    batch = table.to_batches()[0].slice(2, 3)
    chunk, _ = check_rows(batch, columns, num_features=2, file_name="f", first_row=2, drops=False)
    assert chunk.features_KD.tolist() == rows[2:5]
    assert chunk.ids.to_pylist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "feature_type", "reason"),
    [
        ([[1, 2], None, [3, 4]], LIST, "must not be null"),
        ([[1, 2], None, [3, 4]], FIXED, "must not be null"),
        ([[1, 2], [1, 2, 3], [3, 4], [5]], LIST, "must have 2 elements as in the other rows, it has 3"),
        ([[1, 2], [], [4, 5]], LIST, "must have 2 elements as in the other rows, it has 0"),
        ([[1, 2], [1, None], [3, 4]], LIST, "must not hold a null element"),
        ([[1, 2], [1, None], [3, 4]], FIXED, "must not hold a null element"),
        ([[1, 2], [1, np.nan], [3, 4]], FIXED, "element 1 is nan"),
        ([[1, 2], [-np.inf, 1], [3, 4]], pa.list_(pa.float16()), "finite float16, element 0 is -inf"),
        ([[1, 2], [1, 1e39], [3, 4]], pa.list_(pa.float64()), "finite float32, element 1 is inf"),
        ([[1, 2], [0, 0], [3, 4]], FIXED, "must not be a zero vector"),
        ([[1, 2], [0, 1e-300], [3, 4]], pa.list_(pa.float64()), "must not be a zero vector"),
        ([[1, 2], [0, 1e-40], [3, 4]], LIST, "L2 norm from 1e-37 to 1e\\+37, it is 9.99995e-41"),
        ([[1, 2], [0, 1e38], [3, 4]], LIST, "L2 norm from 1e-37 to 1e\\+37, it is 1e\\+38"),
    ],
)
def test_bad_features_stop_the_run_or_are_dropped_and_listed(tmp_path, rows, feature_type, reason):
    """arrow #35359: lengths 3 + 1 reshaped silently to 2 x 2. sentence-transformers #589: a zero vector is NaN."""
    name = write_rows(tmp_path / "a.parquet", rows, feature_type)
    with pytest.raises(BadRowError, match=reason) as caught:
        read_all(name)
    assert f"{name}, row 1: feature column 'feature_arr'" in str(caught.value)
    assert "data.on_bad_row: drop" in str(caught.value)
    ((block, bad_rows),) = read_all(name, on_bad_row="drop")
    kept = [row for row in range(len(rows)) if row != 1 and len(rows[row]) == 2]
    assert block.ids.to_pylist() == block.source_row_N.tolist() == kept
    assert block.features_ND.tolist() == [rows[row] for row in kept]
    assert block.num_dropped == bad_rows.num_rows == len(rows) - len(kept)
    assert [(bad.file, bad.row) for bad in bad_rows.listed] == [
        (name, row) for row in range(len(rows)) if row not in kept
    ]


@pytest.mark.parametrize("value", [None, np.nan, np.inf, -np.inf])
def test_bad_quality_stops_the_run_or_is_dropped(tmp_path, value):
    """trl #5775: one NaN poisons all that it is averaged with."""
    quality = pa.array([1.0, value, 3.0], pa.float64())
    name = write_rows(tmp_path / "a.parquet", [[1, 0]] * 3, quality_score=quality)
    with pytest.raises(BadRowError, match=r"row 1: quality column 'quality_score' must (be finite|not be null)"):
        read_all(name)
    block = read_one(name, on_bad_row="drop")
    assert block.quality_N.tolist() == [1, 3]
    assert block.scaled_quality_N.tolist() == [0, 1]


def test_a_quality_beyond_float32_is_a_bad_row(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [[1, 0]] * 2, quality_score=pa.array([1.0, 1e39]))
    with pytest.raises(BadRowError, match=r"row 1: the weighted quality must fit into float32, it is 1e\+39"):
        read_all(name)


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_null_id_is_always_an_error(tmp_path, on_bad_row):
    """pandas #56678: a null turns a column of ids into floats."""
    name = write_rows(tmp_path / "a.parquet", [[1, 0]] * 3, chunk_id=pa.array([5, 6, None]))
    with pytest.raises(BadRowError, match=r"a\.parquet, row 2: id column 'chunk_id' must not be null"):
        read_all(name, on_bad_row=on_bad_row)


def test_a_bad_row_is_counted_from_the_start_of_its_file(tmp_path):
    write(tmp_path / "a.parquet", make_table(5, dim=2))
    table = make_table(9, dim=2, feature_arr=vectors([[1, 1]] * 7 + [[0, 0]] * 2, FIXED))
    name = write(tmp_path / "b.parquet", table, row_group_size=3)
    with pytest.raises(BadRowError, match=r"row 7: .* 1 of the next 1 rows are bad too") as caught:
        read_all(tmp_path)
    assert name in str(caught.value)
    dropped = [bad for _, bad_rows in read_all(tmp_path, on_bad_row="drop", block_size=4) for bad in bad_rows.listed]
    assert [bad.row for bad in dropped] == [7, 8]


@pytest.mark.parametrize("feature_type", [LIST, FIXED, pa.large_list(pa.float16())])
def test_a_row_group_of_nulls_alone_is_dropped_whole(tmp_path, feature_type):
    table = make_table(4, feature_arr=vectors([[1, 2], [3, 4], None, None], feature_type))
    block = read_one(write(tmp_path / "a.parquet", table, row_group_size=2), on_bad_row="drop")
    assert block.features_ND.tolist() == [[1, 2], [3, 4]]
    assert block.num_dropped == 2


def test_a_block_without_a_good_row_is_an_error(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [[0, 0], [0, 0], [1, 2], [1, 3]])
    with pytest.raises(BadRowError, match=r"all 2 rows of block 0 are bad, the first is row 0 of .*zero vector"):
        read_all(name, on_bad_row="drop", block_size=2)


def test_at_most_a_thousand_dropped_rows_are_listed_and_all_are_counted(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [[1, 1]] + [[0, 0]] * 1500, FIXED)
    ((block, bad_rows),) = read_all(name, on_bad_row="drop")
    assert block.num_dropped == bad_rows.num_rows == 1500
    assert len(bad_rows.listed) == 1000


def test_the_length_of_vectors_is_that_of_most_rows_not_of_the_first(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [None, [1], [1, 2], [3, 4]])
    assert read_one(name, on_bad_row="drop").features_ND.tolist() == [[1, 2], [3, 4]]


def test_the_length_of_vectors_holds_for_all_files(tmp_path):
    write_rows(tmp_path / "a.parquet", [[1, 2]])
    name = write_rows(tmp_path / "b.parquet", [[1, 2, 3]])
    with pytest.raises(BadRowError, match="must have 2 elements as in the other rows, it has 3") as caught:
        read_all(tmp_path)
    assert f"{name}, row 0" in str(caught.value)


def test_a_data_set_without_a_vector_is_an_error(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [None, []])
    with pytest.raises(SchemaError, match="'feature_arr' has no row with a vector"):
        make_reader(name)


IDS = [
    pa.array([2**53 + 1, -(2**63) + 1, 2**63 - 1]),
    pa.array([2**64 - 1, 0, 2**53 + 1], pa.uint64()),
    pa.array(["a", "", "ü" * 50]),
    pa.array(["a", "b", "c"], pa.large_string()),
    pa.array([b"\x00", b"\xff", b""]),
    pa.array(["x", "y", "x"]).dictionary_encode(),
    pa.array([decimal.Decimal("12345678901234567890123.45"), decimal.Decimal(1), decimal.Decimal(2)]),
    pa.array([uuid.UUID(int=i).bytes for i in range(3)], pa.binary(16)),
    pa.array([uuid.UUID(int=i).bytes for i in range(3)], pa.uuid()),
    pa.array([1.5, 2.5, 3.5]),
]


@pytest.mark.parametrize("ids", IDS, ids=[str(ids.type) for ids in IDS])
def test_ids_keep_their_exact_type_and_every_digit(tmp_path, ids):
    """pandas #56678, fink-client #235: 64-bit ids pass through float64 and lose digits."""
    rows = [[1, 2], [0, 0], [3, 4]]
    name = write(tmp_path / "a.parquet", make_table(3, chunk_id=ids, feature_arr=vectors(rows, LIST)), row_group_size=1)
    block = read_one(name, on_bad_row="drop")
    assert block.ids.type == ids.type == make_reader(name).dataset.id_type
    assert block.ids.to_pylist() == ids.take(pa.array([0, 2])).to_pylist()


def test_more_ids_than_one_array_can_hold_ask_for_smaller_blocks():
    """arrow #14229: offsets overflow when chunks are combined. The gigabyte is never touched."""
    data = np.zeros(11 * 10**8, dtype=np.uint8)
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int32))
    chunk = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(data)])
    with pytest.raises(ConfigError, match=r"the ids of a block of 2 rows do not fit .* lower data\.block_size"):
        _concat_ids([chunk, chunk])


@pytest.mark.parametrize(
    "quality",
    [
        pa.array([1.5, 2.5], pa.float16()),
        pa.array([1.5, 2.5], pa.float32()),
        pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]),
    ],
)
def test_quality_is_the_weighted_sum_of_its_columns_whatever_their_types(tmp_path, quality):
    table = make_table(2, quality_score=quality, flag=pa.array([True, False]), count=pa.array([2**62, 1]))
    weights = {"quality_score": 2.0, "flag": -0.5, "count": 1.0}
    columns = Columns("chunk_id", weights, "feature_arr")
    block = read_one(write(tmp_path / "a.parquet", table), columns=columns)
    assert block.quality_N.tolist() == [np.float32(2.0**62 + 2.5), 6.0]


def test_a_column_may_be_id_and_quality_at_once(tmp_path):
    columns = Columns("chunk_id", {"chunk_id": 1.0}, "feature_arr")
    block = read_one(write(tmp_path / "a.parquet", make_table(3)), columns=columns)
    assert block.quality_N.tolist() == block.ids.to_pylist() == [0, 1, 2]


def test_checking_finds_what_reading_finds(tmp_path):
    name = write_rows(tmp_path / "a.parquet", [[1, 2], [0, 0], [3, 4]])
    reader = make_reader(name, on_bad_row="drop")
    (plan,) = plan_for(reader)
    assert reader.check(plan, 0)[0] == reader.read(plan, 0)[1]
    with pytest.raises(BadRowError, match="row 1"):
        make_reader(name).check(plan, 0)


def test_a_block_that_does_not_fit_into_memory_asks_for_smaller_ones(tmp_path):
    reader = make_reader(write(tmp_path / "a.parquet", make_table(3)))
    reader.num_features = 2**50
    with pytest.raises(ConfigError, match=r"3 rows of 1125899906842624 features takes 1\.35e\+07 GB"):
        reader.read(plan_for(reader)[0], 0)


def test_a_file_that_changes_between_plan_and_reading_is_an_error(tmp_path):
    name = write(tmp_path / "a.parquet", make_table(5))
    reader = make_reader(name)
    (plan,) = plan_for(reader)
    write(tmp_path / "a.parquet", make_table(4))
    with pytest.raises(DataFileError, match=r"a\.parquet has changed .* 5 rows in 1 row groups and has 4 in 1"):
        reader.read(plan, 0)
    os.remove(name)
    with pytest.raises(DataFileError, match=r"a\.parquet does not exist"):
        reader.read(plan, 0)


def test_damage_inside_a_file_is_an_error_that_names_it(tmp_path):
    name = write(tmp_path / "a.parquet", make_table(5000, dim=8), use_dictionary=False, write_page_checksum=True)
    chunk = pq.ParquetFile(name).metadata.row_group(0).column(2)
    with open(name, "r+b") as stream:
        stream.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        stream.write(b"\xff" * 2000)
    with pytest.raises(DataFileError, match=r"a\.parquet cannot be read"):
        read_all(name)


def test_columns_that_are_not_named_are_not_read(tmp_path, monkeypatch):
    """datasets #6149."""
    name = write(tmp_path / "a.parquet", make_table(5, text=pa.array(["x"] * 5)))
    seen = []
    iterate = pq.ParquetFile.iter_batches

    def spy(self, *args, **kwargs):
        for batch in iterate(self, *args, **kwargs):
            seen.append(set(batch.schema.names))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    read_all(name)
    assert seen == [{"chunk_id", "quality_score", "feature_arr"}]


MEASURE_PEAK = """
import resource, sys, pyarrow as pa
from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader, _concat_ids
from datamask_pl.data.schema import Columns, read_dataset

dataset = read_dataset(sys.argv[1], Columns("chunk_id", {"quality_score": 1.0}, "feature_arr"))
reader = BlockReader(dataset, quality_scaling="rank", on_bad_row="error")
rows = [file.row_group_rows for file in dataset.files]
plans = plan_blocks(rows, block_by="rows", block_size=int(sys.argv[2]), seed=0)
reader.read(plan_blocks([[1000]], block_by="rows", block_size=1000, seed=0)[0], 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for index, plan in enumerate(plans):
    block = None
    block = reader.read(plan, index)[0]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, pa.default_memory_pool().max_memory() // 1024)
"""


def test_memory_is_a_block_and_a_constant_not_the_row_group_nor_the_file(tmp_path):
    """arrow #39808, #33759: RAM grows while scanning. One row group of 60 MB, read as 6 blocks of 10 MB."""
    num_rows, dim = 60_000, 256
    features = np.random.default_rng(0).standard_normal(num_rows * dim, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(features), dim)
    table = make_table(num_rows, dim=1, feature_arr=column)
    name = write(tmp_path / "a.parquet", table, row_group_size=num_rows, compression="none", use_dictionary=False)
    command = [sys.executable, "-c", MEASURE_PEAK, name, "10000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown_kib, arrow_kib = map(int, done.stdout.split())
    assert arrow_kib < 32 * 1024, "arrow holds more than a few chunks"
    assert grown_kib < (10 + 25) * 1024, "more than a block and a constant is held"


TEXTS = [f"document-{row}" for row in range(300)]


def read_whole(folder):
    dataset = read_dataset(str(folder), Columns(**COLUMNS))
    reader = BlockReader(dataset, quality_scaling="none", on_bad_row="error")
    (plan,) = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=1000, seed=0)
    return reader.read(plan, 0)[0]


@pytest.mark.parametrize(
    "types",
    [
        (pa.string(), pa.large_string()),
        (pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.large_string(), pa.dictionary(pa.int16(), pa.string())),
    ],
)
def test_ids_that_files_store_in_several_ways_are_one_column(tmp_path, types):
    for part, id_type in enumerate(types):
        ids = pa.array(TEXTS[10 * part : 10 * part + 10]).cast(id_type)
        write(tmp_path / f"shard-{part}.parquet", make_table(10, chunk_id=ids))
    assert read_whole(tmp_path).ids.to_pylist() == TEXTS[:20]


def test_a_block_may_have_more_ids_than_the_indices_of_a_dictionary_hold(tmp_path):
    for part in range(3):
        ids = (
            pa.array(TEXTS[100 * part : 100 * part + 100])
            .dictionary_encode()
            .cast(pa.dictionary(pa.int8(), pa.string()))
        )
        write(tmp_path / f"shard-{part}.parquet", make_table(100, chunk_id=ids))
    assert read_whole(tmp_path).ids.to_pylist() == TEXTS


@pytest.mark.parametrize("is_fixed_first", [True, False])
def test_lists_of_fixed_and_of_any_length_are_mixed_across_files(tmp_path, is_fixed_first):
    types = [pa.list_(pa.float32(), 4), pa.list_(pa.float32())]
    for part, feature_type in enumerate(types if is_fixed_first else types[::-1]):
        write(tmp_path / f"shard-{part}.parquet", make_table(5, first_id=5 * part, feature_type=feature_type))
    assert read_whole(tmp_path).features_ND.shape == (10, 4)


@pytest.mark.parametrize("is_null_first", [True, False])
def test_rows_of_a_file_whose_groups_are_all_null_are_bad_rows(tmp_path, is_null_first):
    groups = [pa.nulls(5), pa.array(["web"] * 5)]
    for part, group in enumerate(groups if is_null_first else groups[::-1]):
        write(tmp_path / f"shard-{part}.parquet", make_table(5, first_id=5 * part, source=group))
    dataset = read_dataset(str(tmp_path), Columns(**COLUMNS, group_column="source"))
    (plan,) = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=100, seed=0)
    block, bad_rows = BlockReader(dataset, quality_scaling="none", on_bad_row="drop").read(plan, 0)
    assert (block.num_samples, bad_rows.num_rows) == (5, 5)
    assert bad_rows.listed[0].reason == "group column 'source' must not be null"
    with pytest.raises(BadRowError, match="group column 'source' must not be null"):
        BlockReader(dataset, quality_scaling="none", on_bad_row="error").read(plan, 0)
