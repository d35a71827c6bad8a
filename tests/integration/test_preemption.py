"""What a run does when it is told to end, in one process; several are in test_launchers.py."""

import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from datamask_pl.callbacks.preemption import Preemption
from datamask_pl.errors import ConfigError
from datamask_pl.learner import module
from datamask_pl.learner.solve import solve
from tests.support.callbacks import Signals
from tests.support.fits import assert_same_mask, fit, manifest, write_shards


@pytest.fixture
def requeued(workplace, monkeypatch):
    """A SLURM job whose scontrol writes down what it is asked; returns a function that reads it."""
    program = workplace / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >> {workplace}/scontrol.log\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    log = workplace / "scontrol.log"
    return lambda: log.read_text().splitlines() if log.exists() else []


@pytest.fixture(autouse=True)
def handlers():
    """Puts back what a run in this process leaves behind."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def args(workplace):
    path = write_shards(workplace / "shards", [70, 50])
    return ("--data.path", path, "--data.block_size", "40", "--model.select_ratio", "0.2", "--model.num_steps", "5")


def told(name, *, after=8):
    return ("--trainer.callbacks+", Signals.config(name, after=after))


@pytest.mark.parametrize(
    ("received", "options", "is_requeued"),
    [
        ("SIGUSR1", (), True),
        ("SIGTERM", (), False),  # scancel: a job that requeues itself could not be cancelled
        ("SIGTERM", ("--preemption.signal", "SIGTERM"), True),
        ("SIGUSR2", ("--preemption.signal", "SIGUSR2"), True),
        ("SIGUSR1", ("--preemption.requeue", "false"), False),
    ],
)
def test_a_signal_ends_the_run_between_two_steps_and_the_scheduler_s_own_requeues_it(
    args, requeued, capsys, received, options, is_requeued
):
    command = (*args, "--run_name", "told", "--preemption.requeue", "true", *options)
    with pytest.raises(SystemExit) as ended:
        fit(*command, *told(received))
    assert ended.value.code == 75
    assert "stopped: a signal ended the run" in capsys.readouterr().err
    assert requeued() == (["requeue 4711"] if is_requeued else [])
    assert list(manifest("runs/datamask/told")["blocks"]) == ["0"]
    fit(*args, "--run_name", "undisturbed")
    fit(*command)
    assert_same_mask("runs/datamask/told", "runs/datamask/undisturbed", num_parts=3)


@pytest.mark.parametrize(("block", "code"), [(0, 75), (2, None)])
def test_a_signal_while_a_block_is_rounded_ends_the_run_before_the_next(args, monkeypatch, block, code):
    def solve_and_tell(state, *args, **kwargs):
        if state.block.index == block:
            signal.raise_signal(signal.SIGTERM)
        return solve(state, *args, **kwargs)

    command = (*args, "--run_name", "told")
    with monkeypatch.context() as patch:
        patch.setattr(module, "solve", solve_and_tell)
        with pytest.raises(SystemExit) if code else nullcontext() as ended:
            fit(*command)
    assert code is None or ended.value.code == code
    assert len(manifest("runs/datamask/told")["blocks"]) == block + 1
    assert not list(Path("runs/datamask/told/checkpoints").glob(f"block-{block + 1:05d}-*"))
    fit(*args, "--run_name", "undisturbed")
    fit(*command)
    assert_same_mask("runs/datamask/told", "runs/datamask/undisturbed", num_parts=3)


def test_the_task_of_an_array_is_requeued_by_its_own_number(args, requeued, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "47")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(SystemExit):
        fit(*args, "--preemption.requeue", "true", *told("SIGUSR1"))
    assert requeued() == ["requeue 47_3"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [({}, "SLURM_JOB_ID is not set"), ({"SLURM_JOB_ID": "1", "PATH": "/none"}, "scontrol requeue 1 failed")],
)
def test_where_requeueing_is_not_possible_the_run_is_saved_all_the_same(args, monkeypatch, variables, reason):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=reason), pytest.raises(SystemExit) as ended:
        fit(*args, "--preemption.requeue", "true", *told("SIGUSR1"))
    assert ended.value.code == 75


def test_a_run_that_is_not_disturbed_leaves_the_handlers_as_they_were(args):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    fit(*args)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_nor_does_one_that_fails(args):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(SystemExit):
        fit(*args, "--model.select_ratio", "0.001")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_signal_while_it_waits_for_other_groups_does_nothing():
    """Lightning has put back by then the handlers that it found, which are those of `setup`."""
    preemption = Preemption()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    preemption.setup(trainer, None, "fit")
    trainer._signal_connector.register_signal_handlers()
    trainer._signal_connector.teardown()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert not preemption.is_preempted


@pytest.fixture
def python_interrupt():
    """Python's own handler of Ctrl-C, which a process started in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupt")
def test_ctrl_c_ends_the_run_after_its_step_and_what_was_reached_is_saved(args, capfd):
    with pytest.raises(SystemExit) as ended:
        fit(*args, "--run_name", "told", *told("SIGINT"))
    assert ended.value.code == 130
    err = capfd.readouterr().err
    assert "Ctrl-C: the current step is finished and saved; press it again to end at once" in err
    assert "interrupted; the same command continues" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit(*args, "--run_name", "undisturbed")
    fit(*args, "--run_name", "told")
    assert_same_mask("runs/datamask/told", "runs/datamask/undisturbed", num_parts=3)


@pytest.mark.usefixtures("python_interrupt")
def test_a_second_ctrl_c_ends_the_process_at_once(monkeypatch):
    raised = []
    monkeypatch.setattr("datamask_pl.callbacks.preemption.signal.raise_signal", raised.append)
    preemption = Preemption()
    preemption._note(signal.SIGINT, None)
    assert raised == []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    preemption._note(signal.SIGINT, None)  # where the run has set the handler again
    assert raised == [signal.SIGINT]


def test_a_signal_must_have_a_name():
    with pytest.raises(ConfigError, match=r"preemption.signal must be a signal's name such as SIGUSR1, got 'USR1'\."):
        Preemption(signal="USR1")
