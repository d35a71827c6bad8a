import inspect
import multiprocessing
import re
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser

from datamask_pl.data.loader import BlockQueue, draw_rows
from datamask_pl.data.module import FeatureDataModule, _check_same_plan
from datamask_pl.data.scaling import ConstantQualityWarning
from datamask_pl.distributed.world import World
from datamask_pl.errors import BadRowError, ConfigError, DataFileError, DatamaskWarning, SchemaError
from tests.support.block_watch import watch_blocks

# lightning 2.6.6 checks pytrees in a way that torch 2.13 announces the end of; not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")


def write_shards(folder, sizes, *, dim=4, group_rows=4, bad_ids=(), constant_quality=False):
    """Shards with ids that count up over all files; bad ids have a zero vector."""
    first_id = 0
    for index, num_rows in enumerate(sizes):
        ids = np.arange(first_id, first_id + num_rows)
        features = np.random.default_rng(index).normal(size=(num_rows, dim)).astype(np.float32)
        features[np.isin(ids, bad_ids)] = 0
        columns = {
            "chunk_id": ids,
            "quality_score": np.ones(num_rows) if constant_quality else ids / 7,
            "feature_arr": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), dim),
        }
        pq.write_table(pa.table(columns), folder / f"{index}.parquet", row_group_size=group_rows)
        first_id += num_rows
    return str(folder)


def make_data(path, *, num_steps=3, is_whole_block=False, **options):
    data = FeatureDataModule(path=path, **options)
    data.set_steps(num_steps=num_steps, is_whole_block=is_whole_block)
    return data


class Recorder(pl.LightningModule):
    """Learns nothing; notes what it is given. Resumes at a (block, step), and skips blocks, if it is told to."""

    def __init__(self, data, *, fails_at=None, settles_at=(), resume_at=None, finished=()):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.data, self.fails_at, self.settles_at, self.resume_at = data, fails_at, settles_at, resume_at
        self.finished = finished
        self.seen, self.ends = [], []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def setup(self, stage):
        self.data.skip_blocks(self.finished)
        self.data.prepare()
        self.trainer.fit_loop.max_epochs = len(self.data.block_sizes)

    def on_train_epoch_start(self):
        self.begun = self.data.next_block
        if self.resume_at is not None and self.resume_at[0] == self.begun:
            self.data.resume_at(*self.resume_at)

    def training_step(self, batch, batch_idx):
        assert batch.block.index == self.begun == self.data.schedule[self.trainer.current_epoch]
        if (batch.block.index, batch.step) == self.fails_at:
            raise RuntimeError("stopped on purpose")
        rows = None if batch.rows_M is None else batch.rows_M.tolist()
        self.seen.append((batch.block.index, batch.step, rows))
        self.optimizers().step()
        if (batch.block.index, batch.step) in self.settles_at:
            self.data.skip_rest_of_block()

    def on_train_epoch_end(self):
        self.ends.append(self.begun)


def fit(data, **recorder_options):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Recorder(data, **recorder_options)
    trainer.fit(module, datamodule=data)
    return module


def test_one_epoch_is_one_block_of_all_its_steps(tmp_path):
    data = make_data(write_shards(tmp_path, [7, 6]), block_size=5, num_steps=2)
    module = fit(data)
    assert [(block, step) for block, step, _ in module.seen] == [(b, s) for b in range(3) for s in range(2)]
    assert data.block_sizes == [5, 4, 4]


@pytest.mark.parametrize("sizes", [[20], [0, 7, 0, 13], [3, 3, 3, 3, 3, 3], [1, 19]])
@pytest.mark.parametrize("block_by", ["rows", "row_groups_shuffled", "file"])
def test_every_id_is_learned_in_exactly_one_block(tmp_path, sizes, block_by):
    """datasets #6594, lightning #20404."""
    data = make_data(write_shards(tmp_path, sizes), block_size=6, block_by=block_by, num_steps=1)
    data.setup()
    blocks = [data._take_block(index) for index in range(len(data.block_sizes))]
    data.teardown()
    assert [block.num_samples for block in blocks] == data.block_sizes
    ids = [sample_id for block in blocks for sample_id in block.ids.to_pylist()]
    assert sorted(ids) == list(range(sum(sizes)))
    names = [Path(data.files[file]).stem for block in blocks for file in block.source_file_N.tolist()]
    rows = [row for block in blocks for row in block.source_row_N.tolist()]
    firsts = np.cumsum([0, *sizes])
    assert ids == [firsts[int(name)] + row for name, row in zip(names, rows, strict=True)]


