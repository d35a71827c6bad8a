"""Damaged files and odd configs: an error of ours, or the right answer; no other error, no hang, no wrong row.

FUZZ_INPUTS says how many inputs there are over all tests, some hundreds by default; make fuzz asks for 100,000.
"""

import io
import json
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentError

import datamask_pl.commands.fit
from datamask_pl.callbacks.checkpoint import AtomicCheckpointIO
from datamask_pl.data.plan import plan_blocks
from datamask_pl.data.reader import BlockReader
from datamask_pl.data.schema import Columns, read_dataset
from datamask_pl.data.shards import plain as plain_ids
from datamask_pl.io.checkpoints import STATE_KEY, read_checkpoint
from datamask_pl.mask.manifest import Manifest, read_columns, read_complete
from datamask_pl.mask.parts import part_name, read_part, write_part
from tests.fuzz.damage import Known, damage, inputs, is_same, ours, spoil
from tests.support.masks import FILES, HASH, SETTINGS, result
from tests.support.shards import COLUMNS, make_table

MASK_COLUMNS = ["id", "source_file", "source_row", "selected", "logit", "probability", "quality"]


@pytest.fixture(scope="module")
def mask(tmp_path_factory):
    """A mask of one part: folder, manifest, rows and the bytes of the part, and those of another part of the run."""
    folder = tmp_path_factory.mktemp("mask")
    write_part(folder, result(num_samples=50), files=FILES, plan_hash=HASH, settings=SETTINGS)
    manifest = Manifest(plan_hash=HASH, files=FILES, num_blocks=1, settings=SETTINGS, versions={})
    manifest.write(folder)
    whole = (folder / part_name(0)).read_bytes()
    write_part(folder / "other", result(index=1, num_samples=40), files=FILES, plan_hash=HASH, settings=SETTINGS)
    other = (folder / "other" / part_name(1)).read_bytes()
    manifest = read_complete(folder)
    rows = read_columns(folder, 0, manifest, MASK_COLUMNS)
    return Known(folder=folder, manifest=manifest, rows=rows, whole=whole, other=other)


@inputs(0.31)
@given(changes=damage)
def test_a_damaged_mask_is_refused_or_read_as_it_was(mask, changes):
    (mask.folder / part_name(0)).write_bytes(spoil(mask.whole, changes, mask.other))
    with ours():
        about = read_part(mask.folder, 0, plan_hash=HASH, settings=SETTINGS)
        assert about in (None, mask.manifest.blocks[0])
        found = read_complete(mask.folder)
        assert found == mask.manifest
        rows = read_columns(mask.folder, 0, found, MASK_COLUMNS)
        assert is_same(rows["id"], mask.rows["id"])
        for name in MASK_COLUMNS[1:]:
            assert rows[name].equals(mask.rows[name]), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder, content, the bytes of a checkpoint, and those of another."""
    folder = tmp_path_factory.mktemp("checkpoint")
    path, contents = folder / "block-00000-step-000001.ckpt", []
    for step in (1, 2):
        block = {"index": 0, "scales": torch.ones(2, dtype=torch.float64), "num_steps": step, "best_mask": None}
        state = {"version": 1, "plan_hash": HASH, "settings": SETTINGS, "block": block}
        content = {STATE_KEY: state, "state_dict": {"policy.logits": torch.arange(100.0) * step}}
        AtomicCheckpointIO().save_checkpoint(content, path)
        contents.append((content, path.read_bytes()))
    return Known(path=path, content=contents[0][0], whole=contents[0][1], other=contents[1][1])


def as_plain(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@inputs(0.15)
@given(changes=damage)
def test_a_damaged_checkpoint_is_refused_or_read_as_it_was(checkpoint, changes):
    changes = [change for change in changes if change[0] != "footer"]
    checkpoint.path.write_bytes(spoil(checkpoint.whole, changes, checkpoint.other))
    with ours():
        assert as_plain(read_checkpoint(checkpoint.path)) == as_plain(checkpoint.content)


KINDS = {
    "fixed": {"feature_type": pa.list_(pa.float32(), 4)},
    "lists": {"feature_type": pa.list_(pa.float64())},
    "half": {"feature_type": pa.list_(pa.float16(), 4)},
    "text ids": {"chunk_id": pa.array([f"id {row}" for row in range(60)]).dictionary_encode()},
}
# Of all but the last every altered row is noticed. Page headers have no checksum; that of a dictionary can be altered
# to give other values: pyarrow 26 read one in some thousands of such files as one id for a whole row group.
WRITERS = [
    {"compression": "zstd", "use_dictionary": False},
    {"compression": "none", "use_dictionary": False},
    {"row_group_size": 17, "use_dictionary": False},
    {"compression": "none", "use_dictionary": False, "data_page_size": 1, "write_batch_size": 8},
    {"row_group_size": 17},
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Path, and for each kind of shard its bytes, those of another and the block that is in it."""
    path = tmp_path_factory.mktemp("shards") / "shard.parquet"
    found = []
    for columns in KINDS.values():
        for options in WRITERS:
            contents = []
            for seed in (0, 1):
                table = make_table(60, seed=seed, **columns)
                pq.write_table(table, path, write_page_checksum=True, **options)
                contents.append(path.read_bytes())
            path.write_bytes(contents[0])
            found.append((*contents, read_block(path, 10**6, 0)))
    return Known(path=path, found=found)


def read_block(path, block_size, index):
    """A block, by a reader that has read nothing before, a few rows at a time."""
    dataset = read_dataset(str(path), Columns(**COLUMNS))
    plan = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=block_size, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datamask_pl.data.reader._MAX_CHUNK_ROWS", 8)
        return BlockReader(dataset, quality_scaling="rank", on_bad_row="error").read(plan[index], index)[0]


