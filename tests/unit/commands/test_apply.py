"""What a mask keeps comes out bit for bit, in order and in files of the same names, or nothing is written."""

import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datamask_pl.commands import apply as module
from datamask_pl.commands.apply import apply
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, SchemaError
from datamask_pl.mask.parts import part_name
from tests.support.fits import ROOT, files_below
from tests.support.shards import write

HASH = "a" * 64
ID_KINDS = {
    "int64": lambda rows: pa.array([2**63 - 1 - row for row in rows], pa.int64()),
    "uint64": lambda rows: pa.array([2**64 - 1 - row for row in rows], pa.uint64()),
    "int8": lambda rows: pa.array([row - 100 for row in rows], pa.int8()),
    "float16": lambda rows: pa.array([np.float16(row) for row in rows], pa.float16()),
    "string": lambda rows: pa.array([f"ü{row}" for row in rows], pa.string()),
    "large_string": lambda rows: pa.array([f"ü{row}" for row in rows], pa.large_string()),
    "string_view": lambda rows: pa.array([f"ü{row}" for row in rows], pa.string_view()),
    "binary": lambda rows: pa.array([bytes([row] * (row % 20)) + bytes([row]) for row in rows], pa.binary()),
    "fixed binary": lambda rows: pa.array([bytes([row] * 16) for row in rows], pa.binary(16)),
    "uuid": lambda rows: pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([bytes([row] * 16) for row in rows], pa.binary(16))
    ),
    "decimal": lambda rows: pa.array([Decimal(f"{10**30 + row}.5") for row in rows], pa.decimal128(38, 1)),
    "timestamp": lambda rows: pa.array([10**18 + row for row in rows], pa.timestamp("ns", "UTC")),
    "dictionary": lambda rows: pa.array([f"x{row}" for row in rows], pa.string()).dictionary_encode(),
}


def write_mask(folder, ids, places, selected, *, files, num_blocks=1, num_dropped=0, order=None):
    """A mask folder by its documented format: samples of the given ids, (file, row) places and flags."""
    order = list(range(len(places))) if order is None else order
    folder.mkdir(parents=True, exist_ok=True)
    blocks = {}
    for block, rows in enumerate(np.array_split(np.array(order, dtype=np.int64), num_blocks)):
        num_selected = sum(bool(selected[row]) for row in rows)
        about = {"num_samples": len(rows), "num_selected": num_selected}
        about["num_dropped"] = num_dropped if block == 0 else 0
        blocks[str(block)] = about
        table = pa.table(
            {
                "id": ids.take(pa.array(rows))
                if ids.type != pa.string_view()
                else pa.array([ids[row].as_py() for row in rows.tolist()], ids.type),
                "source_file": pa.DictionaryArray.from_arrays(
                    pa.array([places[row][0] for row in rows], pa.int32()), pa.array(files)
                ),
                "source_row": pa.array([places[row][1] for row in rows], pa.int64()),
                "selected": pa.array([bool(selected[row]) for row in rows], pa.bool_()),
            }
        )
        metadata = {"format": 1, "plan_hash": HASH, "settings": {}, "about": about}
        table = table.replace_schema_metadata({"datamask_pl": json.dumps(metadata)})
        pq.write_table(table, folder / part_name(block), compression="zstd")
    manifest = {
        "plan_hash": HASH, "files": files, "num_blocks": num_blocks, "settings": {}, "versions": {}, "blocks": blocks
    }  # fmt: skip
    (folder / "_manifest.json").write_text(json.dumps(manifest))
    return str(folder)


def table_of(num_rows, first_id=0, **columns):
    rows = range(first_id, first_id + num_rows)
    return pa.table({"chunk_id": pa.array(rows), "text": [f"text {row}" for row in rows], **columns})


class Case:
    """Two files of 6 and 4 rows and a mask of three of them in two parts, ready to be applied."""

    selected = (True, False, False, False, False, True, False, True, False, False)

    def __init__(self, folder):
        self.folder = folder
        self.tables = [table_of(6), table_of(4, 6)]
        self.write_source()
        self.files = ["data/a.parquet", "data/sub/b.parquet"]
        self.places = [(0, row) for row in range(6)] + [(1, row) for row in range(4)]
        self.mask = self.write_mask()

    def write_source(self, folder="data", names=("a.parquet", "sub/b.parquet"), **kwargs):
        for name, table in zip(names, self.tables, strict=True):
            write(self.folder / folder / name, table, **{"row_group_size": 3, **kwargs})
        return str(self.folder / folder)

    def write_mask(self, ids=None, **kwargs):
        ids = pa.array(range(10)) if ids is None else ids
        return write_mask(
            self.folder / "mask", ids, self.places, self.selected, **{"files": self.files, "num_blocks": 2, **kwargs}
        )

    def apply(self, source="data", **kwargs):
        apply(str(self.folder / "mask"), str(self.folder / source), str(self.folder / "out"), **kwargs)

    def ids(self, folder="out"):
        return [
            pq.read_table(path)["chunk_id"].to_pylist() for path in sorted((self.folder / folder).rglob("*.parquet"))
        ]


