"""A run that was shortened never counts as finished, and an option that does nothing is refused."""

import json
from pathlib import Path

import pytest

from tests.support.fits import fit, manifest, run_folder, write_shards


@pytest.fixture
def args(workplace):
    return ("--data.path", write_shards(workplace / "data", [40]), "--model.num_steps", "4", "--run_name", "one")


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (("--trainer.limit_train_batches", "3"), "trainer.limit_train_batches 3 is not supported"),
        (("--trainer.limit_train_batches", "1"), "trainer.limit_train_batches 1 is not supported"),
        (("--trainer.limit_train_batches", "0"), "trainer.limit_train_batches 0 is not supported"),
        (("--trainer.limit_train_batches", "0.5"), "trainer.limit_train_batches 0.5 is not supported"),
        (("--trainer.overfit_batches", "3"), "trainer.overfit_batches 3 is not supported"),
        (("--trainer.max_epochs", "0"), "trainer.max_epochs allows no work"),
        (("--trainer.max_steps", "0"), "trainer.max_steps allows no work"),
        (("--trainer.max_time", "00:00:00:00"), "trainer.max_time allows no work"),
        (("--trainer.gradient_clip_val", "1.0"), "trainer.gradient_clip_val 1.0 is not supported"),
        (("--trainer.accumulate_grad_batches", "2"), "trainer.accumulate_grad_batches 2 is not supported"),
        (("--trainer.default_root_dir", "here"), "trainer.default_root_dir has no effect"),
    ],
)
def test_an_option_that_would_shorten_a_block_or_do_nothing_is_refused_before_work(args, capsys, options, needed):
    with pytest.raises(SystemExit) as ended:
        fit(*args, *options)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert needed in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    assert not Path("here").exists()


def test_max_time_that_leaves_blocks_ends_with_code_75_and_is_continued(args, capsys, monkeypatch):
    from lightning.pytorch.callbacks import Timer

    ended = Timer.on_train_batch_end
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, *_: 2.0 * getattr(self, "seen", 0))

    def count(self, *args, **kwargs):
        self.seen = getattr(self, "seen", 0) + 1
        return ended(self, *args, **kwargs)

    monkeypatch.setattr(Timer, "on_train_batch_end", count)
    with pytest.raises(SystemExit) as stopped:
        fit(*args, "--trainer.max_time", "00:00:00:03")
    assert stopped.value.code == 75
    assert "stopped: trainer.max_time ended the run before its last block was finished" in capsys.readouterr().err
    fit(*args)
    assert list(manifest("runs/datamask/one")["blocks"]) == ["0"]


def test_the_learning_rate_can_be_watched(args, workplace):
    monitor = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    fit(*args[:-2], "--trainer.callbacks+", json.dumps(monitor))
    assert (run_folder() / "mask/part-00000.parquet").exists()
