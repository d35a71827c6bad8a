from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamask_pl.run_logger import RunLogger


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


def test_every_run_has_a_folder_of_its_own(tmp_path):
    for version in range(3):
        logger = RunLogger(save_dir=str(tmp_path))
        assert logger.log_dir == str(tmp_path / "datamask" / f"version_{version}")
        logger.log_metrics({"f": 1.0}, step=0)
        logger.finalize("success")


def test_a_name_of_digits_is_a_name(tmp_path):
    assert RunLogger(save_dir=str(tmp_path), version=7).log_dir == str(tmp_path / "datamask/version_7")
    assert RunLogger(save_dir=str(tmp_path), run_name="7").log_dir == str(tmp_path / "datamask/7")
