"""The mask does not depend on the number of processes. LESS #33: the result depends on the number of devices."""

import sys
from dataclasses import dataclass

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from datamask_pl.data.module import FeatureDataModule
from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.learner.module import MaskLearner
from tests.support.fits import assert_same_mask, fit, manifest, parts, run, run_folder, write_shards
from tests.support.forked_ranks import launch
from tests.support.ranks import on

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
DIVERSITIES = ("facility_location", "pairwise", "disf")
# Chunks of rollouts and slices of rows that two and four processes share unevenly, and one that not all get a part of.
MULTILINEAR = ("--model.num_steps", "5", "--data.partial", "0.15")
ROLLOUTS = ("--model.num_rollouts", "20", "--model.num_steps", "4", "--data.partial", "0.3")
FITS = {
    **{f"multilinear-{name}": (*MULTILINEAR, "--model.diversity", name) for name in DIVERSITIES},
    **{
        f"{estimator}-{name}": ("--model.estimator", estimator, *ROLLOUTS, "--model.diversity", name)
        for estimator in ("group_relative", "leave_one_out")
        for name in DIVERSITIES
    },
    "multilinear-list": (*MULTILINEAR, "--config", "list.yaml"),
    "group_relative-list": ("--model.estimator", "group_relative", *ROLLOUTS, "--config", "list.yaml"),
    "one-slice": ("--model.num_steps", "4", "--model.patience", "2", "--model.init", "quality"),
    "one-chunk": ("--model.estimator", "leave_one_out", *ROLLOUTS, "--model.num_rollouts", "2", "--data.partial", "1"),
}
LIST = [
    {"objective": "facility_location", "weight": 2.0},
    {"objective": {"class_path": "datamask_pl.objectives.DiSF", "init_args": {"standardize": True}}},
    {"objective": "pairwise", "weight": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with shards and the masks of every fit by one process, which is this one."""
    folder = tmp_path_factory.mktemp("ranks")
    write_shards(folder / "shards", [130, 100])
    (folder / "list.yaml").write_text(yaml.safe_dump({"model": {"diversity": LIST}}))
    for name, args in FITS.items():
        fit(*BLOCKS, *args, *into(name, 1), folder=folder)
    return folder


# three blocks of 76 or 77 rows
BLOCKS = ("--data.path", "shards", "--data.block_size", "80", "--model.select_ratio", "0.2")


def into(name, num_ranks):
    return ("--trainer.logger.init_args.name", f"{name}-{num_ranks}")


def launch_blocks(num_ranks, fits, *, folder):
    out = launch(num_ranks, [(*BLOCKS, *args) for args in fits], folder=folder)
    assert out.count(f"{num_ranks} processes on cpu") == len(fits)


@pytest.fixture(scope="module")
def two(folder):
    """The folder, once two processes have run every fit, and have stopped one of each kind and resumed it."""
    fits = [(*args, *into(name, 2)) for name, args in FITS.items()]
    for name in ("multilinear-disf", "group_relative-facility_location"):
        stopped = (*FITS[name], *into(f"{name}-resumed", 2))
        fits += [(*stopped, "--trainer.max_steps", "7"), (*stopped, "--ckpt_path", "last")]
    launch_blocks(2, fits, folder=folder)
    return folder


class TestOneProcessAndMany:
    @pytest.mark.parametrize("name", FITS)
    def test_two_processes_give_the_mask_and_the_logits_of_one(self, two, name):
        mask = run_folder(two, name=f"{name}-2")
        assert_same_mask(mask, run_folder(two, name=f"{name}-1"), num_parts=3)
        blocks, others = (manifest(run_folder(two, name=f"{name}-{n}"))["blocks"].values() for n in (1, 2))
        for block, other in zip(blocks, others, strict=True):
            assert {**block, "seconds": 0} == {**other, "seconds": 0}

    @pytest.mark.parametrize("name", ["multilinear-disf", "group_relative-facility_location"])
    def test_a_resumed_run_on_two_processes_gives_the_mask_of_one(self, two, name):
        resumed = run_folder(two, name=f"{name}-resumed-2")
        assert_same_mask(resumed, run_folder(two, name=f"{name}-1"), num_parts=3)
        assert len(list(resumed.parent.iterdir())) == 1

    def test_a_run_that_two_processes_began_can_be_ended_by_one(self, two):
        name = "multilinear-pairwise"
        begun = (*FITS[name], *into(f"{name}-begun", 2))
        launch_blocks(2, [(*begun, "--trainer.max_steps", "7")], folder=two)
        fit(*BLOCKS, *begun, "--ckpt_path", "last", folder=two)
        mask = run_folder(two, name=f"{name}-begun-2")
        assert_same_mask(mask, run_folder(two, name=f"{name}-1"), num_parts=3)

    @pytest.mark.slow
    def test_four_processes_give_the_mask_and_the_logits_of_one(self, folder):
        names = ["multilinear-list", "one-chunk"]
        launch_blocks(4, [(*FITS[name], *into(name, 4)) for name in names], folder=folder)
        for name in names:
            mask = run_folder(folder, name=f"{name}-4")
            assert_same_mask(mask, run_folder(folder, name=f"{name}-1"), num_parts=3)


@pytest.mark.slow
class TestLaunchers:
    """The command lines of the documentation."""

    def test_lightning_starts_the_second_process(self, folder):
        name = "multilinear-facility_location"
        args = (*BLOCKS, *FITS[name], *into(name, "ddp"), *on(2))
        code, out, err = run(*args, folder=folder)
        assert code == 0, err
        assert "230 samples in 3 blocks, 2 processes on cpu" in out
        assert out.count("kept ") == 1
        mask = run_folder(folder, name=f"{name}-ddp")
        assert_same_mask(mask, run_folder(folder, name=f"{name}-1"), num_parts=3)

    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_torchrun_starts_the_processes(self, folder, num_ranks):
        name = "leave_one_out-facility_location"
        args = (*BLOCKS, *FITS[name], *into(name, f"torchrun-{num_ranks}"), *on(num_ranks))
        code, out, err = run(*args, folder=folder, launcher=(*TORCHRUN, str(num_ranks)))
        assert code == 0, err
        assert f"{num_ranks} processes on cpu" in out
        mask = run_folder(folder, name=f"{name}-torchrun-{num_ranks}")
        assert_same_mask(mask, run_folder(folder, name=f"{name}-1"), num_parts=3)

    def test_an_error_that_all_processes_meet_is_printed_once(self, folder):
        code, _, err = run(*BLOCKS, *on(2), "--model.select_ratio", "0.001", folder=folder)
        assert code == 2
        lines = [line for line in err.splitlines() if "error" in line]
        assert len(lines) == 1, err
        assert lines[0].startswith("error: select_ratio keeps 0 of ")
        assert "Traceback" not in err

    def test_all_processes_end_if_one_fails(self, folder):
        """lightning #11841: an exception on one rank leaves the others hanging."""
        name = "failing"
        args = (*BLOCKS, *FITS["group_relative-disf"], "--model.diversity", "tests.support.objectives.FailsOnRankOne")
        code, _, err = run(*args, *into(name, 2), *on(2), folder=folder, timeout_s=300)
        assert code != 0
        assert "the proxy model's GPU is gone" in err
        assert not parts(run_folder(folder, name=f"{name}-2"))


@dataclass(frozen=True)
class _Counting(RankGroup):
    """Notes how many numbers every sum over ranks moves."""

    numbers = []  # noqa: RUF012  # of the whole test

    def sum_(self, tensor):
        self.numbers.append(tensor.numel())
        return tensor


class _Steps(Callback):
    """What was moved within each step, without what a block's end moves."""

    def __init__(self):
        self.moved = []

    def on_train_batch_start(self, *_):
        _Counting.numbers.clear()

    def on_train_batch_end(self, *_):
        self.moved.append(list(_Counting.numbers))


@pytest.mark.parametrize("num_samples", [400, 4000])
def test_a_step_that_draws_masks_moves_as_many_numbers_as_its_part_has_samples_however_long_the_block(
    workplace, monkeypatch, num_samples
):
    from lightning.pytorch import Trainer

    monkeypatch.setattr(RankGroup, "current", classmethod(lambda _: _Counting()))
    learner = MaskLearner(estimator="group_relative", num_rollouts=12, num_steps=3, diversity="pairwise", polish=False)
    data = FeatureDataModule(path=write_shards("shards", [num_samples]), partial=40 / num_samples)
    steps = _Steps()
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[steps], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(learner, datamodule=data)
    # two terms and the linear part of 12 rewards, then two parts of the gradient of 40 logits, and the noise of one
    assert steps.moved == [[36, 80, 1]] * 3
    assert torch.isfinite(learner.policy.logits).all()