@pytest.fixture
def case(workplace):
    return Case(workplace)


class TestJoin:
    def test_by_row_in_any_order_of_the_mask(self, case, capsys):
        case.write_mask(order=[7, 3, 0, 9, 5, 1, 8, 2, 6, 4])
        case.apply()
        assert case.ids() == [[0, 5], [7]]
        assert "joined  by row\n" in capsys.readouterr().out
        assert files_below("out") == ["_apply.json", "a.parquet", "sub", "sub/b.parquet"]

    @pytest.mark.parametrize("join", ["auto", "id"])
    def test_by_id_in_files_of_other_names_and_order(self, case, join, capsys):
        case.tables = [table.take(pa.array(range(len(table))[::-1])) for table in case.tables]
        source = case.write_source("texts", names=("y.parquet", "x.parquet"))
        case.apply(source, join=join)
        assert case.ids() == [[7], [5, 0]]
        assert "joined  by id\n" in capsys.readouterr().out

    def test_files_that_were_sorted_anew_under_their_old_names_are_joined_by_id(self, case, capsys):
        case.tables = [table.take(pa.array(range(len(table))[::-1])) for table in case.tables]
        case.write_source()
        with pytest.raises(ConfigError, match=r"a\.parquet, row 0, has id 5 and the mask has 0 there; use join: id"):
            case.apply(join="row")
        case.apply()
        assert case.ids() == [[5, 0], [7]]
        assert "joined  by id\n" in capsys.readouterr().out

    @pytest.mark.parametrize("join", ["auto", "row", "id"])
    def test_a_source_without_ids_is_refused(self, case, join):
        case.tables = [table.drop_columns("chunk_id") for table in case.tables]
        case.write_source()
        with pytest.raises(SchemaError, match=r"a\.parquet has no column 'chunk_id' to compare with the mask's ids"):
            case.apply(join=join)
        assert not Path("out").exists()

    def test_the_id_column_is_the_one_of_the_run(self, case, capsys):
        path = Path(case.mask, "_manifest.json")
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "config": {"data": {"id_column": "url"}}}))
        case.tables = [table.rename_columns(["url", "text"])[::-1] for table in case.tables]
        case.write_source()
        case.apply()
        assert [pq.read_table(f"out/{name}")["url"].to_pylist() for name in ("a.parquet", "sub/b.parquet")] == [
            [5, 0],
            [7],
        ]
        assert "joined  by id\n" in capsys.readouterr().out

    def test_bad_rows_that_the_run_left_out_are_not_kept(self, case):
        case.places = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3)]
        case.selected = (False,) * 4 + (True,) * 5
        ids = pa.array([0, 1, 2, 3, 5, 6, 7, 8, 9])
        case.write_mask(ids, num_dropped=1)
        case.apply(complement="rest")
        assert case.ids() == [[5], [6, 7, 8, 9]]
        assert case.ids("rest") == [[0, 1, 2, 3, 4], []]

    def test_a_shard_of_the_source_by_itself_says_what_is_not_in_it(self, case, capsys):
        case.apply("data/a.parquet")
        assert case.ids() == [[0, 5]]
        assert "note    1 samples that the mask selects are not in the source\n" in capsys.readouterr().out

    @pytest.mark.parametrize("kind", ID_KINDS)
    def test_ids_of_every_type(self, case, kind):
        make = ID_KINDS[kind]
        case.tables = [pa.table({"chunk_id": make(rows), "n": list(rows)}) for rows in (range(6), range(6, 10))]
        case.write_mask(make(range(10)))
        case.write_source("texts", ("x.parquet", "y.parquet"))
        case.apply("texts")
        assert [pq.read_table(f"out/{name}.parquet")["n"].to_pylist() for name in "xy"] == [[0, 5], [7]]
        assert pq.read_schema("out/x.parquet").field("chunk_id").type == make([1]).type

    def test_how_a_writer_stores_strings_does_not_matter(self, case):
        case.tables = [pa.table({"chunk_id": ID_KINDS["dictionary"](rows)}) for rows in (range(6), range(6, 10))]
        case.write_mask(pa.array([f"x{row}" for row in range(10)], pa.large_string()))
        case.write_source("texts", ("x.parquet", "y.parquet"))
        case.apply("texts")
        assert case.ids() == [["x0", "x5"], ["x7"]]

    def test_another_type_is_refused_and_named(self, case):
        """Pandas #56678: ids that are made to fit another type lose digits."""
        case.tables = [table.set_column(0, "chunk_id", table["chunk_id"].cast(pa.int32())) for table in case.tables]
        with pytest.raises(
            SchemaError, match=r"column 'chunk_id' is int32 in .*x\.parquet and int64 in the mask \(joi"
        ):
            case.apply(case.write_source("texts", ("x.parquet", "y.parquet")))
        with pytest.raises(SchemaError, match=r"x\.parquet has no column 'url' to compare"):
            case.apply("texts", id_column="url")
        assert not Path("out").exists()

    def test_missing_ids_are_counted_and_the_first_is_named(self, case):
        case.tables[1] = table_of(4, 8)
        source = case.write_source("texts", ("x.parquet", "y.parquet"))
        with pytest.raises(BadRowError, match=r"y\.parquet, row 2: .* not have id 10, nor those of 1 more of 10 rows;"):
            case.apply(source)
        assert not Path("out").exists()
        case.apply(source, on_missing="drop")
        assert case.ids() == [[0, 5], []]

    def test_a_null_id_is_one_that_the_mask_does_not_have(self, case):
        case.tables[0] = case.tables[0].set_column(0, "chunk_id", pa.array([0, 1, None, 3, 4, 5]))
        with pytest.raises(BadRowError, match=r"x\.parquet, row 2: the mask does not have id None"):
            case.apply(case.write_source("texts", ("x.parquet", "y.parquet")))

    def test_ids_that_repeat_in_the_source(self, case):
        case.tables[1] = table_of(4, 5)
        source = case.write_source("texts", ("x.parquet", "y.parquet"))
        with pytest.raises(
            BadRowError,
            match=r"y\.parquet, row 0: duplicate id 5: it already occurs in an earlier row, as do the ids of 0",
        ):
            case.apply(source)
        case.apply(source, on_duplicate="keep")
        assert case.ids() == [[0, 5], [5, 7]]

    def test_ids_that_repeat_in_the_mask(self, case):
        ids = [0, 1, 2, 3, 4, 5, 6, 0, 8, 9]
        case.write_mask(pa.array(ids))
        case.tables = [table_of(6), table_of(4, 6).set_column(0, "chunk_id", pa.array(ids[6:]))]
        source = case.write_source("texts", ("x.parquet", "y.parquet"))
        with pytest.raises(BadRowError, match=r"id 0 occurs more than once in the mask \(1 of 10 ids are duplicates\)"):
            case.apply(source)
        case.apply(source, on_duplicate="keep")
        assert case.ids() == [[0, 5], [0]]
        case.write_source()  # which by row is no difficulty
        apply("mask", "data", "by-row")
        assert case.ids("by-row") == [[0, 5], [0]]


