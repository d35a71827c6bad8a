"""A run that is killed, at whatever moment, and resumed is a run that was never stopped.

lightning #19815: resume repeats or skips a batch. lightning #11979: the last steps are lost. lightning #19970: a
cut-off checkpoint or output.
"""

import json
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamask_pl.callbacks.checkpoint import AtomicCheckpointIO
from datamask_pl.cli import main
from datamask_pl.io.checkpoints import STATE_KEY, list_checkpoints, parse_name, read_checkpoint
from tests.support.fits import (
    QUIET,
    assert_same_mask,
    files_below,
    fit,
    manifest,
    parts,
    run_folder,
    start,
    write_shards,
)

ROLLOUTS = ("--model.num_rollouts", "4", "--model.num_steps", "5")
SETTINGS = {
    "multilinear": ("--model.num_steps", "5"),
    "group_relative": ("--model.estimator", "group_relative", *ROLLOUTS, "--data.partial", "0.3"),
    "leave_one_out, best rollout": ("--model.estimator", "leave_one_out", *ROLLOUTS, "--data.partial", "1"),
    "patience": ("--model.num_steps", "30", "--model.patience", "2", "--model.max_lr", "4"),
    "quality first": ("--model.num_steps", "5", "--model.init", "quality", "--model.diversity", "disf"),
}


@pytest.fixture
def blocks(workplace):
    """Arguments for three blocks of 40 rows."""
    path = write_shards(workplace / "shards", [70, 50])
    return ("--data.path", path, "--data.block_size", "40", "--model.select_ratio", "0.2", "--data.seed", "7")


class Disk:
    """What a process that is killed leaves behind: copies of the run's folder around every checkpoint."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.copies = []
        save = AtomicCheckpointIO.save_checkpoint

        def save_between_copies(io, checkpoint, path, storage_options=None):
            self._copy(f"before {path.name}")
            save(io, checkpoint, path, storage_options)
            self._copy(f"after {path.name}")

        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_between_copies)

    def _copy(self, name):
        # a settled block is saved after its last step, and under the same name once its mask is written
        name = f"{len(self.copies):02} {name}"
        shutil.copytree(run_folder(), self.folder / name)
        self.copies.append(name)


@pytest.mark.parametrize("every", [9, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_killed_beside_any_checkpoint_resumes_as_if_it_had_not_been(
    blocks, workplace, monkeypatch, setting, every
):
    """At the last step of a block, and beside each so many-th checkpoint."""
    args = (*blocks, *SETTINGS[setting])
    with monkeypatch.context() as patch:
        disk = Disk(workplace / "disk", patch)
        fit(*args, "--checkpoint.every_n_steps", "1")
    undisturbed = run_folder().rename(workplace / "undisturbed")
    if setting != "patience":
        assert len(disk.copies) == 2 * 3 * 5
    resumable = [name for name in disk.copies if list((disk.folder / name).glob("checkpoints/*.ckpt"))]
    for name in [name for index, name in enumerate(resumable) if index % every == 0 or "step-000005" in name]:
        shutil.rmtree(run_folder(), ignore_errors=True)
        shutil.copytree(disk.folder / name, run_folder())
        fit(*args, "--run_name", "version_0")
        assert_same_mask(run_folder(), undisturbed, num_parts=3)
        expected, seen = manifest(undisturbed)["blocks"], manifest(run_folder())["blocks"]
        for block in (*expected.values(), *seen.values()):
            assert block.pop("seconds") > 0
        assert seen == expected, name


def kill_at(moment, *args, folder):
    """Runs until a checkpoint of the (block, step), or a later one, is there, then kills the process."""
    process = start(*args, "--checkpoint.every_n_steps", "1", folder=folder)
    try:
        deadline_s = time.monotonic() + 300
        while True:
            names = [path.stem.split("-") for path in (run_folder(folder) / "checkpoints").glob("block-*.ckpt")]
            if any((int(name[1]), int(name[3])) >= moment for name in names):
                break
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()


@pytest.mark.filterwarnings("ignore:all rollouts of a step:UserWarning")  # so many steps settle so few rows
@pytest.mark.parametrize(
    ("setting", "moments"),
    [
        pytest.param("multilinear", [(0, 3), (1, 20), (2, 30)], marks=pytest.mark.slow),
        ("group_relative", [(1, 1)]),
        pytest.param("patience", [(1, 2)], marks=pytest.mark.slow),
    ],
)
def test_a_process_killed_by_the_system_and_resumed_is_one_that_was_not(blocks, workplace, setting, moments):
    slow = () if setting == "patience" else ("--model.num_steps", "60")
    args = (*blocks, *SETTINGS[setting], *slow)
    fit(*args, "--mask.output", "undisturbed", "--trainer.logger", "false", "--trainer.default_root_dir", "other")
    for moment in moments:
        kill_at(moment, *args, "--run_name", "version_0", folder=workplace)
    fit(*args, "--run_name", "version_0")
    assert_same_mask(run_folder(), workplace / "undisturbed", num_parts=3)


class TestStoppingWithinABlock:
    """What Lightning takes for the end of an epoch is not the end of a block."""

    @pytest.mark.parametrize("estimator", ["multilinear", "group_relative"])
    @pytest.mark.parametrize("num_steps", [3, 5, 8])
    def test_max_steps(self, blocks, workplace, capsys, estimator, num_steps):
        args = (*blocks, *SETTINGS[estimator])
        fit(*args)
        capsys.readouterr()
        fit(*args, "--trainer.max_steps", str(num_steps))
        assert len(parts(run_folder(version=1))) == num_steps // 5
        assert f"({num_steps // 5} of 3 parts so far)" in (out := capsys.readouterr().out)
        assert "rerun the same command with --run_name version_1 to continue" in out
        fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)

    def test_a_callback_that_stops_the_run(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        callback = {"class_path": "tests.support.callbacks.StopsAfter", "init_args": {"num_steps": 8}}
        fit(*args, "--trainer.callbacks+", json.dumps(callback))
        assert len(parts(run_folder(version=1))) == 1
        fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)

    @pytest.mark.parametrize("stopped_by", ["max_steps", "a callback", "nothing"])
    def test_the_last_step_is_saved_though_the_interval_is_longer(self, blocks, stopped_by):
        """lightning #11979: the mask, too, is of the step that the checkpoint is of."""
        callback = {"class_path": "tests.support.callbacks.StopsAfter", "init_args": {"num_steps": 4}}
        stop = {
            "max_steps": ("--trainer.max_steps", "4"),
            "a callback": ("--trainer.callbacks+", json.dumps(callback)),
            "nothing": (),
        }[stopped_by]
        fit(*blocks, "--model.num_steps", "9", "--checkpoint.every_n_steps", "100", "--checkpoint.keep", "9", *stop)
        found = list_checkpoints(run_folder() / "checkpoints")
        expected = [(0, 9), (1, 9), (2, 9)] if stopped_by == "nothing" else [(0, 4)]
        assert [parse_name(path) for path in found] == expected
        assert [read_checkpoint(path)[STATE_KEY]["block"]["num_steps"] for path in found] == [
            step for _, step in expected
        ]
        done = manifest(run_folder())["blocks"]
        assert [block["num_steps"] for block in done.values()] == [9] * (3 * (stopped_by == "nothing"))


