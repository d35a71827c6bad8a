"""What Lightning, torch and jsonargparse do not document is still as it is used."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from jsonargparse import ArgumentParser
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only

from datamask_pl import compat
from datamask_pl.learner.module import MaskLearner


def test_a_parser_names_its_options():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--run_name")
    parser.add_class_arguments(MaskLearner, "model")
    assert {"run_name", "model", "model.num_steps"} <= set(compat.option_names(parser))


def test_the_processes_that_lightning_started_are_found():
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    assert list(compat.launched_processes(trainer)) == []
    launcher.procs.append("process")
    assert list(compat.launched_processes(trainer)) == ["process"]
    trainer.strategy.launcher = None
    assert list(compat.launched_processes(trainer)) == []


def test_the_next_version_is_one_above_the_last(tmp_path):
    logger = TensorBoardLogger(str(tmp_path), name="name")
    assert compat.next_version(logger) == 0
    (tmp_path / "name" / "version_4").mkdir(parents=True)
    assert compat.next_version(logger) == 5


def test_a_bar_is_closed_if_it_was_drawn():
    bar = TQDMProgressBar()
    compat.close_bar(bar)
    bar.train_progress_bar = drawn = bar.init_train_tqdm()
    drawn.disable = False
    compat.close_bar(bar)
    assert drawn.disable


@pytest.mark.parametrize("decorator", [rank_zero_only, fabric_rank_zero_only])
def test_both_decorators_run_on_the_rank_that_is_set(monkeypatch, decorator):
    for each in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(each, "rank", 0, raising=False)
    called = []
    only = decorator(called.append)
    compat.set_rank_zero(1)
    only("other rank")
    compat.set_rank_zero(0)
    only("rank 0")
    assert called == ["rank 0"]


def test_attributes_that_our_subclasses_inherit_exist(tmp_path):
    logger = TensorBoardLogger(str(tmp_path), version=3)
    assert (logger.version, logger._version, logger._experiment) == (3, 3, None)
    strategy = DDPStrategy(timeout=timedelta(seconds=7), process_group_backend="gloo")
    assert strategy._timeout == timedelta(seconds=7)
    assert strategy._process_group_backend == strategy.process_group_backend == "gloo"