class TestFiles:
    def test_row_groups_and_files_of_which_nothing_is_kept(self, case):
        case.selected = (False,) * 3 + (True, False, True) + (False,) * 4
        case.write_mask()
        case.apply()
        footer = pq.read_metadata("out/a.parquet")
        assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == [2]
        assert pq.read_table("out/sub/b.parquet").equals(case.tables[1].slice(0, 0))

    def test_codecs_encodings_and_metadata_are_those_of_the_source(self, case):
        score = pa.field("score", pa.float32(), nullable=False, metadata={"unit": "share"})
        for index, table in enumerate(case.tables):
            table = table.append_column(score, pa.array(np.ones(len(table), np.float32)))
            case.tables[index] = table.replace_schema_metadata({"made by": "a test"})
        case.write_source(
            compression={"chunk_id": "gzip", "text": "zstd", "score": "none"},
            use_dictionary=["text"],
            column_encoding={"score": "BYTE_STREAM_SPLIT", "chunk_id": "DELTA_BINARY_PACKED"},
        )
        case.apply()
        for name in ("a.parquet", "sub/b.parquet"):
            before, after = (pq.ParquetFile(Path(folder) / name) for folder in ("data", "out"))
            assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
            assert after.metadata.metadata.keys() == before.metadata.metadata.keys()
            for index in range(3):
                one, other = (file.metadata.row_group(0).column(index) for file in (before, after))
                assert (one.compression, set(one.encodings)) == (other.compression, set(other.encodings))

    def test_keys_of_the_footer_that_are_not_in_the_schema(self, case):
        """Polars and others write keys next to ARROW:schema, which holds the keys of the schema alone."""
        source = Path("data/a.parquet")
        with pq.ParquetWriter(source, case.tables[0].schema) as writer:
            writer.write_table(case.tables[0])
            writer.add_key_value_metadata({"POLARS": "x"})
        case.apply()
        assert pq.read_metadata("out/a.parquet").metadata[b"POLARS"] == b"x"

    def test_the_second_time_nothing_is_done(self, case, capsys, monkeypatch):
        case.apply()
        before = {name: os.stat(f"out/{name}").st_mtime_ns for name in files_below("out")}
        capsys.readouterr()
        monkeypatch.setattr(module, "write_kept", lambda *_: pytest.fail("nothing is left to write"))
        case.apply()
        assert {name: os.stat(f"out/{name}").st_mtime_ns for name in files_below("out")} == before
        out = capsys.readouterr().out
        assert out.startswith("nothing was left to do\nkept    3 of 10 rows in 2 files, ")

    def test_files_that_are_damaged_or_gone_are_written_again(self, case):
        case.apply()
        whole = Path("out/a.parquet").read_bytes()
        Path("out/a.parquet").write_bytes(whole[:-9])
        Path("out/sub/b.parquet").unlink()
        case.apply()
        assert Path("out/a.parquet").read_bytes() == whole
        assert case.ids() == [[0, 5], [7]]

    def test_a_run_that_failed_half_way_is_finished(self, case, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(pq.ParquetWriter, "write_table", fail_on(pq.ParquetWriter.write_table, call=3))
            with pytest.raises(DataFileError, match=r"/out/sub/b\.parquet cannot be written: No space left"):
                case.apply(num_workers=1)
        assert files_below("out") == ["_apply.json", "a.parquet", "sub"]
        case.apply()
        assert case.ids() == [[0, 5], [7]]

    def test_a_source_of_which_nothing_was_written_may_be_mended(self, case, monkeypatch):
        names = ("a.parquet", "b.parquet")
        case.write_source("text", names)
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_kept", refuse)
            with pytest.raises(DataFileError, match="it is damaged"):
                case.apply("text")
        assert files_below("out") == ["_apply.json"]
        case.write_source("text", names, row_group_size=2)
        case.apply("text")
        assert case.ids() == [[0, 5], [7]]


def refuse(source, *_):
    raise DataFileError(f"{source.name}: it is damaged")


def fail_on(function, *, call):
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    return failing


class TestRefusals:
    def test_a_mask_that_is_not_finished(self, case):
        (case.folder / "mask" / part_name(1)).unlink()
        with pytest.raises(ConfigError, match=r"has 1 of 2 parts, the first .* part-00001\.parquet; finish the run"):
            case.apply()
        assert not Path("out").exists()

    def test_a_folder_that_is_no_mask(self, case):
        with pytest.raises(DataFileError, match=r"^data is not a mask folder: it has no _manifest\.json; pass"):
            apply("data", "data", "out")

    def test_a_part_that_is_cut_off_or_of_other_data(self, case):
        part = case.folder / "mask" / part_name(1)
        whole = part.read_bytes()
        part.write_bytes(whole[:-5])
        with pytest.raises(DataFileError, match=r"part-00001\.parquet is damaged \(.*\); the command that made"):
            case.apply()
        table = pq.read_table(case.folder / "mask" / part_name(0))
        changed = {"datamask_pl": table.schema.metadata[b"datamask_pl"].replace(b"aaaa", b"bbbb")}
        pq.write_table(table.replace_schema_metadata(changed), part)
        with pytest.raises(DataFileError, match=r"part-00001\.parquet is the mask of other data \(plan bbbbbbbbbbbb"):
            case.apply()

    @pytest.mark.parametrize(
        ("content", "fault"), [(b"", "is empty"), (b"no", "is not a parquet file"), (None, "cut off")]
    )
    def test_a_broken_source_is_named_before_anything_is_written(self, case, content, fault):
        path = case.folder / "data" / "sub" / "b.parquet"
        path.write_bytes(path.read_bytes()[:-20] if content is None else content)
        with pytest.raises(DataFileError, match=rf"b\.parquet .*{fault}"):
            case.apply()
        assert not Path("out").exists()

    @pytest.mark.parametrize("option", ["output", "complement"])
    def test_a_folder_of_the_source_or_one_with_other_things(self, case, option):
        def run(folder, source="data"):
            apply("mask", source, **{"output": "elsewhere", option: folder})

        for source in ("data", "data/**/*.parquet"):
            for folder in ("data", "data/new", "data/../data/new"):
                with pytest.raises(
                    ConfigError, match=rf"^{option} {folder} is the source's folder, or in it; give one"
                ):
                    run(folder, source)
        with pytest.raises(ConfigError, match=rf"^{option} data is the source's folder"):
            run("data", "data/a.parquet")
        with pytest.raises(
            ConfigError, match=rf"^{option} mask holds other things, such as _manifest\.json; pass a new"
        ):
            run("mask")
        Path("file").touch()
        with pytest.raises(ConfigError, match=rf"^{option} file is a file; pass the path of a folder\.$"):
            run("file")
        with pytest.raises(ConfigError, match=rf"^{option} must be a path on this machine or in an object store"):
            run("sftp://x")
        assert not Path("elsewhere").exists()

    def test_output_and_complement_in_one(self, case):
        for complement in ("out", "out/rest", "."):
            with pytest.raises(ConfigError, match="must not lie in each other"):
                case.apply(complement=complement)

    def test_an_output_of_another_mask_or_source(self, case):
        case.apply()
        case.selected = tuple(not flag for flag in case.selected)
        case.write_mask()
        with pytest.raises(ConfigError, match="out was made with another mask or from another source; pass another"):
            case.apply()
        assert case.ids() == [[0, 5], [7]]
        Path("out/_apply.json").write_text("{")
        with pytest.raises(DataFileError, match=r"_apply\.json cannot be read"):
            case.apply()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"join": "both"}, "join must be one of auto, row, id, got 'both'."),
            ({"on_missing": "keep"}, "on_missing must be one of error, drop, got 'keep'."),
            ({"on_duplicate": "drop"}, "on_duplicate must be one of error, keep, got 'drop'."),
            ({"num_workers": 0}, "num_workers must be at least 1, got 0."),
        ],
    )
    def test_an_option_that_cannot_work(self, case, options, words):
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
            case.apply(**options)

    def test_row_says_which_file_is_another(self, case):
        for change, words in (
            (lambda: (case.folder / "data" / "a.parquet").unlink(), "a.parquet is only among those of the mask"),
            (lambda: write(case.folder / "data" / "a.parquet", table_of(7)), "has 7 rows and the mask is of 6"),
            (lambda: write(case.folder / "data" / "a.parquet", table_of(5)), "has 5 rows and the mask is of 6 or more"),
        ):
            change()
            with pytest.raises(ConfigError, match=f"join: row needs the files .* {re.escape(words)}; use join: id"):
                apply("mask", ["data/sub", *([] if "among" in words else ["data/a.parquet"])], "out", join="row")


