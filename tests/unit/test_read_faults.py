"""Wherever a read fails, the error names the file and the reason, and nothing has been written."""

from pathlib import Path

import pyarrow as pa
import pytest

from datamask_pl.commands.report import report
from datamask_pl.commands.sample import read_docstrings
from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.embedding.model import hash_model
from datamask_pl.errors import CheckpointError, DataFileError, DatamaskError
from datamask_pl.io.checkpoints import newest_whole_checkpoint, read_checkpoint
from datamask_pl.mask.manifest import Manifest
from datamask_pl.mask.parts import read_part
from tests.support.faults import read_fault, without_root_powers
from tests.support.masks import HASH, SETTINGS
from tests.support.shards import COLUMNS, make_table, write
from tests.support.writers import (
    prepare_compared_run,
    prepare_mask,
    prepare_run,
    prepare_text_files,
    prepare_texts,
    write_checkpoint,
    write_comparison,
    write_export,
    write_features,
    write_filtered,
    write_report,
    write_vectors,
)

REASON = "Input/output error"


def prepare_shard():
    write(Path("shard.parquet"), make_table(2000, dim=64))


def read_shard():
    dataset = read_dataset("shard.parquet", Columns(**COLUMNS))
    reader = BlockReader(dataset, quality_scaling="rank", on_bad_row="drop")
    plan = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=2000, seed=0)
    return reader.read(plan[0], 0)


def prepare_lengths():
    prepare_run()
    write(Path("lengths.parquet"), pa.table({"chunk_id": range(600), "length": range(600)}), use_dictionary=False)


def write_report_of_lengths():
    report("run", length_column="length", metadata="lengths.parquet")


READS = {
    "a shard's footer": (prepare_shard, read_shard, "shard.parquet", "footer"),
    "a shard's rows": (prepare_shard, read_shard, "shard.parquet", "data"),
    "the footer of texts to embed": (prepare_texts, write_features, "texts.parquet", "footer"),
    "texts to embed": (prepare_texts, write_features, "texts.parquet", "data"),
    "a source's footer": (prepare_mask, write_filtered, "b.parquet", "footer"),
    "a source's rows": (prepare_mask, write_filtered, "b.parquet", "data"),
    "a mask's manifest": (prepare_mask, write_filtered, "_manifest.json", "all"),
    "the footer of a mask's part": (prepare_mask, write_filtered, "part-00000.parquet", "footer"),
    "the rows of a mask's part": (prepare_mask, write_filtered, "part-00000.parquet", "data"),
    "a checkpoint": (write_checkpoint, lambda: read_checkpoint(next(Path("checkpoints").iterdir())), "*.ckpt", "all"),
    "the footer of texts that a model embeds": (prepare_text_files, write_vectors, "0.parquet", "footer"),
    "texts that a model embeds": (prepare_text_files, write_vectors, "0.parquet", "data"),
    "the footer of a source of costs": (prepare_run, write_export, "costs.parquet", "footer"),
    "costs": (prepare_run, write_export, "costs.parquet", "data"),
    "ids to keep": (prepare_run, write_export, "kept.parquet", "all"),
    "ids to leave out": (prepare_run, write_export, "dropped.txt", "all"),
    "lengths that a report shows": (prepare_lengths, write_report_of_lengths, "lengths.parquet", "data"),
    "the comparison that a report shows": (prepare_compared_run, write_report, "comparison.json", "all"),
    "the events that a report shows": (prepare_run, write_report, "events.out.tfevents.*", "all"),
}
LOOKERS = {"export": write_export, "compare": write_comparison, "report": write_report}
SEEN = {
    "manifest": ("_manifest.json", "all"),
    "footer of a part": ("part-00000.parquet", "footer"),
    "rows of a part": ("part-00000.parquet", "data"),
    "footer of a shard": ("shard-0.parquet", "footer"),
    "rows of a shard": ("shard-0.parquet", "data"),
}
READS |= {
    f"the {seen} in {command}": (prepare_run, look, name, bad)
    for command, look in LOOKERS.items()
    for seen, (name, bad) in SEEN.items()
    if not (command == "export" and seen.endswith("shard"))
}


@pytest.mark.parametrize("what", READS)
def test_a_file_that_cannot_be_read_is_named_and_once_it_can_the_same_goes_on(workplace, what):
    prepare, read, name, bad = READS[what]
    prepare()
    before = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    with read_fault(name, bad), pytest.raises(DatamaskError) as caught:
        read()
    assert REASON in str(caught.value)
    assert name.strip("*") in str(caught.value)
    assert isinstance(caught.value, DataFileError | CheckpointError)
    assert sorted(str(path) for path in Path().rglob("*") if path.is_file()) == before
    read()


def test_a_record_of_apply_that_cannot_be_read_is_named(workplace):
    prepare_mask()
    write_filtered()
    with read_fault("_apply.json"), pytest.raises(DataFileError, match=rf"_apply\.json cannot be read .*{REASON}"):
        write_filtered()
    write_filtered()


def test_a_checkpoint_that_cannot_be_read_is_passed_over_with_a_warning(workplace):
    write_checkpoint()
    newest = Path("checkpoints/block-00000-step-000001.ckpt")
    older = newest.rename(newest.with_name("block-00000-step-000000.ckpt"))
    write_checkpoint()
    with read_fault(newest.name), pytest.warns(UserWarning, match=f"{REASON}.*Falling back to the one before"):
        assert newest_whole_checkpoint(Path("checkpoints"), 0, below=9) == older


def test_a_part_that_cannot_be_read_is_learned_again_with_a_warning(workplace):
    prepare_mask()
    with read_fault("part-*"), pytest.warns(UserWarning, match=f"{REASON}.*; its block is learned again"):
        assert read_part(Path("mask"), 0) is None
    assert read_part(Path("mask"), 0, plan_hash=HASH, settings=SETTINGS) is not None


def test_a_manifest_that_cannot_be_read_is_not_taken_for_none(workplace):
    prepare_mask()
    with read_fault("_manifest.json"), pytest.raises(DataFileError, match=REASON):
        Manifest.read(Path("mask"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_of_a_model_that_cannot_be_read_is_named(workplace, name):
    for path in ("model/model.safetensors", "model/config.json", "model/tokenizer.json"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"some bytes")
    with read_fault(name), pytest.raises(DataFileError, match=rf"model/{name} cannot be read: {REASON}"):
        hash_model(Path("model"))
    assert hash_model(Path("model"))


def test_features_of_a_model_that_are_there_and_cannot_be_read_are_named_and_not_made_anew(workplace):
    prepare_text_files()
    write_vectors()
    before = Path("vectors/0.parquet").read_bytes()
    with read_fault("vectors/0.parquet"), pytest.raises(DataFileError, match=rf"vectors/0\.parquet .*: {REASON}"):
        write_vectors()
    assert Path("vectors/0.parquet").read_bytes() == before


def test_a_python_source_that_cannot_be_read_is_named(workplace):
    Path("module.py").write_text("'''Text.'''")
    with read_fault("module.py"), pytest.raises(DataFileError, match=rf"module\.py cannot be read: {REASON}"):
        list(read_docstrings(Path()))


@pytest.mark.parametrize("what", READS)
def test_a_file_without_permission_is_named(workplace, what):
    prepare, read, name, _ = READS[what]
    prepare()
    for path in Path().rglob(name):
        path.chmod(0)
    with without_root_powers(), pytest.raises(DatamaskError, match="Permission denied"):
        read()
