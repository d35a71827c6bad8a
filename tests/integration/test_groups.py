"""Groups of ranks, and jobs, share the blocks: every id once, and the mask of one process.

datasets #6594, lightning #20404: uneven shards lead to repeated samples or hangs.
"""

import pyarrow.parquet as pq
import pytest

from tests.support.fits import assert_same_mask, fit, manifest, parts, run_folder, start, write_shards
from tests.support.forked_ranks import launch
from tests.support.ranks import end

NUM_ROWS = 157
BLOCK_SIZES = {1: 157, 3: 53, 7: 23}  # blocks of sizes that differ by one
ARGS = (
    "--data.path",
    "shards",
    "--model.select_ratio",
    "0.2",
    "--data.partial",
    "0.3",
    "--checkpoint.every_n_steps",
    "1",
)
ROLLOUTS = ("--model.estimator", "leave_one_out", "--model.num_rollouts", "4", "--model.num_steps", "3")
WORLDS = {2: (1, 2), 4: (1, 2, 4)}


def blocks(num_blocks):
    steps = ROLLOUTS if num_blocks == 3 else ("--model.num_steps", "3")
    return (*ARGS, "--data.block_size", str(BLOCK_SIZES[num_blocks]), *steps)


def name(num_blocks, num_ranks, ranks_per_block):
    return f"{num_blocks}-of-{num_ranks}-by-{ranks_per_block}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards, fewer than blocks and ranks, and the masks that one process makes of them."""
    folder = tmp_path_factory.mktemp("groups")
    write_shards(folder / "shards", [90, 0, 67])
    for num_blocks in BLOCK_SIZES:
        fit(*blocks(num_blocks), "--run_name", f"one-{num_blocks}", folder=folder)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(request, folder):
    """The number of ranks, and what rank 0 printed once they have run every number of blocks in groups of all sizes."""
    num_ranks = request.param
    fits = [
        (*blocks(num_blocks), "--launch.ranks_per_block", str(size), "--run_name", name(num_blocks, num_ranks, size))
        for num_blocks in BLOCK_SIZES
        for size in WORLDS[num_ranks]
    ]
    return num_ranks, launch(num_ranks, fits, folder=folder)


@pytest.mark.parametrize("num_blocks", BLOCK_SIZES)
def test_groups_of_any_size_give_the_mask_and_the_logits_of_one_process_and_every_id_once(folder, world, num_blocks):
    num_ranks, printed = world
    one = run_folder(folder).with_name(f"one-{num_blocks}")
    for size in WORLDS[num_ranks]:
        run = run_folder(folder).with_name(name(num_blocks, num_ranks, size))
        assert_same_mask(run, one, num_parts=num_blocks)
        assert sorted(id_ for part in parts(run) for id_ in part["id"].to_pylist()) == list(range(NUM_ROWS))
        seen, expected = manifest(run), manifest(one)
        assert list(seen["blocks"]) == [str(block) for block in range(num_blocks)]
        for block in (*seen["blocks"].values(), *expected["blocks"].values()):
            block["seconds"] = 0
        assert seen["blocks"] == expected["blocks"]
        num_groups = num_ranks // size
        if num_groups > 1:
            plural = "s" * (num_blocks > 1)
            words = f"{num_blocks} block{plural} for {num_groups} groups of {size}, {num_ranks} processes on cpu"
            assert words in printed
        # every group that had a block has its log, and every one its checkpoints in the one folder
        assert len(list(run.glob("group-*"))) == min(num_groups, num_blocks) - 1
        assert (run / "config.yaml").is_file()
        assert f"mask    {run.relative_to(folder)}/mask ({num_blocks} part{'s' * (num_blocks > 1)})" in printed


@pytest.mark.slow
def test_a_run_that_groups_of_one_size_began_goes_on_with_any_other(folder):
    """Two ranks began, each its own blocks; then four in groups of two; one process ends it."""
    args = (*blocks(7), "--run_name", "changing")
    launch(2, [(*args, "--launch.ranks_per_block", "1", "--trainer.max_steps", "5")], folder=folder)
    run = run_folder(folder).with_name("changing")
    assert len(parts(run)) == 2
    assert len(list((run / "checkpoints").iterdir())) == 4
    launch(4, [(*args, "--launch.ranks_per_block", "2", "--trainer.max_steps", "4")], folder=folder)
    assert 2 < len(parts(run)) < 7
    fit(*args, folder=folder)
    assert_same_mask(run, run_folder(folder).with_name("one-7"), num_parts=7)
    assert len(manifest(run)["blocks"]) == 7


def test_an_unnamed_run_of_groups_has_one_folder(folder):
    args = (*blocks(3), "--launch.ranks_per_block", "1", "--trainer.logger.init_args.name", "unnamed")
    launch(2, [args, args], folder=folder)
    assert sorted(path.name for path in (folder / "runs/unnamed").iterdir()) == ["version_0", "version_1"]
    for version in (0, 1):
        assert_same_mask(run_folder(folder, version, "unnamed"), run_folder(folder).with_name("one-3"), num_parts=3)


@pytest.mark.slow
def test_jobs_that_share_nothing_but_the_folder_of_the_mask_complete_it_at_the_same_time(folder):
    jobs = [
        start(
            *blocks(7), "--mask.output", "shared", "--data.shard", f"{job}/3", "--run_name", f"job-{job}", folder=folder
        )
        for job in range(3)
    ]
    codes, outputs = end(jobs, timeout_s=300)
    assert codes == [0, 0, 0], outputs
    assert_same_mask(folder / "shared", run_folder(folder).with_name("one-7"), num_parts=7)
    assert list(manifest(folder / "shared")["blocks"]) == [str(block) for block in range(7)]
    assert not list((folder / "shared").glob(".*"))
    assert sum("(7 parts)" in out for out, _ in outputs) >= 1
    for job, (out, _) in enumerate(outputs):
        assert f"samples in {3 if job == 0 else 2} blocks of 7 in all" in out
    assert sum(pq.read_metadata(path).num_rows for path in (folder / "shared").glob("*.parquet")) == NUM_ROWS
