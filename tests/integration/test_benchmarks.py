"""The benchmarks run, on small data, so that they do when they are wanted."""

import os
import sys

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.support.benchmarks import run
from tests.support.fits import ROOT
from tests.support.shards import make_table, write

sys.path.append(str(ROOT / "benchmarks"))

from curve import running_mean
from soak import Sample, family, look, report


@pytest.mark.slow
def test_the_cost_of_ranks_is_measured_and_their_bits_compared():
    lines = run("ranks.py", "--repeats", 1, "--scale", 0.002).splitlines()
    rows = [line for line in lines if line.startswith(("| multilinear", "| group_relative"))]
    assert len(rows) == 7
    assert all(line.endswith("same |") for line in rows)


@pytest.mark.slow
def test_rollouts_are_timed_and_their_noise_and_f_compared(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(300, dim=8, feature_type=pa.list_(pa.float16(), 8)))
    lines = run("rollouts.py", path, "--seconds", 0.5, "--steps", 10, "--repeats", 2).splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith(("| facility", "| pairwise", "| disf"))]
    assert [len(cells) for cells in rows] == [6] * 6 + [10] * 3
    assert all(float(cells[column]) > -1 for cells in rows[6:] for column in (1, 6, 9))  # f of each


@pytest.mark.slow
def test_limits_within_fit_are_measured_beside_limits_put_on_afterwards(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(300, dim=8, feature_type=pa.list_(pa.float16(), 8)))
    lines = run("constraints.py", path, "--threads", 1).splitlines()
    rows = [line.split() for line in lines if line.startswith(("facility", "pairwise", "disf"))]
    assert [row[2] for row in rows] == ["export", "fit,", "fit"] * 9
    f = [float(row[-6]) for row in rows]
    assert all(plain <= polished for plain, polished in zip(f[1::3], f[2::3], strict=True))


@pytest.mark.parametrize("window", [1, 2, 5, 40, 100])
def test_a_line_stays_where_it_is_when_it_is_smoothed(window):
    steps = np.arange(40)
    means = running_mean(steps, window)
    assert len(means) == max(41 - window, 1)
    np.testing.assert_allclose(running_mean(3.0 - 0.5 * steps, window), 3.0 - 0.5 * means, atol=1e-12)
    np.testing.assert_allclose(means[0], steps[:window].mean())


@pytest.mark.slow
def test_the_reward_of_a_run_is_drawn(tmp_path):
    writer = SummaryWriter(tmp_path / "run")
    for step in range(20):
        writer.add_scalar("objective/f", 0.1 * step, step)
        writer.add_scalar("objective/f_best", 0.2 * step, step)
    writer.close()
    run("curve.py", tmp_path / "run", tmp_path / "curve.svg", "--window", 5)
    assert (tmp_path / "curve.svg").read_text().count("<path") > 10


@pytest.mark.slow
class TestSchedules:
    def run(self, records, *options):
        few = ["--samples", 90, "--ratios", 0.1, "--weights", 0.3, "--rates", "2:0.2,4:1.5", "--threads", 1]
        return run("schedule.py", *few, "--records", records, *options)

    def test_every_schedule_has_a_number_for_every_data_set_and_term_with_and_without_exchanges(self, tmp_path):
        out = self.run(tmp_path / "records", "--steps", "2,8", "--terms", "pairwise,disf,facility_location")
        tables = [[line.split("|")[1:-1] for line in part.splitlines() if line.startswith("| ")]
                  for part in out.split("**polished**")]  # fmt: skip
        assert [len(rows) for rows in tables] == [5, 5]
        assert all(len(row) == 2 + 2 * 3 for rows in tables for row in rows)
        missed = [[float(cell.split()[0]) for row in rows[1:] for cell in row[2:]] for rows in tables]
        assert all(0 <= polished <= plain for plain, polished in zip(*missed, strict=True))
        assert "- disf, polished: the default, 8 steps at 4 to 1.5, misses" in out

    def test_what_is_recorded_is_not_measured_again(self, tmp_path):
        records = tmp_path / "records"
        first = self.run(records, "--steps", "2", "--terms", "pairwise")
        measured = records.read_text()
        assert self.run(records, "--steps", "2", "--terms", "pairwise").split("**")[1:] == first.split("**")[1:]
        assert records.read_text() == measured
        self.run(records, "--steps", "3", "--terms", "pairwise")
        assert len(records.read_text().splitlines()) == 2 * len(measured.splitlines())


@pytest.mark.slow
def test_neighbour_lists_are_measured(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(300, dim=8, feature_type=pa.list_(pa.float16(), 8)))
    for made in ([path, "--samples", 500], ["--samples", 400, "--clustered", 6]):
        out = run("neighbors.py", *made, "--neighbors", 5, "--steps", 2)
        assert "exact: table" in out
        assert "approximate: table" in out
        assert out.count("recall 1.000") == 2  # so few samples are one cluster
        assert out.count("f by lists") == 2


class TestSoak:
    def samples(self, slope_mb, *, num_minutes=4):
        return [Sample(second, 300 + slope_mb * second / 60, 30, 9) for second in range(num_minutes * 60)]

    def test_what_grows_is_told_from_what_does_not(self, capsys):
        assert not report({1: self.samples(0), 2: self.samples(2)})
        assert report({1: self.samples(0), 2: self.samples(30)})
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 12
        assert [line.endswith("GREW") for line in lines] == [False] * 9 + [True, False, False]
        assert "+30.000 a minute" in lines[9]

    def test_this_process_can_be_looked_at(self):
        sample = look(os.getpid(), 0.0)
        assert sample.rss_mb > 10
        assert sample.files >= 3
        assert sample.threads >= 1
        assert family(os.getpid())[0] == os.getpid()
        assert look(2**22 + 1, 0.0) is None
