"""What was launched, and what the trainer was told. lightning #20391, #10150, #4612."""

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from datamask_pl.distributed import strategy
from datamask_pl.distributed.launch import (
    LaunchOptions,
    check_launch,
    is_broken_collective,
    register_strategy,
    slurm_plugins,
)
from datamask_pl.distributed.strategy import BlockGroupStrategy, _connect, group_size
from datamask_pl.errors import ConfigError, LaunchError

SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "mask", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
TORCHRUN |= {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, in an environment that has none of a launcher."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))] + list(TORCHRUN):
        monkeypatch.delenv(name, raising=False)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield set_all
    register_strategy(LaunchOptions())


def make_trainer(*, devices=1, strategy="auto", **options):
    register_strategy(LaunchOptions())
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=slurm_plugins(None), **options,
    )  # fmt: skip


class TestCheckLaunch:
    @pytest.mark.parametrize("devices", [1, 3])
    def test_a_run_that_lightning_starts_itself_has_as_many_processes_as_it_was_told(self, environment, devices):
        check_launch(make_trainer(devices=devices))

    @pytest.mark.parametrize(
        ("variables", "words"), [(TORCHRUN, "torchrun started 4 processes"), (SLURM, "SLURM_NTASKS says 4")]
    )
    def test_numbers_that_differ_are_both_named(self, environment, variables, words):
        environment(**variables)
        with pytest.raises(LaunchError) as caught:
            check_launch(make_trainer(devices=1))
        assert words in str(caught.value)
        assert "trainer.devices x trainer.num_nodes is 1 x 1 = 1; make them equal" in str(caught.value)

    def test_one_process_of_torchrun_is_not_two(self, environment):
        environment(**{**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        with pytest.raises(LaunchError, match=r"torchrun started 1 process, and .* is 2 x 1 = 2; make them equal"):
            check_launch(make_trainer(devices=2, strategy="ddp"))

    def test_numbers_that_agree_pass(self, environment):
        environment(**TORCHRUN)
        check_launch(make_trainer(devices=4, strategy="ddp"))
        check_launch(make_trainer(devices=2, num_nodes=2, strategy="ddp"))

    def test_a_job_that_was_not_started_by_srun_is_warned(self, environment):
        environment(**SLURM)
        with pytest.warns(UserWarning, match="does not seem to have been started by srun"):
            check_launch(make_trainer(devices=4, strategy="ddp"))
        environment(SLURM_STEP_ID="0")
        check_launch(make_trainer(devices=4, strategy="ddp"))

    def test_an_interactive_shell_is_no_batch_job(self, environment):
        """lightning #19762."""
        environment(**{**SLURM, "SLURM_JOB_NAME": "interactive"})
        check_launch(make_trainer(devices=1))

    @pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook", DDPStrategy()])
    def test_another_strategy_is_refused_by_name(self, environment, strategy):
        with pytest.raises(ConfigError, match=r"trainer\.strategy must be auto or ddp, got DDPStrategy"):
            check_launch(make_trainer(devices=2, strategy=strategy))

    def test_ours_stands_for_ddp_and_for_auto(self, environment):
        for options in ({"devices": 2}, {"devices": 1, "strategy": "ddp"}, {"devices": 2, "strategy": "ddp"}):
            assert isinstance(make_trainer(**options).strategy, BlockGroupStrategy)

    def test_it_is_given_the_options(self):
        register_strategy(LaunchOptions(ranks_per_block=3, timeout_s=7.5))
        strategy = StrategyRegistry.get("ddp")
        assert (strategy.ranks_per_block, strategy._timeout) == (3, timedelta(seconds=7.5))
        register_strategy(LaunchOptions())

    def test_lightning_does_not_requeue(self, environment):
        environment(**SLURM)
        (plugin,) = slurm_plugins(None)
        assert plugin.auto_requeue is False
        assert slurm_plugins([plugin]) == []


class TestGroupSize:
    @given(st.integers(1, 64), st.integers(1, 70))
    def test_groups_add_up_to_the_world_or_are_refused_with_what_would(self, world_size, size):
        if world_size % size == 0:
            assert group_size(world_size, 1, size) == size
            return
        with pytest.raises(LaunchError) as caught:
            group_size(world_size, 1, size)
        text = str(caught.value)
        assert f"must divide the number of processes, {world_size}, got {size}; give one of 1" in text
        divisors = [int(number) for number in text.split("give one of ")[1].rstrip(".").split(", ")]
        assert all(world_size % divisor == 0 for divisor in divisors)

    def test_left_out_it_is_the_ranks_of_a_node(self):
        assert group_size(16, 8, None) == 8
        assert group_size(3, 3, None) == 3

    @pytest.mark.parametrize("options", [{"ranks_per_block": 0}, {"ranks_per_block": -1}])
    def test_a_group_needs_a_rank(self, options):
        with pytest.raises(ConfigError, match=r"launch\.ranks_per_block must be at least 1"):
            LaunchOptions(**options)

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
    def test_a_timeout_is_above_zero(self, timeout_s):
        with pytest.raises(ConfigError, match=r"launch\.timeout_s must be"):
            LaunchOptions(timeout_s=timeout_s)

    @pytest.mark.parametrize("timeout_s", [float("inf"), 1e15])
    def test_and_not_for_ever(self, timeout_s):
        with pytest.raises(ConfigError, match=r"launch\.timeout_s must be .* at most"):
            LaunchOptions(timeout_s=timeout_s)


class TestConnect:
    @pytest.fixture(autouse=True)
    def variables(self, environment, monkeypatch):
        environment(MASTER_ADDR="", MASTER_PORT="")  # which _connect sets, for good

    def test_a_port_that_is_taken_is_explained(self):
        """lightning #4612: a busy port."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            port = sock.getsockname()[1]
            with pytest.raises(
                LaunchError, match=f"port {port} of 127.0.0.1 is taken, by another run perhaps; set MAST"
            ):
                _connect("127.0.0.1", port, 0, 2, timedelta(seconds=5))

    def test_a_rank_0_that_cannot_be_reached_is_explained(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        with pytest.raises(LaunchError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}; check MASTER_ADDR"):
            _connect("127.0.0.1", port, 1, 2, timedelta(seconds=1))

    @pytest.mark.parametrize("launcher", ["env", "torchrun"])
    def test_a_rank_that_does_not_come_is_explained(self, environment, launcher):
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        if launcher == "torchrun":  # whose agent holds the store
            port = agent.port
            environment(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        with pytest.raises(LaunchError, match=r"rank 0 has waited 1 s for all 2 processes to start, and some have not"):
            _connect("127.0.0.1", port, 0, 2, timedelta(seconds=1))

    def test_to_start_takes_longer_than_to_answer(self, environment, monkeypatch):
        environment(MASTER_PORT="29999")
        waited = []

        def connect(*args):
            waited.append(args[-1])
            raise LaunchError("nobody else is there")

        monkeypatch.setattr(strategy, "_connect", connect)
        for timeout_s in (5.0, 900.0):
            ours = make_trainer(devices=2, strategy=BlockGroupStrategy(timeout_s=timeout_s)).strategy
            with pytest.raises(LaunchError, match="nobody else"):
                ours.setup_distributed()
        assert waited == [timedelta(seconds=300), timedelta(seconds=900)]

    def test_nor_one_whose_name_is_not_known(self):
        with pytest.raises(LaunchError, match=r"rank 1 cannot reach rank 0 at no-such-host\.invalid:29999"):
            _connect("no-such-host.invalid", 29999, 1, 2, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (dist.DistNetworkError("Connection reset"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"), True),
        (
            RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation"),
            True,
        ),
        (RuntimeError("the proxy model's GPU is gone"), False),
        (ValueError("gloo"), False),
        (ConfigError("NCCL"), False),
    ],
)
def test_errors_that_say_that_another_left_are_told_from_those_of_this_rank(error, is_broken):
    assert is_broken_collective(error) == is_broken