def test_a_partial_batch_is_a_share_of_the_blocks_rows_and_another_each_step(tmp_path):
    data = make_data(write_shards(tmp_path, [30]), partial=0.25)
    data.setup()
    loader = data.train_dataloader()
    batches = list(loader)
    data.teardown()
    assert len(loader) == len(batches) == 3
    for batch in batches:
        rows = batch.rows_M
        assert batch.num_slice_rows == len(rows) == 8
        assert (rows.diff() > 0).all()
    assert len({tuple(batch.rows_M.tolist()) for batch in batches}) == 3


@pytest.mark.parametrize(("partial", "num_slice_rows"), [(None, 16_384), (0.25, 5_000), (1.0, 20_000)])
def test_a_whole_block_batch_carries_no_rows_but_the_size_of_its_slices(tmp_path, partial, num_slice_rows):
    data = make_data(write_shards(tmp_path, [20_000], group_rows=20_000), partial=partial, is_whole_block=True)
    data.setup()
    loader = data.train_dataloader()
    batch = next(iter(loader))
    data.teardown()
    assert batch.rows_M is None
    assert batch.num_slice_rows == num_slice_rows


def test_rows_of_a_step_depend_on_seed_block_and_step_alone():
    drawn = draw_rows(100, 10, seed=1, block=2, step=3)
    assert torch.equal(drawn, draw_rows(100, 10, seed=1, block=2, step=3))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for other in ({"seed": 2}, {"block": 3}, {"step": 2}):
        assert not torch.equal(drawn, draw_rows(100, 10, **{"seed": 1, "block": 2, "step": 3, **other}))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draw_rows(9, 9, seed=0, block=0, step=0), torch.arange(9))


def test_every_row_is_drawn_equally_often():
    counts = torch.zeros(20)
    for step in range(4000):
        counts[draw_rows(20, 5, seed=0, block=0, step=step)] += 1
    # binomial: mean 1000, standard deviation 27
    assert (counts - 1000).abs().max() < 5 * 27.4


def test_a_run_resumed_after_any_step_sees_what_an_uninterrupted_one_sees(tmp_path):
    """lightning #19815: resume repeats or skips a batch."""
    path = write_shards(tmp_path, [13])
    options = {"block_size": 5, "partial": 0.5}
    whole = fit(make_data(path, **options))
    assert len(whole.seen) == 9
    for done in range(9):
        block, step = divmod(done, 3)
        resumed = fit(make_data(path, **options), finished=range(block), resume_at=(block, step))
        assert resumed.seen == whole.seen[done:], (block, step)
        assert resumed.ends == whole.ends[block:]


def test_blocks_that_are_finished_are_neither_read_nor_learned(tmp_path, monkeypatch):
    path = write_shards(tmp_path, [12])
    whole = fit(make_data(path, block_size=4))
    counts = count_reads(monkeypatch)
    rest = fit(make_data(path, block_size=4), finished={0, 2})
    assert rest.seen == [seen for seen in whole.seen if seen[0] == 1]
    assert rest.ends == [1]
    assert counts == [[1], [1]]  # checked, then learned
    assert fit(make_data(path, block_size=4), finished={0, 1, 2}).seen == []


def test_jobs_of_a_shard_share_the_blocks(tmp_path):
    path = write_shards(tmp_path, [20])
    whole = fit(make_data(path, block_size=4))
    shares = [fit(make_data(path, block_size=4, shard=f"{index}/3")) for index in range(3)]
    assert [share.ends for share in shares] == [[0, 3], [1, 4], [2]]
    assert sorted(seen for share in shares for seen in share.seen) == sorted(whole.seen)
    for share in shares:
        assert share.data.num_blocks == 5
        assert share.data.plan_hash == whole.data.plan_hash


