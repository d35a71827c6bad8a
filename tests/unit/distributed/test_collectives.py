"""The collectives of two processes, of which this one is rank 0, against sums that are made without them."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from datamask_pl.distributed.collectives import (
    RankGroup,
    drop_group,
    gather_objects,
    leave_group,
    raise_on_all_ranks,
)
from datamask_pl.distributed.launch import is_broken_collective
from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import World, set_world, world
from datamask_pl.errors import AgreementError, ConfigError
from tests.support.forked_ranks import fork_context
from tests.support.ranks import free_port


def variables(rank, port):
    """Those by which Lightning knows a process that somebody else has started."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def join(ranks_per_block):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=BlockGroupStrategy(ranks_per_block=ranks_per_block, timeout_s=300),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.strategy.setup_distributed()
    return trainer.strategy


def be_rank_1(port, ranks_per_block, connection):
    """Does what it is sent, until it is sent None."""
    os.environ |= variables(1, port)
    strategy = join(ranks_per_block)
    while (job := connection.recv()) is not None:
        try:
            connection.send(job(strategy))
        except Exception as error:
            connection.send(error)


@pytest.fixture
def pair(monkeypatch):
    """Starts rank 1, and joins it as rank 0; `both` runs a job on either, and returns what they returned or raised."""
    context = fork_context()
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(decorator, "rank", 0, raising=False)
    started = []

    def start(ranks_per_block):
        ours, theirs = context.Pipe()
        port = free_port()
        process = context.Process(target=be_rank_1, args=(port, ranks_per_block, theirs))
        process.start()
        started.append((process, ours))
        for name, value in variables(0, port).items():
            monkeypatch.setenv(name, value)
        strategy = join(ranks_per_block)

        def receive(timeout_s):
            assert ours.poll(timeout_s), "rank 1 has not answered"
            return ours.recv()

        def both(job):
            ours.send(job)
            try:
                here = job(strategy)
            except Exception as error:
                here = error
            return here, receive(120)

        return SimpleNamespace(both=both, send=ours.send, receive=receive)

    yield start
    codes = []
    for process, ours in started:
        ours.send(None)
        process.join(10)
        codes.append(process.exitcode)
        process.kill()
    set_world(World())
    if dist.is_initialized():
        dist.destroy_process_group()
    assert codes == [0]


def where(strategy):
    return (
        strategy.global_rank,
        strategy.world_size,
        RankGroup.current(),
        world().rank,
        world().group,
        world().num_groups,
    )


def total(strategy):
    return RankGroup.current().sum_(torch.tensor([1.0, 10.0]) * (1 + RankGroup.current().rank)).tolist()


def side_by_side(strategy):
    rank = RankGroup.current().rank
    return RankGroup.current().concatenate(torch.full((2, 3 * rank), float(rank), dtype=torch.float64)).tolist()


def completed(strategy):
    ranks = RankGroup.current()
    rows_of = ranks.shares(5)
    own = rows_of[ranks.rank]
    table = torch.full((5, 2), -1)
    table[own.start : own.stop] = torch.arange(10).view(5, 2)[own.start : own.stop]
    return ranks.complete_(table, rows_of).tolist()


def completed_by_one(strategy):
    table = torch.arange(3) if RankGroup.current().rank == 1 else torch.zeros(3, dtype=torch.int64)
    return RankGroup.current().complete_(table, [range(0), range(3)]).tolist()


def gathered(strategy):
    return gather_objects({"rank": RankGroup.current().rank})


def is_any_true(strategy):
    ranks = RankGroup.current()
    return ranks.any(False), ranks.any(ranks.rank == 1), ranks.any(ranks.rank == 0), ranks.any(True)


def agreed(strategy):
    RankGroup.current().check_agreement(torch.arange(4.0), "here")


def disagreed(strategy):
    RankGroup.current().check_agreement(torch.arange(4.0) + RankGroup.current().rank, "here")


def failing_on_rank_1(strategy):
    with raise_on_all_ranks():
        if RankGroup.current().rank == 1:
            raise ConfigError("rank 1 was told otherwise")


def leave(strategy):
    leave_group()
    return dist.is_initialized()


def finish(strategy):
    strategy.finish()
    return strategy.lost


def decide(strategy):
    return world().broadcast_from_first("key", lambda: f"decided by {world().rank}")


def post_word(strategy):
    if world().rank == 1:
        world().publish("word")


def sees_word(strategy):
    return world().is_published("word"), world().is_published("another")


def wait_for_the_other(strategy):
    dist.barrier()


def test_one_group_gives_every_rank_the_whole(pair):
    both = pair(ranks_per_block=2).both
    assert both(where) == ((0, 2, RankGroup(0, 2), 0, 0, 1), (1, 2, RankGroup(1, 2), 1, 0, 1))
    assert both(total) == ([3.0, 30.0],) * 2
    assert both(side_by_side) == ([[1.0] * 3] * 2,) * 2
    assert both(completed) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],) * 2
    assert both(completed_by_one) == ([0, 1, 2],) * 2
    assert both(gathered) == ([{"rank": 0}, {"rank": 1}],) * 2
    assert both(is_any_true) == ((False, True, True, True),) * 2
    assert both(agreed) == (None, None)
    for error in both(disagreed):
        assert isinstance(error, AgreementError)
        assert str(error).startswith("here: ranks 1 hold other values than rank 0 ")
    for error in both(failing_on_rank_1):
        assert isinstance(error, ConfigError)
        assert str(error) == "rank 1 was told otherwise"
    assert both(finish) == (None, None)
    assert both(leave) == (False, False)


def test_groups_of_one_share_words_and_nothing_else(pair):
    both = pair(ranks_per_block=1).both
    assert both(where) == ((0, 1, RankGroup(0, 1), 0, 0, 2), (0, 1, RankGroup(0, 1), 1, 1, 2))
    assert both(total) == ([1.0, 10.0],) * 2
    assert both(decide) == ("decided by 0",) * 2
    assert both(sees_word) == ((False, False),) * 2
    both(post_word)
    assert both(sees_word) == ((True, False),) * 2
    assert both(finish) == (None, None)
    assert both(leave) == (False, False)


def test_who_waits_for_a_rank_that_drops_its_connections_is_told(pair):
    ranks = pair(ranks_per_block=2)
    ranks.both(total)  # gloo connects at the first collective
    ranks.send(wait_for_the_other)
    drop_group()  # its process goes on: nothing else closes them
    assert is_broken_collective(ranks.receive(60))
    drop_group()  # of a group that is gone already: nothing
