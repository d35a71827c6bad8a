import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamask_pl.data.types import Block, BlockResult, Values
from datamask_pl.errors import CheckpointError, DataFileError
from datamask_pl.mask_file import Manifest, check_part, describe_block, part_name, write_part

HASH = "a" * 64
FILES = ["one.parquet", "two.parquet"]


def result(index=0, num_samples=5, ids=None):
    block = Block(
        index=index,
        features_ND=torch.zeros(num_samples, 2),
        inv_norm_N=torch.ones(num_samples),
        quality_N=torch.linspace(0, 1, num_samples),
        scaled_quality_N=torch.linspace(0, 1, num_samples),
        ids=pa.array([2**63 - 1 - row for row in range(num_samples)]) if ids is None else ids,
        source_file_N=torch.tensor([0, 1] * num_samples, dtype=torch.int32)[:num_samples],
        source_row_N=torch.arange(num_samples),
        num_dropped=2,
    )
    values = Values(1.5, {"quality": 0.5, "disf": -0.25})
    return BlockResult(
        block=block,
        num_selected=2,
        mask_N=torch.arange(num_samples) < 2,
        logits_N=torch.linspace(1, -1, num_samples),
        probability_N=torch.full((num_samples,), 2 / num_samples),
        mask=values,
        random=values,
        top_quality=values,
        scales={"quality": 1.0, "disf": 2.0},
        num_steps=7,
        seconds=1.23456,
    )


def write(folder, **kwargs):
    write_part(folder, result(**kwargs), files=FILES, plan_hash=HASH)
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

    def test_one_that_is_whole_and_of_this_data_is_accepted(self, tmp_path):
        write(tmp_path, index=3)
        check_part(tmp_path, 3, plan_hash=HASH)

    def test_one_of_other_data_is_not(self, tmp_path):
        write(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"is the mask of other data \(plan aaaaaaaaaaaa, here bbbbbbbbbbbb\)"
        ):
            check_part(tmp_path, 0, plan_hash="b" * 64)

    @pytest.mark.parametrize("what", ["missing", "cut", "not ours"])
    def test_one_that_cannot_be_read_is_not(self, tmp_path, what):
        path = write(tmp_path)
        if what == "missing":
            path.unlink()
        elif what == "cut":
            path.write_bytes(path.read_bytes()[:-20])
        else:
            pq.write_table(pa.table({"id": [1]}), path)
        with pytest.raises(CheckpointError, match=r"block 0 is finished .*part-00000\.parquet cannot be read"):
            check_part(tmp_path, 0, plan_hash=HASH)

    def test_a_folder_that_is_a_file_is_an_error(self, tmp_path):
        (tmp_path / "mask").write_text("")
        with pytest.raises(DataFileError, match="not a folder"):
            write(tmp_path / "mask")


class TestManifest:
    MANIFEST = Manifest(plan_hash=HASH, files=FILES, num_blocks=12, settings={"a": None}, versions={"torch": "2"})

    def test_what_was_written_is_read(self, tmp_path):
        blocks = {index: describe_block(result(index)) for index in (10, 2)}
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

    def test_a_folder_without_one_has_none(self, tmp_path):
        assert Manifest.read(tmp_path) is None
        assert Manifest.read(tmp_path / "missing") is None

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '"text"', "{}", '{"blocks": {"x": 1}}', '{"blocks": {}}', "\udcff"]
    )
    def test_a_damaged_one_is_an_error(self, tmp_path, text):
        (tmp_path / "_manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataFileError, match=r"manifest\.json cannot be read as a mask manifest"):
            Manifest.read(tmp_path)

    def test_one_of_another_format_is_an_error(self, tmp_path):
        dataclasses.replace(self.MANIFEST, format=9).write(tmp_path)
        with pytest.raises(DataFileError, match="has format 9, this version reads 1"):
            Manifest.read(tmp_path)
