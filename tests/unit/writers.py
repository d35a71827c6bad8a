"""Everything of this project that writes a file by itself, small and always the same."""

import dataclasses
from pathlib import Path

import torch
from shards import make_table, write
from test_mask_file import FILES, HASH, SETTINGS, result

from datamask_pl.checkpoint_io import STATE_KEY, AtomicCheckpointIO
from datamask_pl.commands import sample as sample_module
from datamask_pl.commands.apply import apply
from datamask_pl.commands.embed import embed
from datamask_pl.commands.sample import sample
from datamask_pl.mask_file import Manifest, write_part

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


def nothing():
    pass


# By the name of the file that a fault is for: what makes the input, and what writes.
WRITERS = {
    "part-00000.parquet": (nothing, write_mask_part),
    "_manifest.json": (nothing, write_manifest),
    "block-00000-step-000001.ckpt": (nothing, write_checkpoint),
    "text.parquet": (prepare_library, write_sample),
    "features.parquet": (prepare_texts, write_features),
    "b.parquet": (prepare_mask, write_filtered),
    "_apply.json": (prepare_mask, write_filtered),
}