SCALARS = {
    "i": (st.integers(-(2**63), 2**63 - 1), pa.int64()),
    "b": (st.booleans(), pa.bool_()),
    "f": (st.floats(width=32), pa.float32()),
    "s": (st.text(max_size=5), pa.string()),
    "v": (st.text(max_size=5), pa.string_view()),
    "y": (st.binary(max_size=20), pa.large_binary()),
    "d": (st.sampled_from(["x", "y", "z"]), pa.dictionary(pa.int8(), pa.string())),
    "t": (st.integers(0, 2**40), pa.timestamp("us", "Europe/Berlin")),
}


def columns_of():
    """Values and their type: scalars, lists, structs and lists of structs, with nulls at all levels."""

    def nest(inner):
        values, data_type = inner
        nullable = st.none() | values
        name = st.sampled_from(["list", "large_list", "fixed", "struct", "list of structs"])
        made = {
            "list": (st.lists(nullable, max_size=3), pa.list_(data_type)),
            "large_list": (st.lists(nullable, max_size=3), pa.large_list(data_type)),
            "fixed": (st.lists(nullable, min_size=2, max_size=2), pa.list_(data_type, 2)),
            "struct": (st.fixed_dictionaries({"a": nullable, "b": st.booleans()}),
                       pa.struct([("a", data_type), ("b", pa.bool_())])),
            "list of structs": (st.lists(st.fixed_dictionaries({"a": nullable}), max_size=2),
                                pa.list_(pa.struct([("a", data_type)]))),
        }  # fmt: skip
        return name.map(made.__getitem__)

    scalar = st.sampled_from(list(SCALARS.values()))
    plain = st.sampled_from([SCALARS[key] for key in "ibfsyt"])
    return scalar | plain.flatmap(nest)


