"""One rank fails: all end, soon, with a code that says so, and the message names the rank.

lightning #11841: an exception on one rank leaves the others hanging.
"""

import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.fits import parts, run, write_shards
from tests.support.forked_ranks import Ranks
from tests.support.tiers import only

TIMEOUT_S = 5  # of a rank that does not answer; one that ended is noticed at once
LONG_S = 600
ARGS = (
    "--data.path", "shards", "--data.block_size", "40", "--model.select_ratio", "0.2", "--run_name", "mine",
    "--model.estimator", "leave_one_out", "--model.num_rollouts", "4", "--model.num_steps", "40",
    "--launch.timeout_s", str(TIMEOUT_S), "--checkpoint.every_n_steps", "1",
)  # fmt: skip
DDP = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
LAUNCHERS = {
    "lightning": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}
REASONS = {
    "raise": "rank 1 ended: RuntimeError: the proxy model's GPU is gone; this rank cannot continue without it.",
    "die": "rank 1 was killed without reporting an error (out of memory?); this rank cannot continue without it.",
    "hang": "rank 1 did not answer within launch.timeout_s, {timeout_s} s; this rank cannot continue without it.",
}


def misbehaving(folder, how, *, num_masks=100):
    """Options of an objective that misbehaves on rank 1 once it has valued so many masks, after calibration's 64."""
    diversity = {
        "class_path": "tests.support.objectives.MisbehavesOnRankOne",
        "init_args": {"how": how, "num_masks": num_masks},
    }
    path = folder / f"{how}.yaml"
    path.write_text(yaml.safe_dump({"model": {"diversity": diversity}}))
    return ("--config", str(path))