@inputs(0.24)
@given(
    kind=st.integers(0, len(KINDS) * len(WRITERS) - 1),
    changes=damage,
    block=st.sampled_from([(10**6, 0), (30, 0), (12, 0), (12, 2), (12, 4)]),  # rows of a block, and which
)
def test_a_damaged_shard_is_refused_or_read(shards, kind, changes, block):
    whole, other, expected = shards.found[kind]
    shards.path.write_bytes(spoil(whole, [change for change in changes if change[0] != "footer"], other))
    with ours():
        size, index = block
        block = read_block(shards.path, size, index)
        rows = slice(size * index, size * index + size)
        if kind % len(WRITERS) == len(WRITERS) - 1:
            return
        assert is_same(plain_ids(block.ids), plain_ids(expected.ids)[rows])
        assert block.features_ND.tolist() == expected.features_ND[rows].tolist()
        assert block.quality_N.tolist() == expected.quality_N[rows].tolist()


@inputs(0.02)
@given(num_rows=st.lists(st.integers(0, 40), min_size=1, max_size=4), size=st.integers(1, 30), data=st.data())
def test_every_row_of_shards_of_any_shape_is_read_once(tmp_path_factory, num_rows, size, data):
    folder = tmp_path_factory.mktemp("shapes")
    for index, count in enumerate(num_rows):
        kind = data.draw(
            st.sampled_from([pa.list_(pa.float32(), 4), pa.list_(pa.float32()), pa.large_list(pa.float32())])
        )
        group = data.draw(st.integers(1, 50))
        table = make_table(count, first_id=1000 * index, feature_type=kind)
        pq.write_table(table, folder / f"{index}.parquet", row_group_size=group)
    with ours():
        dataset = read_dataset(str(folder), Columns(**COLUMNS))
        plan = plan_blocks([file.row_group_rows for file in dataset.files], block_by="rows", block_size=size, seed=0)
        reader = BlockReader(dataset, quality_scaling="rank", on_bad_row="error")
        ids = [id_ for index in range(len(plan)) for id_ in reader.read(plan[index], index)[0].ids.to_pylist()]
        assert ids == [1000 * index + row for index, count in enumerate(num_rows) for row in range(count)]


plain = st.none() | st.booleans() | st.integers(-3, 10**10) | st.floats() | st.text(max_size=8)
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
MANIFEST_KEYS = ["plan_hash", "files", "num_blocks", "settings", "versions", "config", "blocks", "format"]


@inputs(0.03)
@given(changes=st.dictionaries(st.sampled_from([*MANIFEST_KEYS, "more"]), anything, max_size=4), block=anything)
def test_any_json_is_a_manifest_or_refused(mask, tmp_path_factory, changes, block):
    folder = mask.folder
    (folder / part_name(0)).write_bytes(mask.whole)
    path = folder / "_manifest.json"
    before = path.read_text()
    content = {**json.loads(before), **changes}
    if "more" in changes:
        content["blocks"] = {"0": block}
    try:
        path.write_text(json.dumps(content))
        with ours():
            found = Manifest.read(folder)
            assert found is not None
            assert isinstance(found.plan_hash, str)
            assert read_complete(folder).blocks[0] == mask.manifest.blocks[0]
    finally:
        path.write_text(before)


class _Parser(Exception):  # noqa: N818
    pass


@pytest.fixture(scope="module")
def parser():
    """The parser of `fit`, before anything has been parsed."""

    class Stops(datamask_pl.commands.fit.FitCLI):
        def parse_arguments(self, parser, args):
            raise _Parser(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datamask_pl.commands.fit, "FitCLI", Stops)
        with pytest.raises(_Parser) as caught:
            datamask_pl.commands.fit.run_fit([])
    return caught.value.args[0]


OPTIONS = [
    "data.path", "data.block_size", "data.quality_columns", "data.partial", "data.seed", "model.select_ratio",
    "model.diversity", "model.num_steps", "model.estimator", "checkpoint.keep", "mask.output", "launch.timeout_s",
    "trainer.callbacks", "trainer.logger", "run_name", "ckpt_path", "nothing", "model",
]  # fmt: skip
scalars = plain | st.sampled_from(
    [
        "disf",
        "1e3",
        "~",
        "{",
        "[1",
        "!!python/object/apply:os.system [x]",
        {"class_path": "os.system"},
        {"init_args": 1},
    ]
)


@inputs(0.01)
@given(
    options=st.dictionaries(st.sampled_from(OPTIONS), scalars | st.lists(scalars, max_size=2), max_size=4),
    # no "a: &a {b: *a}": jsonargparse walks a mapping that contains itself for ever
    text=st.none() | st.text(max_size=30) | st.sampled_from(["&a [*a]", "? [x]\n: y", "- 1\n- 2"]),
)
def test_any_yaml_is_a_config_or_refused(parser, tmp_path_factory, options, text):
    nested = {}
    for name, value in options.items():
        group, _, option = name.rpartition(".")
        inner = nested.setdefault(group, {}) if group else nested
        if isinstance(inner, dict):
            inner[option] = value
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(yaml.safe_dump(nested) if text is None else text, encoding="utf-8", errors="surrogateescape")
    # of these errors the command line makes one line
    with ours(), suppress(ArgumentError, UnicodeDecodeError):
        try:
            parser.parse_args(["fit", "--config", str(path), "--data.path", "x"])
        except ValueError as error:
            if "null byte" not in str(error):
                raise