def rows_of(table):
    """Rows in a form in which NaN equals itself and -0.0 does not equal 0.0."""
    return [repr(row) for row in table.to_pylist()]


@st.composite
def data_sets(draw):
    specs = draw(st.lists(columns_of(), min_size=1, max_size=3))
    files, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(0, 12))
        columns = [
            pa.array(draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)), data_type)
            for values, data_type in specs
        ]
        kind = draw(st.sampled_from(["int64", "string"])) if not files else kind  # noqa: F821
        ids = ID_KINDS[kind](range(first, first + num_rows))
        names = ["chunk_id", *(f"c{index}" for index in range(len(columns)))]
        files.append((pa.table([ids, *columns], names=names), draw(st.integers(1, 6))))
        first += num_rows
    selected = draw(st.lists(st.booleans(), min_size=first, max_size=first))
    return files, kind, selected, draw(st.permutations(range(first))), draw(st.booleans()), draw(st.integers(1, 3))


@given(data_sets())
@settings(
    max_examples=settings().max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_kept_rows_are_those_of_the_source_in_their_order(tmp_path_factory, data_set):
    files, kind, selected, order, by_row, num_blocks = data_set
    folder = tmp_path_factory.mktemp("law")
    for index, (table, row_group_size) in enumerate(files):
        write(folder / "data" / f"{index}.parquet", table, row_group_size=row_group_size)
    places = [(index, row) for index, (table, _) in enumerate(files) for row in range(len(table))]
    prefix = "data" if by_row else "features-"
    names = [f"{prefix}/{index}.parquet" if by_row else f"{prefix}{index}" for index in range(len(files))]
    ids = ID_KINDS[kind](range(len(places)))
    mask = write_mask(folder / "mask", ids, places, selected, files=names, order=order, num_blocks=num_blocks)
    out = (str(folder / "data"), str(folder / "kept"))
    apply(mask, *out, complement=str(folder / "rest"), join="row" if by_row else "auto", num_workers=2)
    start = 0
    for index, (table, _) in enumerate(files):
        source = pq.read_table(folder / "data" / f"{index}.parquet")
        flags = selected[start : start + len(table)]
        start += len(table)
        for name, wanted in (("kept", True), ("rest", False)):
            result = pq.read_table(folder / name / f"{index}.parquet")
            assert result.schema.equals(source.schema, check_metadata=True)
            expected = [row for row, flag in zip(rows_of(source), flags, strict=True) if flag is wanted]
            assert rows_of(result) == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """arrow #39808, #33759: RAM grows while a file is scanned."""
    num_rows, num_groups = 4000, 24
    schema = pa.schema([("chunk_id", pa.int64()), ("blob", pa.binary())])
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    with pq.ParquetWriter(tmp_path / "data" / "a.parquet", schema, compression="none", use_dictionary=False) as writer:
        for group in range(num_groups):
            ids = np.arange(group * num_rows, (group + 1) * num_rows)
            writer.write_table(pa.table([ids, [rng.bytes(4096) for _ in ids]], schema=schema), row_group_size=num_rows)
    total = num_rows * num_groups
    selected = np.arange(total) % 10 == 0
    write_mask(
        tmp_path / "mask",
        pa.array(range(total)),
        [(0, row) for row in range(total)],
        selected,
        files=["data/a.parquet"],
    )
    # the peak of this process itself; ru_maxrss would begin with that of its parent
    code = (
        "from pathlib import Path; from datamask_pl.commands.apply import apply;"
        "peak = lambda: int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]);"
        "before = peak(); apply('mask', 'data', 'out'); print(peak() - before)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=300
    )
    grown_mib = int(done.stdout.split()[-1]) / 1024
    assert pq.read_metadata(tmp_path / "out" / "a.parquet").num_rows == selected.sum()
    assert grown_mib < 160, f"{grown_mib:.0f} MiB for a file of {total * 4096 >> 20} MiB"
