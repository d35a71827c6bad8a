"""A file without rows holds nothing that could be wrong, whatever its columns and their types are called."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from tests.support.fits import files_below, fit, parts, run_folder, selected_ids, write_shards

OPTIONS = ("--data.cost_column", "tokens", "--data.group_column", "source", "--model.select_ratio", "0.3")
# as pandas writes an empty frame: with the names of its columns, and with none
EMPTY = [
    pa.table({name: pa.nulls(0) for name in ("chunk_id", "quality_score", "feature_arr", "tokens", "source", "text")}),
    pa.table({}),
    pa.table({"chunk_id": pa.array([], pa.string()), "feature_arr": pa.array([], pa.binary())}),
]


def columns(num_rows):
    texts = [f"the {'red car' if row % 2 else 'tall tree'} of number {row % 3}" for row in range(num_rows)]
    return {"tokens": pa.array([1.0] * num_rows), "source": pa.array(["a", "b"] * (num_rows // 2)), "text": texts}


def write_empty(folder):
    """Before, between and after the shards, by name."""
    for name, table in zip(("a", "shard-0a", "z"), EMPTY, strict=True):
        pq.write_table(table, folder / f"{name}.parquet")


@pytest.fixture
def data(workplace):
    for size, name in ((20, "whole"), (20, "with")):
        write_shards(workplace / name, [size, size], **columns(size))
    write_empty(workplace / "with")
    return workplace


def test_they_change_no_mask(data):
    pq.write_table(pa.table({"chunk_id": pa.nulls(0)}), data / "none.parquet")
    fit("--data.path", "whole", *OPTIONS, "--mask.output", "one")
    fit("--data.path", "with", *OPTIONS, "--mask.output", "two", "--data.drop_ids", "none.parquet")
    for table, other in zip(parts("one"), parts("two"), strict=True):
        assert table.drop_columns("source_file").equals(other.drop_columns("source_file"))


def test_files_without_a_row_between_them_are_refused_and_told_so(workplace, capsys):
    write_empty(workplace)
    for command in (["fit", "--data.path", "."], ["embed", "--source", ".", "--output", "features.parquet"]):
        with pytest.raises(SystemExit):
            main(command)
        err = capsys.readouterr().err
        assert " matches 3 files without a single row, the first is a" in err.replace("./", "")
    assert not (workplace / "features.parquet").exists()


@pytest.mark.parametrize("join", ["row", "id"])
def test_a_mask_is_applied_to_them(data, join, capsys):
    fit("--data.path", "with", "--mask.output", "mask")
    main(["apply", "--mask", "mask", "--source", "with", "--output", "kept", "--join", join])
    assert f"joined  by {join}\n" in capsys.readouterr().out
    assert {name for name in files_below(data / "kept") if not name.startswith("_")} == set(files_below(data / "with"))
    kept = [pq.read_table(data / f"kept/shard-{index}.parquet")["chunk_id"].to_pylist() for index in range(2)]
    assert [*kept[0], *kept[1]] == selected_ids(parts("mask"))[0]
    for name in ("a", "shard-0a", "z"):
        assert pq.read_table(data / f"kept/{name}.parquet").num_rows == 0


def test_export_and_report_join_columns_beside_them(data):
    pytest.importorskip("matplotlib")
    fit("--data.path", "with")
    costs = ("--cost_column", "tokens", "--group_column", "source", "--source", "with")
    main(["export", "--mask", str(run_folder() / "mask"), "--output", "other", *costs])
    assert [table["group"].to_pylist() for table in parts("other")] == [["a", "b"] * 20]
    main(["report", "--run", str(run_folder()), "--group_column", "source", "--length_column", "text"])


def test_texts_are_embedded_beside_them(data):
    pytest.importorskip("sklearn")
    options = ("--num_dimensions", "2", "--feature_column", "vector")
    for name in ("whole", "with"):
        main(["embed", "--source", name, "--output", f"{name}.parquet", *options])
    assert pq.read_table("whole.parquet").equals(pq.read_table("with.parquet"))