def test_groups_of_ranks_share_the_blocks_of_a_job(tmp_path, monkeypatch):
    path = write_shards(tmp_path, [20])
    for group, expected in ((0, [1]), (1, [3])):
        monkeypatch.setattr(
            "datamask_pl.distributed.world._world", World(rank=group, size=2, group=group, num_groups=2)
        )
        data = make_data(path, block_size=4, shard="1/2")
        data.setup()
        assert data.schedule == expected


@pytest.mark.parametrize("shard", ["", "1", "2/2", "-1/2", "a/b", "1/2/3", "0/0", "1.0/2", " 0/1"])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(ConfigError, match=r"data\.shard must be i/n with i from 0 to n - 1, such as 0/4, got"):
        FeatureDataModule(path="x", shard=shard)


def test_a_settled_block_ends_its_epoch_and_the_next_is_whole_again(tmp_path):
    path = write_shards(tmp_path, [15])
    options = {"block_size": 5, "num_steps": 4}
    settles_at = [(0, 1), (1, 3), (2, 0)]
    whole = fit(make_data(path, **options), settles_at=settles_at)
    steps = [(block, step) for block, step, _ in whole.seen]
    assert steps == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert whole.ends == [0, 1, 2]
    resumed = fit(make_data(path, **options), resume_at=(0, 1), settles_at=settles_at)
    assert resumed.seen == whole.seen[1:]
    assert resumed.ends == [0, 1, 2]
    # a learner that resumes at the step after it had settled is asked once more, and says so again
    again = fit(make_data(path, **options), resume_at=(0, 2), settles_at=[(0, 2), *settles_at])
    assert [(block, step) for block, step, _ in again.seen] == [(0, 2), *steps[2:]]
    assert again.ends == [0, 1, 2]


def test_a_loader_begins_where_it_is_told_and_then_at_the_first_step(tmp_path):
    data = make_data(write_shards(tmp_path, [10]), block_size=5)
    data.setup()
    data.resume_at(0, 2)
    loader = data.train_dataloader()
    assert data.next_block == 0
    assert [(batch.block.index, batch.step) for batch in loader] == [(0, 2)]
    assert data.next_block == 1
    assert [(batch.block.index, batch.step) for batch in loader] == [(1, 0), (1, 1), (1, 2)]
    assert data.next_block is None
    data.teardown()


def test_a_bad_row_in_the_last_block_stops_before_the_first_step(tmp_path):
    data = make_data(write_shards(tmp_path, [8, 8], bad_ids=[14]), block_size=4)
    with pytest.raises(BadRowError, match=r"1\.parquet, row 6: .*zero vector"):
        fit(data)


def test_without_the_check_a_bad_row_stops_when_its_block_is_read(tmp_path):
    data = make_data(write_shards(tmp_path, [8, 8], bad_ids=[14]), block_size=4, check_rows=False)
    with pytest.raises(BadRowError, match="row 6"):
        fit(data)
    assert not reader_threads()


def test_dropped_rows_are_out_of_the_block_sizes_counted_and_listed(tmp_path):
    data = make_data(write_shards(tmp_path, [8, 8], bad_ids=[2, 14]), block_size=8, on_bad_row="drop", num_steps=1)
    with pytest.warns(DatamaskWarning, match="dropped 2 of 16 rows; the first is row 2 of"):
        module = fit(data)
    assert len(module.seen) == 2
    assert data.block_sizes == [7, 7]
    assert [(Path(bad.file).name, bad.row) for bad in data.bad_rows] == [("0.parquet", 2), ("1.parquet", 6)]
    assert data.num_dropped == 2


