"""Everything of this project that writes a file by itself, small and always the same."""

import dataclasses
import shutil
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from datamask_pl.callbacks.checkpoint import AtomicCheckpointIO
from datamask_pl.commands import compare as compare_module
from datamask_pl.commands import embed as embed_module
from datamask_pl.commands import report as report_module
from datamask_pl.commands import sample as sample_module
from datamask_pl.commands.apply import apply
from datamask_pl.commands.compare import compare
from datamask_pl.commands.embed import embed
from datamask_pl.commands.export import export
from datamask_pl.commands.report import report
from datamask_pl.commands.sample import sample
from datamask_pl.io.checkpoints import STATE_KEY
from datamask_pl.mask.manifest import Manifest
from datamask_pl.mask.parts import write_part
from tests.support.fits import fit, write_shards
from tests.support.masks import FILES, HASH, SETTINGS, result
from tests.support.shards import make_table, write

WORDS = "a mask keeps the tenth of all samples that is good and diverse and leaves the others to whoever wants them"


def write_mask_part():
    write_part(Path("mask"), result(num_samples=200), files=FILES, plan_hash=HASH, settings=SETTINGS)


def write_manifest():
    Manifest(plan_hash=HASH, files=FILES, num_blocks=1, settings=SETTINGS, versions={"x": "1" * 200}).write(
        Path("mask")
    )


def write_checkpoint():
    content = {STATE_KEY: {"version": 1}, "logits": torch.arange(500.0)}
    AtomicCheckpointIO().save_checkpoint(content, "checkpoints/block-00000-step-000001.ckpt")


def prepare_library():
    Path("library").mkdir()
    functions = (f"def f{number}():\n    '''{WORDS} {number}.'''" for number in range(50))
    Path("library/ast.py").write_text("\n".join(functions))


def write_sample():
    found, sample_module.stdlib_folder = sample_module.stdlib_folder, lambda: Path("library")
    try:
        sample("text.parquet")
    finally:
        sample_module.stdlib_folder = found


def prepare_texts():
    words = WORDS.split()
    texts = [" ".join(words[(row + step * step) % len(words)] for step in range(8)) for row in range(60)]
    write(Path("texts.parquet"), make_table(60, text=texts, feature_arr=None))


def write_features():
    embed("texts.parquet", "features.parquet", num_dimensions=4)


def prepare_mask():
    rows = make_table(200)
    files = [write(Path(f"data/{name}.parquet"), rows.slice(100 * index, 100)) for index, name in enumerate("ab")]
    learned = result(num_samples=200, ids=rows["chunk_id"].combine_chunks())
    block = dataclasses.replace(
        learned.block, source_file_N=torch.arange(200, dtype=torch.int32) // 100, source_row_N=torch.arange(200) % 100
    )
    learned = dataclasses.replace(learned, block=dataclasses.replace(block, num_dropped=0))
    write_part(Path("mask"), learned, files=files, plan_hash=HASH, settings=SETTINGS)
    Manifest(plan_hash=HASH, files=files, num_blocks=1, settings=SETTINGS, versions={}).write(Path("mask"))


def write_filtered():
    apply("mask", "data", "filtered", complement="rest", num_workers=1)


@cache
def _finished_run():
    """A run of two blocks and its shards, made once for all tests."""
    folder = TemporaryDirectory(prefix="datamask_pl-tests-")
    shards = write_shards(Path(folder.name, "shards"), [300, 300], dim=64, tokens=pa.array([3] * 300))
    options = ("--data.block_size", "300", "--model.num_steps", "3", "--run_name", "run")
    fit("--data.path", Path(shards).name, *options, folder=folder.name)
    return folder


def prepare_run():
    """The run in `run`, its shards in `shards`, and files that `export` takes."""
    made = Path(_finished_run().name)
    shutil.copytree(made / "runs/datamask/run", "run")
    shutil.copytree(made / "shards", "shards")
    ids = np.arange(600)
    write(Path("costs.parquet"), pa.table({"chunk_id": ids, "cost": np.sqrt(ids + 1)}), use_dictionary=False)
    write(Path("kept.parquet"), pa.table({"chunk_id": ids[:20]}))
    Path("dropped.txt").write_text("30\n40\n")


def prepare_compared_run():
    prepare_run()
    write_comparison()


def write_export():
    forced = {"keep_ids": "kept.parquet", "drop_ids": "dropped.txt"}
    export("run/mask", "other", select_ratio=0.2, cost_column="cost", source="costs.parquet", **forced)


def write_comparison():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "_timed", lambda choose, few, ground: (choose(ground), 0.0))
        compare("run", baselines=["random"])


class _Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 1, 12, tzinfo=tz)


def write_report():
    """Without its pictures, which take seconds to draw, but for what they read."""
    from datamask_pl.evidence import pictures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_module, "datetime", _Noon)
        patch.setattr(pictures.figures, "to_svg", lambda draw, *, label: "<svg></svg>")
        report("run", length_column="tokens")


class _Encoder:
    """Stands for a model: vectors of the texts' lengths."""

    hash, precision, device, num_dimensions = "0" * 64, "float32", "cpu", 4

    def __init__(self, **options):
        pass

    def encode(self, texts):
        return np.array([[len(text), 1, 2, 3] for text in texts], dtype=np.float32)


def prepare_text_files():
    for index in range(2):
        texts = ["word " * (row % 20 + 1) + str(row) for row in range(2000)]
        write(Path(f"texts/{index}.parquet"), make_table(2000, first_id=2000 * index, text=texts, feature_arr=None))


def write_vectors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_module, "TextModel", _Encoder)
        embed("texts", "vectors", model="model")


def nothing():
    pass


class Writer(NamedTuple):
    """What makes the input, what writes, and the name of the file that a fault is for."""

    prepare: object
    write: object
    file: str


WRITERS = {
    "a mask's part": Writer(nothing, write_mask_part, "part-00000.parquet"),
    "a mask's manifest": Writer(nothing, write_manifest, "_manifest.json"),
    "a checkpoint": Writer(nothing, write_checkpoint, "block-00000-step-000001.ckpt"),
    "sample's texts": Writer(prepare_library, write_sample, "text.parquet"),
    "embed's features": Writer(prepare_texts, write_features, "features.parquet"),
    "embed's features of a model": Writer(prepare_text_files, write_vectors, "1.parquet"),
    "apply's shard": Writer(prepare_mask, write_filtered, "b.parquet"),
    "apply's record": Writer(prepare_mask, write_filtered, "_apply.json"),
    "export's part": Writer(prepare_run, write_export, "part-00001.parquet"),
    "export's manifest": Writer(prepare_run, write_export, "_manifest.json"),
    "compare's table": Writer(prepare_run, write_comparison, "comparison.csv"),
    "compare's numbers": Writer(prepare_run, write_comparison, "comparison.json"),
    "report's page": Writer(prepare_run, write_report, "report.html"),
}
