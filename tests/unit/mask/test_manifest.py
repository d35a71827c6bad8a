import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamask_pl.errors import ConfigError, DataFileError
from datamask_pl.mask.manifest import Manifest, read_columns, read_complete
from datamask_pl.mask.parts import BlockEntry, list_parts, part_name, read_part, write_part
from tests.support.masks import FILES, HASH, SETTINGS, result


def write(folder, **kwargs):
    write_part(folder, result(**kwargs), files=FILES, plan_hash=HASH, settings=SETTINGS)
    return folder / part_name(kwargs.get("index", 0))


class TestPart:
    def test_it_holds_a_row_a_sample_in_the_documented_types(self, tmp_path):
        table = pq.read_table(write(tmp_path / "mask"))
        assert {field.name: str(field.type) for field in table.schema} == {
            "id": "int64",
            "source_file": "dictionary<values=string, indices=int32, ordered=0>",
            "source_row": "int64",
            "selected": "bool",
            "logit": "float",
            "probability": "float",
            "quality": "float",
        }
        assert table["id"].to_pylist() == [2**63 - 1 - row for row in range(5)]
        assert table["source_file"].to_pylist() == ["one.parquet", "two.parquet"] * 2 + ["one.parquet"]
        assert table["selected"].to_pylist() == [True, True, False, False, False]
        assert np.array_equal(table["logit"].to_numpy(), np.linspace(1, -1, 5, dtype=np.float32))

    def test_one_that_is_whole_says_what_the_manifest_says(self, tmp_path):
        write(tmp_path, index=3)
        expected = BlockEntry.of(result(3))
        assert read_part(tmp_path, 3) == expected
        assert read_part(tmp_path, 3, plan_hash=HASH, settings=dict(SETTINGS)) == expected

    def test_one_of_other_data_is_refused(self, tmp_path):
        write(tmp_path)
        with pytest.raises(ConfigError, match=r"is the mask of other data \(plan aaaaaaaaaaaa, here bbbbbbbbbbbb\)"):
            read_part(tmp_path, 0, plan_hash="b" * 64)

    def test_one_of_other_settings_is_refused_with_both_values(self, tmp_path):
        write(tmp_path)
        with pytest.raises(ConfigError, match=r"model\.max_lr is 2\.0 there and 3\.0 here\. Pass the same ones"):
            read_part(tmp_path, 0, settings={**SETTINGS, "model.max_lr": 3.0})

    def test_one_that_is_not_there_is_none(self, tmp_path):
        write(tmp_path, index=3)
        assert read_part(tmp_path, 2) is None

    @pytest.mark.parametrize("what", ["cut", "empty", "not ours", "fewer rows", "folder"])
    def test_one_that_cannot_be_read_counts_for_nothing_and_is_said(self, tmp_path, what):
        path = write(tmp_path)
        if what in ("cut", "empty"):
            path.write_bytes(path.read_bytes()[: -20 if what == "cut" else 0])
        elif what == "not ours":
            pq.write_table(pa.table({"id": [1]}), path)
        elif what == "fewer rows":
            pq.write_table(pq.read_table(path).slice(1), path)
        else:
            path.unlink()
            path.mkdir()
        with pytest.warns(UserWarning, match=r"part-00000\.parquet is damaged .*; its block is learned again"):
            assert read_part(tmp_path, 0) is None

    def test_parts_are_listed_in_order_and_other_files_are_not(self, tmp_path):
        for index in (100000, 12, 3):
            write(tmp_path, index=index)
        for name in (".part-00004.parquet.1-ab.tmp", "part-4.parquet", "part-00005.parquet.bak"):
            (tmp_path / name).touch()
        assert list_parts(tmp_path) == [3, 12, 100000]
        assert list_parts(tmp_path / "missing") == []

    def test_a_folder_that_is_a_file_is_an_error(self, tmp_path):
        (tmp_path / "mask").write_text("")
        with pytest.raises(DataFileError, match="not a folder"):
            write(tmp_path / "mask")


