"""The benchmark suite, and the benchmarks of growth and overhead, on small data."""

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
import torch

from tests.support.benchmarks import run
from tests.support.fits import ROOT
from tests.support.shards import make_table, write

sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture
def problem():
    from ours import Problem

    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(150, 6, generator=generator))
    return Problem(features, torch.rand(150, generator=generator), 15, "facility_location", 0.3)


@pytest.mark.slow
def test_everyone_is_measured_and_a_page_and_a_picture_are_written(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(700, dim=8, feature_type=pa.list_(pa.float16(), 8)))
    options = ["--cases", "pairwise:0.05", "--repeats", 2, "--threads", 1, "--write", tmp_path / "docs"]
    run("suite.py", path, *options, "--only", "ours", "leverage")
    page = (tmp_path / "docs/suite.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    names = [row[0] for row in rows if row[0]]
    assert names[0] == "greedy"
    assert names[1].startswith("leverage scores")
    steps = [f"ours, {number} steps" for number in (4, 12, 20, 8)]
    expected = [name for bare in steps for name in (bare, f"{bare}, polished")]
    assert names[-len(expected) :] == [*expected[:-1], f"{expected[-1]} (the default)"]
    results = json.loads((tmp_path / "docs/suite.json").read_text())["results"]["pairwise:0.05"]
    assert all(result["runs"] == 2 for result in results.values())
    points = results["ours"]["points"]
    assert all(bare["seconds"] <= polished["seconds"] for bare, polished in zip(points[::2], points[1::2], strict=True))
    assert all(bare["f"] <= polished["f"] for bare, polished in zip(points[::2], points[1::2], strict=True))
    assert (tmp_path / "docs/suite.svg").read_text().startswith("<?xml")
    assert f"torch {torch.__version__}" in page


def cells_of(lines):
    return {
        cells[0]: cells for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line)
    }


@pytest.fixture
def results():
    point = {"label": "", "seconds": 1.0, "prepared_s": 0.5, "f": 0.5, "quality": 0.5, "diversity": 0.5}
    first, second = {**point, "label": "4 steps", "f": 0.45}, {**point, "label": "20 steps", "seconds": 2.0, "f": 0.6}
    longest = {**point, "seconds": 2.5, "prepared_s": 1.5, "f": 0.55}
    return {
        "greedy": {"points": [point], "memory_bytes": 10**9, "runs": 3},
        "absent": {"failure": "not installed (No module named 'absent')"},
        "early": {"points": [{**point, "seconds": 0.5, "f": 0.4}], "memory_bytes": 0, "runs": 1},
        "compiled sparse greedy, 600 neighbours": {"points": [longest], "memory_bytes": 0, "runs": 1},
        "ours": {"points": [first, second], "memory_bytes": 0, "runs": 3},
    }


def test_the_table_says_when_greedys_f_is_reached_and_who_is_not_there(results):
    import suite

    rows = cells_of(suite.table(results, has_similarities=False))
    assert "absent: not installed (No module named 'absent')" in rows
    assert rows["greedy"][1] == "1.00"
    assert rows["early"][1] == "never"
    assert rows["ours, 4 steps"][1] == ""
    assert rows["ours, 20 steps (the default)"][1] == "2.00"
    assert rows["ours, 20 steps (the default)"][3] == "+0.100000"


def test_ours_is_compared_when_a_competitor_ends_with_and_without_similarities(results):
    import suite

    lines = suite.table(results, has_similarities=True)
    rows = cells_of(lines)
    assert rows["greedy"][4:8] == ["1.00", "-0.050000", "0.50", "-0.050000"]
    assert rows["early"][4:8] == ["0.50", "no mask yet", "0.00", "no mask yet"]
    # its lists took longer: without them it ends before the last mask of ours
    assert rows["compiled sparse greedy, 600 neighbours"][4:8] == ["2.50", "+0.050000", "1.00", "-0.100000"]
    assert lines[-1] == "At its end ours has f +0.050000 from that of compiled sparse greedy, 600 neighbours."


SLOW_COMPETITOR = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import suite, torch
from ours import Point

def slow(problem):
    # the small problem that warms up is quick
    time.sleep(2.0 * (len(problem.features_ND) > suite.NUM_WARM_UP))
    return [Point("", 2.0, torch.arange(len(problem.features_ND)) < problem.num_selected)]

suite.competitors = lambda *_, **__: {{name: slow for name in ("greedy", suite.PAPER)}}
suite.main()
"""


@pytest.mark.slow
def test_a_run_over_the_limit_is_stopped_and_the_papers_estimator_has_its_own(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(700, dim=4, feature_type=pa.list_(pa.float16(), 4)))
    script, output = tmp_path / "slow.py", tmp_path / "result.json"
    script.write_text(SLOW_COMPETITOR.format(benchmarks=str(ROOT / "benchmarks")))
    options = [path, "--limit", 1, "--paper-seconds", 60, "--work", "disf:0"]
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run(script, *options, "greedy", output)
    assert failure.value.returncode == -signal.SIGALRM
    run(script, *options, "the paper's estimator", output)
    assert json.loads(output.read_text())["runs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_selected", [1, 15])
def test_compiled_greedy_on_whole_lists_is_dense_greedy(problem, num_selected):
    pytest.importorskip("numba")
    from competitors import package_baseline, sparse_greedy

    problem = problem._replace(num_selected=num_selected)
    expected = package_baseline(problem, name="greedy_facility_location")[-1].mask_N
    assert torch.equal(sparse_greedy(problem, num_neighbors=150)[-1].mask_N, expected)


def test_the_papers_estimator_ends_in_time_and_every_mask_has_the_budget(problem):
    from ours import paper

    points = paper(problem, limit_s=0.5)
    assert all(int(point.mask_N.sum()) == 15 for point in points)
    assert len(points) >= 1


@pytest.mark.slow
def test_growth_measures_a_command_and_its_memory(tmp_path):
    options = ["--sizes", 300, 600, "--terms", "pairwise", "--features", 4, "--block-size", 300]
    lines = run("growth.py", "--folder", tmp_path, *options).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| pairwise")]
    assert [(row[1], row[2]) for row in rows] == [("300", "1"), ("600", "2")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-4-000-300.parquet", "shard-4-000-600.parquet"]
    # a process with torch in it
    assert all(0.1 < float(row[6].split()[0]) < 4 for row in rows)


@pytest.mark.slow
def test_overhead_measures_steps_of_fit_and_of_the_bare_functions():
    lines = run("overhead.py", "--samples", 100, "--steps", 8, "--repeats", 1, "--modes", "no logging").splitlines()
    bare, fit = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:])
    assert bare[0] == "bare functions"
    assert fit[0] == "no logging"
    assert float(fit[1]) - float(bare[1]) == pytest.approx(float(fit[2]), abs=0.011)
