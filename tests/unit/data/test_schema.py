import decimal
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.errors import ConfigError, DataFileError, SchemaError
from datamask_pl.io.dataset import expand
from datamask_pl.io.parquet import open_parquet
from tests.support.shards import COLUMNS, make_table, write

columns = Columns(**COLUMNS)


def names(path):
    return [str(found) for found in expand(path)]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.parquet", "a.parquet", "sub/c.parquet", "_tmp/d.parquet", ".e.parquet", "notes.txt"):
        write(tmp_path / name, make_table(2))
    return tmp_path


def test_files_directories_globs_and_lists_expand_in_the_order_of_names(tree):
    """A glob passed to pq.read_table is not expanded; the order in which a disk lists files is arbitrary."""
    a, b, c = (str(tree / name) for name in ("a.parquet", "b.parquet", "sub/c.parquet"))
    assert names(b) == [b]
    assert names(str(tree)) == [a, b, c]
    assert names(f"{tree}/*.parquet") == [a, b]
    assert names(f"{tree}/**/[a-c].parquet") == names([c, a, b]) == names(f"file://{tree}")
    assert names([b, a]) == [a, b]


def test_a_file_that_several_paths_match_is_taken_once(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert len(names([str(tree), f"{tree}/*.parquet", "./a.parquet", "sub/../a.parquet"])) == 3


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    name = write(tmp_path / "part[1].parquet", make_table(1))
    assert names(name) == [name]


@pytest.mark.parametrize("path", ["nothing.parquet", "*.arrow", "empty", ["a.parquet", "nothing.parquet"]])
def test_a_path_that_matches_nothing_is_an_error_that_names_it(tree, path, monkeypatch):
    monkeypatch.chdir(tree)
    os.mkdir("empty")
    with pytest.raises(DataFileError, match=r"nothing matches '(nothing\.parquet|\*\.arrow|empty)'"):
        expand(path)


@pytest.mark.parametrize("path", ["", [], ["a", ""]])
def test_no_path_is_an_error(path):
    with pytest.raises(ConfigError, match=r"data\.path"):
        expand(path)


@pytest.fixture
def memory_files():
    filesystem = fsspec.filesystem("memory")
    for name, first_id in (("b", 2), ("a", 0)):
        with filesystem.open(f"/bucket/{name}.parquet", "wb") as stream:
            pq.write_table(make_table(2, first_id=first_id), stream)
    yield
    filesystem.rm("/bucket", recursive=True)


@pytest.mark.parametrize("path", ["memory://bucket/*.parquet", "memory://bucket", "memory://bucket/a.parquet"])
def test_fsspec_urls_are_expanded_and_read(path, memory_files):
    dataset = read_dataset(path, columns)
    expected = ["memory:///bucket/a.parquet", "memory:///bucket/b.parquet"]
    assert [file.name for file in dataset.files] == (expected[:1] if path.endswith("a.parquet") else expected)
    with open_parquet(dataset.files[0].path) as parquet:
        assert parquet.read(["chunk_id"])["chunk_id"].to_pylist() == [0, 1]


@pytest.mark.parametrize("url", ["nosuch://bucket/a.parquet", "memory://secret_place/*"])
def test_a_remote_error_does_not_quote_what_the_file_system_said(url):
    with pytest.raises(DataFileError) as caught:
        expand(url)
    assert "Protocol not known" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (lambda whole: b"", r"is empty \(0 bytes\)"),
        (lambda whole: whole[: len(whole) // 2], "is cut off"),
        (lambda whole: b"PAR1", "is cut off"),
        (lambda whole: b"id,text\n1,a\n", "is not a parquet file"),
        (lambda whole: whole[:-20] + b"x" * 12 + whole[-8:], "is damaged|cannot be read"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path, content, fault):
    """A 0-byte or cut-off file among whole ones."""
    whole = write(tmp_path / "a.parquet", make_table(3))
    with open(whole, "rb") as stream:
        data = stream.read()
    broken = tmp_path / "b.parquet"
    broken.write_bytes(content(data))
    with pytest.raises(DataFileError, match=fault) as caught:
        read_dataset(str(tmp_path), columns)
    assert str(broken) in str(caught.value)


def test_a_missing_column_lists_the_columns_that_there_are(tmp_path):
    name = write(tmp_path / "a.parquet", make_table(1, quality_score=None, score=pa.array([1.0])))
    with pytest.raises(
        SchemaError,
        match=r"no column 'quality_score'; its columns are: chunk_id, feature_arr, score\. data\.quality_col",
    ):
        read_dataset(name, columns)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = make_table(1).append_column("chunk_id", pa.array([3]))
    with pytest.raises(SchemaError, match="2 columns named 'chunk_id'"):
        read_dataset(write(tmp_path / "a.parquet", table), columns)


def test_two_files_that_disagree_about_a_type_are_both_named_with_both_types(tmp_path):
    """hub viewer #2625, datasets #7449."""
    first = write(tmp_path / "a.parquet", make_table(2))
    second = write(tmp_path / "b.parquet", make_table(2, chunk_id=pa.array(["x", "y"])))
    with pytest.raises(SchemaError) as caught:
        read_dataset(str(tmp_path), columns)
    assert f"'chunk_id' is int64 in {first} and string in {second}" in str(caught.value)


def test_two_files_with_vectors_of_another_length_are_both_named(tmp_path):
    write(tmp_path / "a.parquet", make_table(2, dim=4))
    write(tmp_path / "b.parquet", make_table(2, dim=5))
    with pytest.raises(SchemaError, match=r"list<float>\[4\] in .*a\.parquet and list<float>\[5\] in .*b\.parquet"):
        read_dataset(str(tmp_path), columns)


def test_files_may_differ_in_extra_columns_row_groups_and_the_name_of_the_list_field(tmp_path):
    """datasets #6149: extra columns must not matter."""
    item, element = (pa.list_(pa.field(name, pa.float32(), nullable=name == "item")) for name in ("item", "element"))
    write(tmp_path / "a.parquet", make_table(3, feature_type=item, text=pa.array(list("abc"))), row_group_size=2)
    write(tmp_path / "b.parquet", make_table(2, feature_type=element, text=pa.array([[1], [2]])))
    dataset = read_dataset(str(tmp_path), columns)
    assert [file.row_group_rows for file in dataset.files] == [(2, 1), (2,)]


@pytest.mark.parametrize("value_type", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list, lambda value_type: pa.list_(value_type, 4)])
def test_every_list_of_floats_is_a_feature_column(tmp_path, value_type, make_list):
    name = write(tmp_path / "a.parquet", make_table(2, feature_type=make_list(value_type)))
    assert read_dataset(name, columns).feature_type.value_type == value_type


@pytest.mark.parametrize(
    ("column", "remedy"),
    [
        (pa.array([[1, 2]], pa.list_(pa.uint16())), "bfloat16 numbers, write them as float32"),
        (pa.array([[1, 2]], pa.list_(pa.int8())), "list of float16, float32 or float64"),
        (pa.array([1.0]), "list of float16, float32 or float64"),
        (pa.array([[[1.0]]]), "list of float16, float32 or float64"),
        (pa.array([b"abcd"]), "it is binary"),
    ],
)
def test_other_feature_types_are_refused_with_what_to_do(tmp_path, column, remedy):
    """arrow #39790: half floats; bfloat16 is stored as uint16 by those who can."""
    name = write(tmp_path / "a.parquet", make_table(1, feature_arr=column))
    with pytest.raises(SchemaError, match=remedy):
        read_dataset(name, columns)


@pytest.mark.parametrize("column", [["x"], [[1.0]], [b"x"], [None]])
def test_a_quality_that_is_no_number_is_refused(tmp_path, column):
    name = write(tmp_path / "a.parquet", make_table(1, quality_score=pa.array(column)))
    with pytest.raises(SchemaError, match="quality column 'quality_score' must be a float, integer, decimal or bool"):
        read_dataset(name, columns)


@pytest.mark.parametrize("column", [[1], [True], [decimal.Decimal("1.5")], [1.5]])
def test_a_quality_may_be_any_number(tmp_path, column):
    read_dataset(write(tmp_path / "a.parquet", make_table(1, quality_score=pa.array(column))), columns)


def test_a_nested_id_is_refused(tmp_path):
    name = write(tmp_path / "a.parquet", make_table(1, chunk_id=pa.array([{"a": 1}])))
    with pytest.raises(SchemaError, match="id column 'chunk_id' must hold one plain value a row, it is struct"):
        read_dataset(name, columns)


def test_files_without_rows_are_fine_unless_all_are(tmp_path):
    write(tmp_path / "a.parquet", make_table(0))
    with pytest.raises(DataFileError, match="without a single row"):
        read_dataset(str(tmp_path), columns)
    write(tmp_path / "b.parquet", make_table(2))
    assert [file.num_rows for file in read_dataset(str(tmp_path), columns).files] == [0, 2]