class TestColumns:
    NAMES: ClassVar = ["id", "source_file", "source_row", "selected", "logit", "probability", "quality"]

    def read(self, folder, names=NAMES):
        dataclasses.replace(TestManifest.MANIFEST, num_blocks=1, settings=SETTINGS, blocks={}).write(folder)
        return read_columns(folder, 0, read_complete(folder), list(names))

    def rewrite(self, folder, **columns):
        path = write(folder)
        table = pq.read_table(path)
        for name, column in columns.items():
            table = table.set_column(table.column_names.index(name), name, column)
        pq.write_table(table, path)

    def test_what_was_written_is_read(self, tmp_path):
        table = pq.read_table(write(tmp_path))
        assert self.read(tmp_path).equals(table.select(self.NAMES))
        assert self.read(tmp_path, ["selected"]).column_names == ["selected"]

    @pytest.mark.parametrize(
        ("columns", "words"),
        [
            ({"source_row": pa.array([0, -1, 2, 3, 4])}, "a source_row is negative"),
            ({"source_row": pa.array([0, None, 2, 3, 4])}, "column source_row is of type int64 with 1 nulls"),
            ({"source_row": pa.array([0.0] * 5)}, "column source_row is of type double"),
            ({"selected": pa.array([True] * 5)}, "5 samples are selected instead of 2"),
            ({"selected": pa.array([1, 1, 0, 0, 0])}, "column selected is of type int64"),
            ({"id": pa.array([1, 2, None, 4, 5])}, "column id is of type int64 with 1 nulls"),
            (
                {"source_file": pa.array(["three.parquet"] * 5).dictionary_encode()},
                "a source_file is none of the manifest's files",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_a_value_that_cannot_be_is_damage(self, tmp_path, columns, words):
        """A negative row would be counted from the end, and a file that is not listed would be another."""
        self.rewrite(tmp_path, **columns)
        with pytest.raises(DataFileError, match=f"part-00000.parquet is damaged .{words}"):
            self.read(tmp_path)

    def test_a_column_that_is_not_there_is_damage(self, tmp_path):
        path = write(tmp_path)
        pq.write_table(pq.read_table(path).drop_columns("selected"), path)
        with pytest.raises(DataFileError, match="it has no column selected"):
            self.read(tmp_path)

    def test_a_part_under_the_name_of_another_is_damage(self, tmp_path):
        write(tmp_path, index=1).rename(tmp_path / part_name(0))
        with (
            pytest.warns(UserWarning, match="damaged"),
            pytest.raises(DataFileError, match=r"it is part-00001\.parquet"),
        ):
            self.read(tmp_path)

    def test_a_part_of_other_settings_than_the_manifest_says_is_refused(self, tmp_path):
        write(tmp_path)
        dataclasses.replace(TestManifest.MANIFEST, num_blocks=1, settings={"model.max_lr": 3.0}, blocks={}).write(
            tmp_path
        )
        with pytest.raises(DataFileError, match=r"other options than its manifest says: model\.max_lr is 2\.0 there"):
            read_complete(tmp_path)

    def test_what_a_part_says_of_its_block_has_a_checksum(self, tmp_path):
        path = write(tmp_path)
        table = pq.read_table(path)
        metadata = {name: text.replace(b"0.5", b"0.7") for name, text in table.schema.metadata.items()}
        pq.write_table(table.replace_schema_metadata(metadata), path)
        with pytest.warns(UserWarning, match="the checksum of its block's entry is wrong"):
            assert read_part(tmp_path, 0) is None


class TestManifest:
    MANIFEST = Manifest(plan_hash=HASH, files=FILES, num_blocks=12, settings={"a": None}, versions={"torch": "2"})

    def test_what_was_written_is_read(self, tmp_path):
        blocks = {index: BlockEntry.of(result(index)) for index in (10, 2)}
        for index in blocks:
            write(tmp_path / "mask", index=index)
        manifest = dataclasses.replace(self.MANIFEST, config={"data": {"path": ["x"]}}, blocks=blocks)
        manifest.write(tmp_path / "mask")
        assert Manifest.read(tmp_path / "mask") == manifest
        content = json.loads((tmp_path / "mask/_manifest.json").read_text())
        assert list(content["blocks"]) == ["2", "10"]
        assert content["blocks"]["2"] == {
            "part": "part-00002.parquet",
            "num_samples": 5,
            "num_selected": 2,
            "num_dropped": 2,
            **{
                name: {"f": 1.5, "terms": {"quality": 0.5, "disf": -0.25}} for name in ("mask", "random", "top_quality")
            },
            "scales": {"quality": 1.0, "disf": 2.0},
            "num_steps": 7,
            "seconds": 1.235,
        }

    def test_writers_side_by_side_take_over_what_the_others_wrote(self, tmp_path):
        mine, other = (dataclasses.replace(self.MANIFEST, blocks={}) for _ in range(2))
        mine.write(tmp_path)
        other.write(tmp_path)
        write(tmp_path, index=5)
        other.blocks[5] = BlockEntry.of(result(5))
        other.write(tmp_path)
        write(tmp_path, index=1)
        mine.blocks[1] = BlockEntry.of(result(1))
        mine.write(tmp_path)
        assert list(Manifest.read(tmp_path).blocks) == [1, 5]

    def test_a_part_whose_writer_was_killed_before_the_manifest_is_taken_over(self, tmp_path):
        write(tmp_path, index=7)
        dataclasses.replace(self.MANIFEST, blocks={}).write(tmp_path)
        assert Manifest.read(tmp_path).blocks == {7: BlockEntry.of(result(7))}

    def test_a_block_whose_part_is_gone_is_not_listed(self, tmp_path):
        dataclasses.replace(self.MANIFEST, blocks={3: BlockEntry.of(result(3))}).write(tmp_path)
        assert Manifest.read(tmp_path).blocks == {}

    def test_many_writers_at_the_same_time_lose_nothing(self, tmp_path):
        """The last to look sees all parts, whatever the order in which they read and replace the manifest."""

        def work(writer):
            manifest = dataclasses.replace(self.MANIFEST, num_blocks=24, blocks={})
            for index in range(writer, 24, 4):
                write(tmp_path, index=index)
                manifest.blocks[index] = BlockEntry.of(result(index))
                manifest.write(tmp_path)

        with ThreadPoolExecutor(4) as executor:
            for done in [executor.submit(work, writer) for writer in range(4)]:
                done.result()
        assert list(Manifest.read(tmp_path).blocks) == list(range(24))

    def test_a_folder_without_one_has_none(self, tmp_path):
        assert Manifest.read(tmp_path) is None
        assert Manifest.read(tmp_path / "missing") is None

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '"text"',
            "{}",
            "7",
            "null",
            '{"blocks": {"x": 1}}',
            '{"blocks": {}}',
            "\udcff",
            "[" * 100_000,
            '{"blocks": {}, "plan_hash": 1, "files": [], "num_blocks": 1, "settings": {}, "versions": {}}',
            '{"blocks": {}, "plan_hash": "", "files": [1], "num_blocks": 1, "settings": {}, "versions": {}}',
            '{"blocks": {}, "plan_hash": "", "files": [], "num_blocks": -1, "settings": {}, "versions": {}}',
            '{"blocks": {"0": 1}, "plan_hash": "", "files": [], "num_blocks": 1, "settings": {}, "versions": {}}',
        ],
    )
    def test_a_damaged_one_is_an_error(self, tmp_path, text):
        (tmp_path / "_manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataFileError, match=r"manifest\.json cannot be read as a mask manifest"):
            Manifest.read(tmp_path)

    def test_one_of_another_format_is_an_error(self, tmp_path):
        self.MANIFEST.write(tmp_path)
        path = tmp_path / "_manifest.json"
        path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
        with pytest.raises(DataFileError, match="has format 9, this version reads 1"):
            Manifest.read(tmp_path)