def count_reads(monkeypatch):
    """Lists the row groups that are read, whoever does it."""
    counts = []
    iterate = pq.ParquetFile.iter_batches

    def spy(self, *args, **kwargs):
        counts.append(kwargs["row_groups"])
        return iterate(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    return counts


def test_a_single_block_is_read_once_in_all_although_it_is_checked(tmp_path, monkeypatch):
    counts = count_reads(monkeypatch)
    fit(make_data(write_shards(tmp_path, [6])))
    assert counts == [[0], [1]]


def test_setup_and_prepare_twice_are_once(tmp_path, monkeypatch):
    counts = count_reads(monkeypatch)
    data = make_data(write_shards(tmp_path, [6]))
    data.setup("fit")
    assert counts == []
    data.prepare()
    plan_hash = data.plan_hash
    data.setup("validate")
    data.prepare()
    assert data.plan_hash == plan_hash
    assert counts == [[0], [1]]


def test_the_hash_knows_the_options_that_decide_the_blocks_and_no_others(tmp_path):
    path = write_shards(tmp_path, [8])

    def plan_hash(**options):
        data = FeatureDataModule(path=path, **options)
        data.setup()
        return data.plan_hash

    same = [plan_hash(), plan_hash(partial=0.5), plan_hash(check_rows=False), plan_hash(shard="1/3")]
    assert len(set(same)) == 1
    options = [
        {"block_size": 5},
        {"seed": 1},
        {"quality_scaling": "none"},
        {"block_by": "file"},
        {"on_bad_row": "drop"},
    ]
    others = [plan_hash(**option) for option in [*options, {"quality_columns": {"quality_score": 2.0}}]]
    assert len({*same, *others}) == len(others) + 1


def test_constant_quality_is_warned_of_once_a_run(tmp_path):
    """QuRating: constant scores divide by a zero deviation."""
    data = make_data(write_shards(tmp_path, [12], constant_quality=True), block_size=4, num_steps=1)
    with pytest.warns(ConstantQualityWarning, match="the quality of all 4 samples of block 0 is 1: ") as caught:
        fit(data)
    assert len([warning for warning in caught if warning.category is ConstantQualityWarning]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial": 0.0}, r"data\.partial must be above 0 and at most 1, got 0\.0"),
        ({"partial": 1.5}, r"data\.partial must be above 0 and at most 1, got 1\.5"),
        ({"partial": float("nan")}, r"data\.partial .* got nan"),
        ({"block_size": 0}, r"data\.block_size must be at least 1, got 0"),
        ({"seed": -1}, r"data\.seed must be at least 0 and below 2\^63, got -1"),
        ({"seed": 2**63}, r"data\.seed must be"),
        ({"quality_columns": {}}, r"data\.quality_columns must name at least one column"),
        ({"quality_columns": {"a": float("inf")}}, r"data\.quality_columns: the weight of 'a' must be finite, got inf"),
        ({"quality_scaling": "log"}, r"data\.quality_scaling must be one of rank, minmax, zscore, none, got 'log'"),
        ({"block_by": "size"}, r"data\.block_by must be one of rows, row_groups_shuffled, file, got 'size'"),
        ({"on_bad_row": "keep"}, r"data\.on_bad_row must be one of error, drop, got 'keep'"),
        ({"on_bad_row": "drop", "check_rows": False}, r"data\.check_rows: false cannot go with data\.on_bad_row: drop"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        FeatureDataModule(path="x", **options)


def test_using_the_data_module_out_of_order_is_explained(tmp_path):
    data = FeatureDataModule(path=write_shards(tmp_path, [3]))
    for use in (lambda: data.block_sizes, lambda: data.plan_hash, lambda: data.files, lambda: data.bad_rows):
        with pytest.raises(ConfigError, match="setup must be called before"):
            use()
    data.setup()
    with pytest.raises(ConfigError, match="set_steps must be called before"):
        data.train_dataloader()


def test_more_epochs_than_blocks_are_refused(tmp_path):
    data = make_data(write_shards(tmp_path, [3]))
    data.setup()
    loader = data.train_dataloader()
    assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs asks for more than the 1 blocks left"):
        next(iter(loader))
    data.teardown()


def test_every_argument_is_explained_by_help_and_parsed_with_its_type(tmp_path):
    parser = ArgumentParser()
    parser.add_class_arguments(FeatureDataModule, "data")
    help_text = " ".join(parser.format_help().split())
    for name in inspect.signature(FeatureDataModule).parameters:
        assert re.search(rf"--data\.{name} \S.*?[a-z]{{3,}} [a-z]+", help_text), name
    options = {"path": "a", "quality_columns.score": "2", "partial": "0.5", "block_by": "file"}
    parsed = parser.parse_args([f"--data.{name}={value}" for name, value in options.items()])
    data = FeatureDataModule(**parsed.data.as_dict())
    assert (data.path, data.partial, data.block_by) == ("a", 0.5, "file")
    assert data.columns.quality_columns == {"score": 2.0}


def test_ranks_that_see_other_files_are_told_which():
    _check_same_plan(["a" * 64, "a" * 64])
    with pytest.raises(DataFileError, match="rank 2 sees other files than rank 0 does") as caught:
        _check_same_plan(["a" * 64, "a" * 64, "b" * 64])
    assert caught.value.is_on_all_ranks


def test_schema_errors_leave_setup_as_they_are(tmp_path):
    with pytest.raises(SchemaError, match="no column 'score'"):
        FeatureDataModule(path=write_shards(tmp_path, [3]), quality_columns={"score": 1.0}).setup()


def reader_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("datamask-reader")]


@pytest.mark.parametrize("fails_at", [None, (1, 1)])
def test_the_reading_thread_ends_with_the_run_and_no_process_is_started(tmp_path, fails_at):
    """litData #823, polars #24162: fork after a parquet thread pool hangs."""
    data = make_data(write_shards(tmp_path, [20]), block_size=5)
    if fails_at is None:
        fit(data)
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(data, fails_at=fails_at)
    assert not reader_threads()
    assert not multiprocessing.active_children()


def test_the_next_block_is_read_while_one_is_learned_and_two_are_held_at_most():
    started = []
    queue = BlockQueue(lambda index: started.append(index) or f"block {index}", {0: 1, 1: 2, 2: 3}.get)
    assert queue.take(0) == "block 0"
    deadline = time.monotonic() + 5
    while started != [0, 1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert started == [0, 1]
    assert [queue.take(index) for index in (1, 2, 3)] == ["block 1", "block 2", "block 3"]
    queue.close()
    assert started == [0, 1, 2, 3]


def test_where_blocks_are_not_read_ahead_one_is_read_when_it_is_asked_for():
    started = []
    queue = BlockQueue(lambda index: started.append(index) or f"block {index}", {0: 1, 1: 2}.get)
    queue.is_ahead = False
    for index in range(3):
        assert queue.take(index) == f"block {index}"
        assert started == list(range(index + 1))
    queue.close()


def test_no_more_than_two_blocks_are_in_memory(tmp_path, monkeypatch):
    """apricot #28, data-juicer #482: memory that stays bounded."""
    _, num_alive = watch_blocks(monkeypatch)
    fit(make_data(write_shards(tmp_path, [30]), block_size=5))
    assert len(num_alive) == 6
    assert max(num_alive) <= 1, "the block that is read is the second"


def set_up_on_rank(rank, folder, path, on_bad_row, results):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    data = FeatureDataModule(path=path, block_size=4, on_bad_row=on_bad_row)
    try:
        data.setup()
        data.prepare()
        results.put((rank, data.block_sizes, [bad.row for bad in data.bad_rows], data.num_dropped))
    except BadRowError as error:
        results.put((rank, str(error), error.is_on_all_ranks))
    dist.destroy_process_group()


@pytest.mark.parametrize("on_bad_row", ["error", pytest.param("drop", marks=pytest.mark.slow)])
def test_two_ranks_share_the_check_and_end_it_alike(tmp_path, on_bad_row):
    """lightning #11841: an exception on one rank leaves the others hanging. Row 5 is in rank 1's block."""
    shards = tmp_path / "shards"
    shards.mkdir()
    path = write_shards(shards, [12], bad_ids=[5, 10] if on_bad_row == "drop" else [5])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=set_up_on_rank, args=(rank, tmp_path, path, on_bad_row, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    outcomes = sorted(results.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join(timeout=300)
        assert process.exitcode == 0
    assert [rank for rank, *_ in outcomes] == [0, 1]
    if on_bad_row == "drop":
        assert [outcome[1:] for outcome in outcomes] == [([4, 3, 3], [5, 10], 2)] * 2
    else:
        assert outcomes[0][1:] == outcomes[1][1:]
        assert "0.parquet, row 5: " in outcomes[0][1]
        assert outcomes[0][2]


def test_an_error_of_reading_ahead_is_raised_as_it_is_when_its_block_is_wanted():
    def read(index):
        if index == 1:
            raise DataFileError("a.parquet is cut off")
        return index

    queue = BlockQueue(read, {0: 1, 1: 2}.get)
    assert queue.take(0) == 0
    with pytest.raises(DataFileError, match=r"a\.parquet is cut off"):
        queue.take(1)
    queue.close()
    assert queue.take(2) == 2
    queue.close()
