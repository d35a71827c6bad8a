from threading import Event

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from datamask_pl.callbacks import logger as module
from datamask_pl.callbacks.logger import RunLogger


def test_nothing_is_written_before_there_is_something_to_log(tmp_path):
    logger = RunLogger(save_dir=str(tmp_path / "runs"))
    logger.log_hyperparams({"a": 1})
    logger.experiment.flush()
    logger.save()
    logger.finalize("failed")
    assert not (tmp_path / "runs").exists()


def test_what_is_logged_is_in_the_events(tmp_path):
    logger = RunLogger(save_dir=str(tmp_path), name="mine", version="v")
    logger.log_metrics({"objective/f": 1.5}, step=3)
    logger.save()
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "mine/v")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("objective/f")] == [(3, 1.5)]
    assert [path.name.split(".")[0] for path in (tmp_path / "mine/v").iterdir()] == ["events"]


def test_a_writer_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
    """Ctrl-C in the midst of a write left the writer's thread asleep for two minutes."""
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    never = Event()
    monkeypatch.setattr(TensorBoardLogger, "finalize", lambda *_: never.wait(60))
    logger = RunLogger(save_dir=str(tmp_path), name="mine", version="v")
    with pytest.warns(UserWarning, match="the last events were not written"):
        logger.finalize("failed")
    never.set()


def test_a_step_is_one_event_also_after_the_logger_was_closed(tmp_path):
    logger = RunLogger(save_dir=str(tmp_path), name="mine", version="v")
    logger.log_metrics({"a": 1.0, "b": 2.0}, step=0)
    logger.log_metrics({"a": 3.0, "b": 4.0}, step=1)
    logger.finalize("success")
    logger.log_metrics({"a": 5.0, "b": 6.0}, step=2)
    logger.log_metrics({"a": 7.0, "b": 8.0}, step=3)
    logger.finalize("success")
    found = {}
    files = sorted((tmp_path / "mine/v").iterdir())
    for path in files:
        for event in EventFileLoader(str(path)).Load():
            if event.step or event.summary.value:
                found.setdefault(event.step, []).append({v.tag: v.tensor.float_val[0] for v in event.summary.value})
    assert found[0] == [{"a": 1.0, "b": 2.0}]
    assert found[1] == [{"a": 3.0, "b": 4.0}]
    assert {key: number for event in found[2] for key, number in event.items()} == {"a": 5.0, "b": 6.0}
    assert found[3] == [{"a": 7.0, "b": 8.0}]


def test_every_run_has_a_folder_of_its_own(tmp_path):
    for version in range(3):
        logger = RunLogger(save_dir=str(tmp_path))
        assert logger.log_dir == str(tmp_path / "datamask" / f"version_{version}")
        logger.log_metrics({"f": 1.0}, step=0)
        logger.finalize("success")


def test_a_name_of_digits_is_a_name(tmp_path):
    assert RunLogger(save_dir=str(tmp_path), version=7).log_dir == str(tmp_path / "datamask/version_7")
    assert RunLogger(save_dir=str(tmp_path), run_name="7").log_dir == str(tmp_path / "datamask/7")