def processes_in(folder):
    """Processes whose current folder is this one, the zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", REASONS)
def test_the_launcher_ends_with_an_error_that_names_the_rank_and_leaves_no_process(tmp_path, launcher, how):
    write_shards(tmp_path / "shards", [80])
    timeout_s = TIMEOUT_S if how == "hang" else LONG_S
    options = (*ARGS, *DDP, *misbehaving(tmp_path, how), "--launch.timeout_s", str(timeout_s))
    code, _, err = run(*options, folder=tmp_path, launcher=LAUNCHERS[launcher], timeout_s=300)
    assert code != 0
    assert REASONS[how].format(timeout_s=timeout_s) in err or (
        how == "raise" and "RuntimeError: the proxy model's GPU is gone" in err
    ), err
    # torchrun's own look at its workers, and Lightning's at its children, take a moment
    deadline = time.monotonic() + 60
    while (left := processes_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


class TestRanks:
    """What each of them says and how it ends; nothing starts or ends the others."""

    @pytest.mark.slow
    @pytest.mark.parametrize("num_ranks", [2, 3])
    @pytest.mark.parametrize("how", REASONS)
    def test_all_others_name_the_rank_that_failed(self, workplace, how, num_ranks):
        write_shards("shards", [80])
        timeout_s = TIMEOUT_S if how == "hang" else LONG_S
        options = (*ARGS, *misbehaving(workplace, how), "--launch.timeout_s", str(timeout_s))
        ranks = Ranks(num_ranks, *options, folder=workplace)
        ranks.wait_for(" on cpu")
        begun_s = time.monotonic()
        others = [rank for rank in range(num_ranks) if rank != 1]
        for rank in others:
            ranks.processes[rank].join(LONG_S / 5)
            assert not ranks.processes[rank].is_alive(), ranks.output()
        if how == "hang":
            assert time.monotonic() - begun_s > TIMEOUT_S - 1, ranks.output()
            ranks.signal(signal.SIGKILL, 1)
        codes = ranks.end(timeout_s=120)
        assert codes[1] == {"raise": 1, "die": -9, "hang": -9}[how]
        for rank in others:
            assert codes[rank] == 1
            lines = [line for line in ranks.logs[rank].read_text().splitlines() if "error" in line]
            prefix = f"error on rank {rank}: " if rank else "error: "
            assert lines == [prefix + REASONS[how].format(timeout_s=TIMEOUT_S)], ranks.output()

    @pytest.mark.parametrize("hit", only(1, of=[0, 1, 2]))
    def test_a_rank_that_is_killed_is_named_whichever_it_is(self, workplace, hit):
        write_shards("shards", [80])
        steps = ("--model.num_steps", "2000", "--model.estimator", "multilinear")
        ranks = Ranks(3, *ARGS, *steps, folder=workplace)
        ranks.wait_for(" on cpu")
        time.sleep(0.3)
        ranks.signal(signal.SIGKILL, hit)
        codes = ranks.end(timeout_s=120)
        assert [code for rank, code in enumerate(codes) if rank != hit] == [1, 1], ranks.output()
        reason = (
            f"rank {hit} was killed without reporting an error"
            if hit
            else "rank 0, which hosts the rendezvous store, exited"
        )
        for rank in {0, 1, 2} - {hit}:
            assert reason in ranks.logs[rank].read_text()

    @pytest.mark.slow
    def test_what_failed_is_done_again_by_the_same_command(self, workplace):
        write_shards("shards", [80])
        fixed = (*ARGS, *misbehaving(workplace, "die", num_masks=10**9))
        Ranks(2, *fixed, "--trainer.max_steps", "10", folder=workplace).end(timeout_s=120)
        ranks = Ranks(2, *fixed, folder=workplace)
        ranks.wait_for(" on cpu")
        ranks.signal(signal.SIGKILL, 1)
        ranks.end(timeout_s=120)
        assert Ranks(2, *fixed, folder=workplace).end(timeout_s=120) == [0, 0]
        assert len(parts(workplace / "runs/datamask/mine")) == 2


@pytest.mark.slow
class TestGroups:
    """A group fails while the others are at work, or have done their part."""

    ARGS = (*ARGS, "--model.estimator", "multilinear", "--launch.ranks_per_block", "1")

    def test_rank_0_that_has_done_its_part_waits_for_the_others_and_says_which_was_lost(self, workplace):
        write_shards("shards", [80])
        # rank 0 finishes block 0 while rank 1 is stopped in block 1, longer than the timeout of collectives
        ranks = Ranks(2, *self.ARGS, "--model.num_steps", "300", folder=workplace)
        ranks.wait_for(" on cpu")
        ranks.signal(signal.SIGSTOP, 1)
        deadline = time.monotonic() + 300
        while not parts(workplace / "runs/datamask/mine"):
            assert time.monotonic() < deadline, ranks.output()
            time.sleep(0.05)
        ranks.processes[0].join(TIMEOUT_S + 2)
        assert ranks.processes[0].is_alive(), ranks.output()
        ranks.signal(signal.SIGKILL, 1)
        assert ranks.end(timeout_s=120) == [1, -signal.SIGKILL], ranks.output()
        assert "rank 1 was killed without reporting an error" in ranks.logs[0].read_text()
        assert "its blocks are not done" in ranks.logs[0].read_text()

    def test_the_whole_group_of_rank_0_waits(self, workplace):
        write_shards("shards", [80])
        ranks = Ranks(4, *self.ARGS, "--launch.ranks_per_block", "2", "--model.num_steps", "100", folder=workplace)
        ranks.wait_for(" on cpu")
        ranks.signal(signal.SIGSTOP, 2)
        for rank in (0, 1):
            ranks.processes[rank].join((TIMEOUT_S - 3) / 2)
            assert ranks.processes[rank].is_alive(), ranks.output()
        ranks.signal(signal.SIGCONT, 2)
        assert ranks.end(timeout_s=120) == [0] * 4, ranks.output()
        assert len(parts(workplace / "runs/datamask/mine")) == 2

    def test_the_end_of_one_group_is_no_failure_to_those_that_wait(self, workplace):
        write_shards("shards", [120])
        ranks = Ranks(3, *self.ARGS, "--model.num_steps", "100", folder=workplace)
        ranks.wait_for(" on cpu")
        ranks.signal(signal.SIGSTOP, 2)
        ranks.processes[1].join(120)
        assert ranks.processes[1].exitcode == 0, ranks.output()
        assert ranks.processes[0].is_alive()
        ranks.signal(signal.SIGCONT, 2)
        assert ranks.end(timeout_s=120) == [0] * 3, ranks.output()
        assert "(3 parts)" in ranks.logs[0].read_text()

    def test_groups_end_when_rank_0_through_which_they_find_each_other_is_killed(self, workplace):
        write_shards("shards", [80])
        ranks = Ranks(2, *self.ARGS, "--model.num_steps", "5000", folder=workplace)
        ranks.wait_for(" on cpu")
        ranks.signal(signal.SIGKILL, 0)
        assert ranks.end(timeout_s=120) == [-signal.SIGKILL, 1], ranks.output()
        assert "rank 0, which hosts the rendezvous store, exited" in ranks.logs[1].read_text()
