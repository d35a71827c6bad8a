"""What a run shows in TensorBoard, asked of TensorBoard itself, and that showing it never ends a run."""

import gc
import json
import re
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from datamask_pl.callbacks import figures as module
from datamask_pl.callbacks.figures import MAX_BLOCKS, RunFigures, add_histogram
from datamask_pl.data.types import Block
from datamask_pl.errors import DatamaskWarning
from tests.support.fits import fit, fit_with_pictures, manifest, parts, run_folder, write_shards

OPTIONS = ("--data.block_size", "60", "--model.select_ratio", "0.2", "--model.num_steps", "3")
PICTURES = ["figures/inclusion_probability", "figures/quality"]


@pytest.fixture
def shards(workplace):
    return write_shards(workplace / "shards", [60, 40])


def events_of(run):
    return EventAccumulator(str(run), size_guidance={"images": 0, "histograms": 0}).Reload()


class Server:
    """A real TensorBoard over a folder, on a port that the system chose."""

    def __init__(self, folder):
        command = [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            str(folder),
            "--port",
            "0",
            "--load_fast=false",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"TensorBoard .* at (http://\S+)", line):
                self.address = found[1].rstrip("/")
                return
        raise AssertionError("".join(lines))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=300)

    def get(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/data/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    def wait_for(self, path):
        """The answer, once what was logged has been loaded."""
        deadline = time.monotonic() + 300
        while not (answer := self.get(path)):
            assert time.monotonic() < deadline, f"{path} stays empty"
            time.sleep(0.2)
        return answer


def test_tensorboard_shows_scalars_pictures_histograms_layout_and_options_of_one_run(shards, workplace):
    pytest.importorskip("matplotlib")
    fit_with_pictures("--data.path", shards, *OPTIONS)
    with Server(workplace / "runs") as server:
        (run,) = server.wait_for("runs")
        assert run == "datamask/version_0"
        scalars = server.wait_for("plugin/scalars/tags")[run]
        assert {"objective/f", "objective/quality", "policy/churn", "result/f"} <= set(scalars)
        assert sorted(server.get("plugin/images/tags")[run]) == PICTURES
        assert sorted(server.get("plugin/histograms/tags")[run]) == ["policy/inclusion_probability", "policy/logits"]
        charts = {
            chart["title"]: chart["multiline"]["tag"]
            for category in server.get("plugin/custom_scalars/layout")["category"]
            for chart in category["chart"]
        }
        assert {"f", "quality", "facility_location", "what still moves"} <= set(charts)
        for title, patterns in charts.items():
            assert any(re.match(pattern, tag) for pattern in patterns for tag in scalars), title
        experiment = server.get("plugin/hparams/experiment", {"experimentName": ""})
        assert {"model.select_ratio", "model.num_steps", "objective"} <= {
            option["name"] for option in experiment["hparamInfos"]
        }
        assert {metric["name"]["tag"] for metric in experiment["metricInfos"]} >= {"result/f", "result/quality"}


def test_the_result_beside_the_options_is_that_of_the_manifest(shards):
    fit("--data.path", shards, *OPTIONS)
    events = events_of(run_folder())
    blocks = manifest(run_folder())["blocks"].values()
    (result,) = events.Scalars("result/f")
    assert result.value == pytest.approx(np.mean([block["mask"]["f"] for block in blocks]), rel=1e-6)


def test_histograms_are_of_the_logits_and_probabilities_of_the_mask(shards):
    fit("--data.path", shards, *OPTIONS)
    events = events_of(run_folder())
    assert [event.step for event in events.Histograms("policy/logits")] == [1, 3, 4, 6]
    assert [event.step for event in events.Histograms("policy/inclusion_probability")] == [3, 6]
    for part, name, column, index in (
        (1, "policy/logits", "logit", 3),
        (0, "policy/inclusion_probability", "probability", 0),
    ):
        values_N = parts(run_folder())[part][column].to_numpy().astype(float)
        seen = events.Histograms(name)[index].histogram_value
        assert (seen.num, seen.min, seen.max) == (50, values_N.min(), values_N.max())
        assert seen.sum == pytest.approx(values_N.sum())
        assert seen.sum_squares == pytest.approx((values_N**2).sum())
        assert sum(seen.bucket) == 50


def test_a_block_that_was_shown_is_not_held(shards):
    """Drawing leaves cycles; with a million samples each, blocks that wait for the collector fill the memory."""
    gc.collect()
    gc.disable()
    try:
        others = _blocks()  # of other tests in this process
        fit_with_pictures("--data.path", shards, *OPTIONS, "--data.block_size", "20")
        held = [block for block in _blocks() if not any(block is other for other in others)]
    finally:
        gc.enable()
    assert len(held) <= 1


def _blocks() -> list[Block]:
    return [item for item in gc.get_objects() if type(item) is Block]


def test_a_run_without_matplotlib_has_all_but_the_pictures_and_says_so_once(shards, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.warns(DatamaskWarning, match="TensorBoard gets no pictures without matplotlib") as seen:
        fit("--data.path", shards, *OPTIONS)
    assert len(seen) == 1
    tags = events_of(run_folder()).Tags()
    assert tags["images"] == []
    assert sorted(tags["histograms"]) == ["policy/inclusion_probability", "policy/logits"]
    assert "result/f" in tags["scalars"]


def test_what_goes_wrong_with_a_picture_is_said_once_and_ends_nothing(shards, monkeypatch):
    """Pytorch #31855: a histogram of NaN raises. Logging never ends a run."""

    def fail(*_, **__):
        raise RuntimeError("no ink")

    monkeypatch.setattr(module, "histogram", fail)
    monkeypatch.setattr(SummaryWriter, "add_custom_scalars", fail)
    with pytest.warns(DatamaskWarning, match="no ink") as seen:
        fit("--data.path", shards, *OPTIONS)
    assert len(seen) == 1
    assert len(manifest(run_folder())["blocks"]) == 2


@pytest.mark.parametrize("logger", ["false", "lightning.pytorch.loggers.CSVLogger"])
def test_a_run_with_another_logger_or_none_has_no_figures_and_no_fault(shards, workplace, logger):
    extra = () if logger == "false" else ("--trainer.logger.save_dir", "runs")
    fit("--data.path", shards, *OPTIONS, "--trainer.logger", logger, *extra, "--mask.output", "mask")
    assert len(manifest(workplace / "mask")["blocks"]) == 2


def test_a_run_with_nothing_left_to_do_adds_no_events(shards, workplace):
    for _ in range(2):
        fit("--data.path", shards, *OPTIONS, "--run_name", "one")
    assert len(list((workplace / "runs").rglob("events*"))) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_left_out_of_a_histogram(tmp_path, bad):
    writer = SummaryWriter(str(tmp_path))
    add_histogram(writer, "some", torch.tensor([bad, 1.0, 2.0]), step=1)
    add_histogram(writer, "none", torch.tensor([bad]), step=1)
    add_histogram(writer, "equal", torch.tensor([3.0, 3.0]), step=1)
    writer.close()
    events = events_of(tmp_path)
    assert events.Tags()["histograms"] == ["some", "equal"]
    assert events.Histograms("some")[0].histogram_value.num == 2
    assert sum(events.Histograms("equal")[0].histogram_value.bucket) == 2


@pytest.mark.parametrize("num_blocks", [1, MAX_BLOCKS, MAX_BLOCKS + 1, 15_000])
def test_of_many_blocks_some_are_shown_evenly_spread(num_blocks):
    trainer = SimpleNamespace(datamodule=SimpleNamespace(num_blocks=num_blocks))
    shown = [block for block in range(num_blocks) if module._is_shown(trainer, block)]
    assert shown[0] == 0
    assert min(num_blocks, MAX_BLOCKS // 2) <= len(shown) <= MAX_BLOCKS
    assert len(set(np.diff(shown))) <= 1


def test_only_rank_0_shows_anything(tmp_path):
    class Trainer:
        is_global_zero = False

        @property
        def loggers(self):
            raise AssertionError("asked for loggers")

    RunFigures()._guard(Trainer(), lambda writer: writer)
