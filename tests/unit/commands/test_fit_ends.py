"""How `fit` ends where a rank has failed: what it says, and that it leaves no process."""

import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from datamask_pl import cli
from datamask_pl.commands.fit import FitCLI
from datamask_pl.distributed import failures
from datamask_pl.distributed.failures import FailureBoard
from datamask_pl.distributed.launch import LaunchOptions
from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import World, set_world, world
from datamask_pl.errors import AgreementError, ConfigError, PreemptedError, RankFailedError

BROKEN = dist.DistNetworkError("Connection closed by peer")


@pytest.fixture
def boards(monkeypatch):
    """Of two ranks in one group."""
    monkeypatch.setattr(failures, "PATIENCE_S", 0.5)
    monkeypatch.setattr(failures, "NOTICE_S", 0.3)
    store = dist.HashStore()
    return [FailureBoard(store, rank, 2, [0, 1]) for rank in range(2)]


def command(board=None, *, fit=lambda model: None, processes=(), lost=None):
    """A FitCLI whose trainer fits as told, on a rank that has this board."""
    strategy = BlockGroupStrategy()
    strategy.board, strategy.lost = board, lost
    strategy._launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    strategy._launcher.procs = list(processes)
    ours = object.__new__(FitCLI)
    ours.subcommand = "fit"
    ours.config_init = {"fit": SimpleNamespace(launch=LaunchOptions(timeout_s=7.0))}
    ours.trainer = SimpleNamespace(strategy=strategy, fit=fit, callbacks=[])
    return ours


def failing(error):
    def fit(model):
        raise error

    return fit


def test_an_error_of_this_rank_is_raised_as_it_is_and_the_others_can_read_of_it(boards):
    error = ValueError("the GPU\n is gone")
    with pytest.raises(ValueError, match="the GPU") as caught:
        command(boards[1], fit=failing(error)).fit(None)
    assert caught.value is error
    assert boards[0].find() == "rank 1 ended: ValueError: the GPU is gone"


def test_where_another_rank_failed_that_rank_and_its_reason_are_named(boards):
    boards[0].post("ConfigError: its own")
    with pytest.raises(
        RankFailedError, match=r"^rank 0 ended: ConfigError: its own; this rank cannot continue without it"
    ):
        command(boards[1], fit=failing(BROKEN)).fit(None)


def test_of_a_rank_that_does_not_answer_it_is_said_how_long_it_had(boards):
    with pytest.raises(RankFailedError, match=r"^rank 0 did not answer within launch\.timeout_s, 7 s; this rank"):
        command(boards[1], fit=failing(BROKEN)).fit(None)


def test_where_nobody_knows_who_it_was_that_is_said(boards):
    boards[1]._store.set("datamask-noticed-0", "")  # rank 0 has noticed, too
    with pytest.raises(RankFailedError, match=r"^a rank did not answer within launch\.timeout_s, 7 s"):
        command(boards[1], fit=failing(BROKEN)).fit(None)


def test_without_others_an_error_is_raised_as_it_is():
    with pytest.raises(dist.DistNetworkError) as caught:
        command(fit=failing(BROKEN)).fit(None)
    assert caught.value is BROKEN


def test_blocks_of_a_group_that_was_lost_are_an_error_though_this_one_has_done_its_part(boards):
    set_world(World(1, 2, 1, 2, dist.HashStore()))
    with pytest.raises(RankFailedError, match=r"^rank 0 ended: x; its blocks are not done\. Rerun the same command"):
        command(boards[1], lost="rank 0 ended: x").fit(None)
    assert world() == World()


def test_no_process_is_left():
    quick, hanging = (subprocess.Popen(words) for words in (["true"], ["sleep", "300"]))
    try:
        quick.wait(60)
        command(processes=[quick, hanging])._end_children(patience_s=0.2)
        assert quick.returncode == 0
        assert hanging.wait(60) == -9
    finally:
        hanging.kill()


MISCONFIGURED = type("MisconfigurationException", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "rank", "code", "said"),
    [
        (PreemptedError("told to end"), 0, 75, "stopped: told to end\n"),
        (PreemptedError("told to end"), 1, 75, ""),
        (RankFailedError("rank 1 ended"), 0, 1, "error: rank 1 ended\n"),
        (AgreementError("they differ"), 2, 1, "error on rank 2: they differ\n"),
        (ConfigError("no"), 0, 2, "error: no\n"),
        (OSError(5, "Input/output\nerror", "a/b"), 0, 1, "error: [Errno 5] Input/output error: 'a/b'; run the same"),
        (ValueError("embedded null byte"), 0, 2, "error: a path holds a zero byte; remove it.\n"),
        (MISCONFIGURED("no\nGPU"), 0, 2, "error: no GPU\n"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 0, 2, "error: a file is not text"),
        (KeyboardInterrupt(), 0, 130, "interrupted; the same command continues, where --run_name"),
        (KeyboardInterrupt(), 1, 130, ""),
    ],
)
def test_every_end_has_its_code_and_one_line(monkeypatch, capsys, error, rank, code, said):
    monkeypatch.setattr(cli, "_run", lambda *_, **__: failing(error)(None))
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit"])
    assert ended.value.code == code
    written = capsys.readouterr().err
    assert written.startswith(said)
    assert written.count("\n") == bool(said)


def test_a_process_that_lightning_started_ends_a_preempted_run_well(monkeypatch):
    """Lightning kills the run if one of them ends with another code than 0."""
    monkeypatch.setattr(cli, "_run", lambda *_, **__: failing(PreemptedError("told to end"))(None))
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit"])
    assert ended.value.code == 0


def test_what_all_ranks_meet_rank_0_alone_says(monkeypatch, capsys):
    error = ConfigError("no")
    error.is_on_all_ranks = True
    monkeypatch.setattr(cli, "_run", lambda *_, **__: failing(error)(None))
    for rank, said in ((0, "error: no\n"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit):
            cli.main(["fit"])
        assert capsys.readouterr().err == said


def test_an_error_that_nobody_expected_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_run", lambda *_, **__: failing(ZeroDivisionError())(None))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fit"])


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_lightning_s_exit_on_ctrl_c_is_told_from_others(monkeypatch, is_interrupted):
    def run(*_, **__):
        try:
            raise KeyboardInterrupt if is_interrupted else ValueError
        except (KeyboardInterrupt, ValueError):
            sys.exit(3)

    monkeypatch.setattr(cli, "_run", run)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit"])
    assert ended.value.code == (130 if is_interrupted else 3)


@pytest.mark.parametrize("words", [["--version"], ["--help"], []])
def test_the_package_runs_as_the_command_line_does(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["datamask_pl", *words])
    cli.main(words)
    expected = capsys.readouterr().out
    runpy.run_module("datamask_pl", run_name="__main__")
    assert capsys.readouterr().out == expected != ""
