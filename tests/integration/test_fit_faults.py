"""A run whose disk fails says what failed, and the same command ends with the mask of a run that was not disturbed."""

import resource
import warnings

import pytest

from datamask_pl.callbacks.logger import RunLogger
from tests.support.faults import WRITE_FAULTS, lift_limit, limit, read_fault, write_fault
from tests.support.fits import assert_same_mask, fit, run_folder, write_shards


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Arguments of a run of two blocks, and its mask."""
    folder = tmp_path_factory.mktemp("undisturbed")
    args = ("--data.path", write_shards(folder / "shards", [80]), "--data.block_size", "40", "--model.num_steps", "3")
    fit(*args, "--trainer.logger", "false", "--trainer.default_root_dir", str(folder / "run"))
    return args, folder / "run"


@pytest.mark.parametrize(
    ("name", "point", "number"),
    [
        *(("config.yaml", *fault) for fault in WRITE_FAULTS.values()),
        ("_manifest.json", "rename", 5),
        ("part-00001.parquet", "bytes 100", 27),
        ("part-00000.parquet", "renamed", 5),
        ("block-00001-step-000002.ckpt", "sync", 28),
        ("block-00000-step-000003.ckpt", "create", 30),
    ],
)
def test_a_failed_write_ends_the_run_and_the_same_command_goes_on(workplace, undisturbed, capsys, name, point, number):
    args, mask = undisturbed
    with write_fault(point, name, number), pytest.raises(SystemExit) as ended:
        fit(*args, "--run_name", "mine")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert " cannot be written: " in lines[-1]
    assert name in lines[-1] or point == "mkdir"  # which folder is made first is another matter
    fit(*args, "--run_name", "mine")
    assert_same_mask(run_folder().with_name("mine"), mask, num_parts=2)
    assert not list(run_folder().with_name("mine").rglob("*.tmp"))


@pytest.mark.parametrize(("name", "bad"), [("shard-0.parquet", "footer"), ("shard-0.parquet", "data")])
def test_a_shard_that_cannot_be_read_ends_the_run_before_anything_is_written(workplace, undisturbed, capsys, name, bad):
    with read_fault(name, bad), pytest.raises(SystemExit) as ended:
        fit(*undisturbed[0])
    assert ended.value.code == 2
    assert f"{name} cannot be read: " in (err := capsys.readouterr().err)
    assert "Input/output error" in err
    assert list(workplace.iterdir()) == []


CONFIGS = {
    "by an option": ("model: {num_steps: 3}", ("--config", "mine.yaml"), {}),
    "by one with =": ("model: {num_steps: 3}", ("--config=mine.yaml",), {}),
    "after another": ("model: {num_steps: 3}", ("--config", "whole.yaml", "--config", "mine.yaml"), {}),
    "for a part": ("{num_steps: 3}", ("--model", "mine.yaml"), {}),
    "by a variable": ("model: {num_steps: 3}", (), {"DATAMASK_FIT__CONFIG": "mine.yaml"}),
}


@pytest.mark.parametrize("given", CONFIGS)
def test_a_config_that_cannot_be_read_is_named(workplace, undisturbed, capsys, monkeypatch, given):
    content, options, variables = CONFIGS[given]
    (workplace / "whole.yaml").write_text("model: {num_steps: 3}\n")
    (workplace / "mine.yaml").write_text(content)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with read_fault("mine.yaml"), pytest.raises(SystemExit) as ended:
        fit(*options, *undisturbed[0])
    assert ended.value.code == 1
    said = "error: config mine.yaml cannot be read: Input/output error; run the same command again.\n"
    assert capsys.readouterr().err == said
    (workplace / "mine.yaml").write_bytes(b"model: \xff")
    with pytest.raises(SystemExit) as ended:
        fit(*options, *undisturbed[0])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: mine.yaml is not text ('utf-8' codec can't decode byte 0xff in ")
    assert sorted(path.name for path in workplace.iterdir()) == ["mine.yaml", "whole.yaml"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
@pytest.mark.parametrize("num_bytes", [0, 30, 10**8])
def test_events_that_cannot_be_written_are_said_once_and_end_no_run(workplace, undisturbed, monkeypatch, num_bytes):
    args, mask = undisturbed
    log = RunLogger.log_metrics

    def log_on_a_full_disk(logger, metrics, step=None):
        limit(num_bytes)
        try:
            log(logger, metrics, step)
            logger.save()
        finally:
            lift_limit()

    monkeypatch.setattr(RunLogger, "log_metrics", log_on_a_full_disk)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(*args, "--run_name", "mine")
    said = [str(warning.message) for warning in seen if "events cannot be written" in str(warning.message)]
    assert len(said) == (num_bytes < 10**8)
    assert all("(File too large); the run continues without them" in text for text in said)
    assert_same_mask(run_folder().with_name("mine"), mask, num_parts=2)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.getrlimit(resource.RLIMIT_FSIZE)[1]