class TestResuming:
    def test_it_goes_on_in_the_folder_of_the_run_and_in_its_log(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args, "--trainer.max_steps", "8")
        fit(*args, "--ckpt_path", "last")
        assert sorted(path.name for path in Path("runs/datamask").iterdir()) == ["version_0"]
        events = EventAccumulator(str(run_folder())).Reload()
        assert [event.step for event in events.Scalars("objective/f")] == list(range(1, 16))

    def test_the_same_command_with_the_runs_name_goes_on(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        named = (*args, "--run_name", "mine", "--trainer.max_steps", "4")
        for num_parts in (0, 1, 2, 3):
            fit(*named)
            assert len(parts(run_folder().with_name("mine"))) == num_parts
        assert_same_mask(run_folder().with_name("mine"), run_folder(), num_parts=3)
        assert sorted(path.name for path in Path("runs/datamask").iterdir()) == ["mine", "version_0"]

    @pytest.mark.parametrize("name", ["4711", "version_3", "a name with blanks", "-1.5e3", "{a: 1}"])
    def test_any_name_of_a_folder_is_a_name(self, blocks, capsys, name):
        args = (*blocks, "--model.num_steps", "2", "--trainer.max_steps", "3")
        fit(*args, f"--run_name={name}")
        assert len(parts(run_folder().with_name(name))) == 1
        fit(*args, "--ckpt_path", str(run_folder().with_name(name)))
        assert len(parts(run_folder().with_name(name))) == 3
        fit(*args, f"--run_name={name}")
        assert [path.name for path in Path("runs/datamask").iterdir()] == [name]
        assert f"--run_name {shlex.quote(name)} to continue" in capsys.readouterr().out

    def test_last_is_the_newest_run_and_a_path_is_any(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        fit(*args, "--trainer.max_steps", "8")
        fit(*args, "--trainer.max_steps", "2")
        fit(*args, "--ckpt_path", "last")
        assert [len(parts(run_folder(version=version))) for version in (0, 1, 2)] == [3, 1, 3]
        fit(*args, "--ckpt_path", str(run_folder(version=1)))
        for version in (1, 2):
            assert_same_mask(run_folder(version=version), run_folder(), num_parts=3)

    def test_a_checkpoint_that_is_named_is_the_one_to_go_on_from(self, blocks, capsys):
        args = (*blocks, "--model.num_steps", "5", "--checkpoint.every_n_steps", "1", "--checkpoint.keep", "9")
        fit(*args)
        fit(*args, "--trainer.max_steps", "8")
        fit(*args, "--ckpt_path", str(run_folder(version=1) / "checkpoints/block-00001-step-000001.ckpt"))
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)
        events = EventAccumulator(str(run_folder(version=1))).Reload()
        # Steps that were done twice, the second and third of block 1, are shown as the newer run saw them.
        steps = [event.step for event in events.Scalars("objective/f")]
        assert sorted(set(steps)) == list(range(1, 16))

    def test_a_folder_without_a_run_begins_one_there(self, blocks, workplace):
        args = (*blocks, "--model.num_steps", "2")
        fit(*args)
        (workplace / "here/name/mine").mkdir(parents=True)
        fit(*args, "--ckpt_path", "here/name/mine")
        assert_same_mask(workplace / "here/name/mine", run_folder(), num_parts=3)

    @pytest.mark.parametrize("block", [0, 1, 2])
    @pytest.mark.parametrize("what", ["gone", "cut off", "empty"])
    def test_a_part_that_is_gone_or_damaged_is_learned_again_and_no_other(self, blocks, block, what):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        fit(*args)
        mask = run_folder(version=1) / "mask"
        path = mask / f"part-0000{block}.parquet"
        others = {other: other.stat().st_mtime_ns for other in mask.glob("*.parquet") if other != path}
        if what == "gone":
            path.unlink()
            fit(*args, "--run_name", "version_1")
        else:
            path.write_bytes(path.read_bytes()[:-10] if what == "cut off" else b"")
            with pytest.warns(UserWarning, match=f"{path.name} is damaged .*; its block is learned again"):
                fit(*args, "--run_name", "version_1")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)
        assert {other: other.stat().st_mtime_ns for other in others} == others

    @pytest.mark.parametrize("what", ["gone", "not brought up to date"])
    def test_a_manifest_that_is_gone_or_was_not_written_any_more_is_made_whole(self, blocks, what):
        """A run that is killed after its last part, and before the manifest, has nothing left to learn."""
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        whole = manifest(run_folder())
        path = run_folder() / "mask/_manifest.json"
        if what == "gone":
            path.unlink()
        else:
            path.write_text(json.dumps({**whole, "blocks": {"0": whole["blocks"]["0"]}}))
        fit(*args, "--run_name", "version_0")
        after = manifest(run_folder())
        assert after["blocks"] == whole["blocks"]
        assert after["num_blocks"] == 3

    def test_a_run_without_a_logger_goes_on_in_its_root_folder(self, blocks, workplace):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        rootless = (*args, "--trainer.logger", "false", "--trainer.default_root_dir", "root")
        fit(*rootless, "--trainer.max_steps", "8")
        assert len(parts(workplace / "root")) == 1
        fit(*rootless)
        assert_same_mask(workplace / "root", run_folder(), num_parts=3)

    def test_checkpoints_of_a_mask_written_elsewhere_are_in_the_runs_folder(self, blocks, workplace):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        elsewhere = (*args, "--mask.output", "mask", "--run_name", "mine")
        fit(*elsewhere, "--trainer.max_steps", "8")
        fit(*elsewhere)
        assert_same_mask(workplace / "mask", run_folder(), num_parts=3)

    def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(self, blocks):
        args = (*blocks, "--model.num_steps", "5", "--checkpoint.every_n_steps", "1")
        fit(*args)
        fit(*args, "--trainer.max_steps", "8")
        newest = run_folder(version=1) / "checkpoints/block-00001-step-000003.ckpt"
        newest.write_bytes(newest.read_bytes()[:2000])
        with pytest.warns(UserWarning, match="block-00001-step-000003.ckpt is damaged.*Falling back to the one before"):
            fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)

    def test_a_finished_run_has_nothing_left_to_do_and_says_so(self, blocks, workplace, capsys):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        before = files_below(workplace)
        capsys.readouterr()
        fit(*args, "--ckpt_path", "last")
        assert "nothing was left to do" in capsys.readouterr().out
        assert files_below(workplace) == before

    def test_more_blocks_than_max_epochs_can_be_had_later(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        fit(*args, "--trainer.max_epochs", "1")
        assert len(parts(run_folder(version=1))) == 1
        fit(*args, "--trainer.max_epochs", "1", "--ckpt_path", "last")
        assert len(parts(run_folder(version=1))) == 2
        fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)

    def test_an_objective_of_the_users_own_with_parts_of_its_own_is_recognised(self, blocks, workplace):
        """An object that is part of an objective prints as another address in every process."""
        args = (*blocks, *SETTINGS["group_relative"], "--model.diversity", "tests.support.objectives.EvenRows")
        args += ("--model.num_rollouts", "32")  # few rollouts may well keep equally many even rows
        fit(*args)
        fit(*args, "--trainer.max_steps", "8")
        fit(*args, "--ckpt_path", "last")
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)

    def test_the_interval_of_checkpoints_and_log_may_change(self, blocks):
        args = (*blocks, "--model.num_steps", "5")
        fit(*args)
        fit(*args, "--trainer.max_steps", "8")
        main(
            ["fit", *QUIET, *args, "--ckpt_path", "last", "--checkpoint.keep", "1", "--trainer.log_every_n_steps", "3"]
        )
        assert_same_mask(run_folder(version=1), run_folder(), num_parts=3)
        assert len(list((run_folder(version=1) / "checkpoints").iterdir())) == 1
