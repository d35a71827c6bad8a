import types

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from datamask_pl.callbacks import progress
from datamask_pl.callbacks.progress import MaskProgressBar, RunSummary
from datamask_pl.distributed.world import World, set_world


def test_the_bar_is_drawn_ten_times_a_second_at_most_and_when_it_is_full(monkeypatch):
    """Drawing it takes longer than a small step."""
    now, drawn = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(TQDMProgressBar, "on_train_batch_end", lambda *args: drawn.append(args[-1]))
    monkeypatch.setattr(MaskProgressBar, "total_train_batches", 200)
    bar = MaskProgressBar()
    for step in range(200):
        bar.on_train_batch_end(types.SimpleNamespace(), types.SimpleNamespace(), None, None, step)
        now[0] += 0.015625
    assert drawn == [*range(0, 200, 7), 199]


@pytest.fixture
def stand():
    """Sets this process's place, for the test alone."""
    yield lambda rank, group, num_groups=2: set_world(World(rank, 6, group, num_groups))
    set_world(World())


@pytest.mark.parametrize(
    ("rank", "num_groups", "said"),
    [
        (0, 1, "1,500 samples in 2 blocks of 7 in all, 3 processes on cpu\n"),
        (0, 2, "7 blocks for 2 groups of 3, 6 processes on cpu\n"),
        (1, 2, ""),
    ],
)
def test_rank_0_alone_says_what_is_about_to_be_done(stand, capsys, rank, num_groups, said):
    stand(rank, 0, num_groups)
    source = types.SimpleNamespace(block_sizes=[1000, 500], num_blocks=7)
    trainer = types.SimpleNamespace(datamodule=source, callbacks=[], world_size=3)
    RunSummary().on_train_start(trainer, types.SimpleNamespace(device=torch.device("cpu")))
    assert capsys.readouterr().out == said


def test_the_bars_of_other_groups_are_off(stand, monkeypatch):
    monkeypatch.setattr(TQDMProgressBar, "setup", lambda *_: None)
    is_off = []
    for group in (0, 1):
        stand(3 * group, group)
        bar = MaskProgressBar()
        bar.setup(None, None, "fit")
        is_off.append(bar.is_disabled)
    assert is_off == [False, True]


def test_an_error_before_the_first_block_finds_no_bar_to_end():
    MaskProgressBar().on_exception(None, None, None)


@pytest.mark.parametrize("lacking", [None, "matplotlib", "jinja2"])
def test_the_report_is_named_with_what_it_needs_to_be_installed(monkeypatch, lacking):
    monkeypatch.setattr(progress, "find_spec", lambda name: None if name == lacking else name)
    install = "" if lacking is None else "pip install 'datamask_pl[report]' && "
    assert progress.report_command("runs/x") == f"{install}python cli.py report --run runs/x"
