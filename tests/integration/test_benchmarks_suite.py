"""The benchmark suite, and the benchmarks of growth and overhead, on small data."""

import json
import sys

import pyarrow as pa
import pytest
import torch
from shards import make_table, write
from test_benchmarks import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture
def problem():
    from ours import Problem

    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(150, 6, generator=generator))
    return Problem(features, torch.rand(150, generator=generator), 15, "facility_location", 0.3)


def test_everyone_is_measured_and_a_page_and_a_picture_are_written(tmp_path):
    path = write(tmp_path / "a.parquet", make_table(700, dim=8, feature_type=pa.list_(pa.float16(), 8)))
    options = ["--cases", "pairwise:0.05", "--repeats", 2, "--threads", 1, "--write", tmp_path / "docs"]
    run("suite.py", path, *options, "--only", "ours", "leverage")
    page = (tmp_path / "docs/suite.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    names = [row[0] for row in rows if row[0]]
    assert names[0] == "greedy"
    assert names[1].startswith("leverage scores")
    steps = ["ours, 4 steps", "ours, 4 steps, polished", "ours, 8 steps", "ours, 8 steps, polished", "ours, 20 steps"]
    assert names[-6:] == [*steps, "ours"]
    results = json.loads((tmp_path / "docs/suite.json").read_text())["results"]["pairwise:0.05"]
    assert all(result["runs"] == 2 for result in results.values())
    points = results["ours"]["points"]
    assert all(bare["seconds"] <= polished["seconds"] for bare, polished in zip(points[::2], points[1::2], strict=True))
    assert all(bare["f"] <= polished["f"] for bare, polished in zip(points[::2], points[1::2], strict=True))
    assert (tmp_path / "docs/suite.svg").read_text().startswith("<?xml")
    assert f"torch {torch.__version__}" in page


def test_a_competitor_that_is_not_there_or_too_slow_is_a_row_that_says_so():
    import suite

    point = {"label": "", "seconds": 1.0, "f": 0.5, "quality": 0.5, "diversity": 0.5}
    results = {
        "greedy": {"points": [point], "memory_bytes": 10**9, "runs": 3},
        "absent": {"failure": "not installed (No module named 'absent')"},
        "below": {"points": [{**point, "f": 0.4}], "memory_bytes": 0, "runs": 1},
        "ours": {"points": [{**point, "f": 0.45}, {**point, "seconds": 2.0}], "memory_bytes": 0, "runs": 3},
    }
    lines = suite.table(results)
    assert lines[3].startswith("| absent |")
    assert "not installed (No module named 'absent')" in lines[3]
    first_seconds = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines[2:]}
    assert first_seconds["greedy"] == "1.00"
    assert first_seconds["below"] == "never"
    assert first_seconds["ours"] == "2.00"


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


def test_growth_measures_a_command_and_its_memory(tmp_path):
    options = ["--sizes", 300, 600, "--terms", "pairwise", "--features", 4, "--block-size", 300]
    lines = run("growth.py", "--folder", tmp_path, *options).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| pairwise")]
    assert [(row[1], row[2]) for row in rows] == [("300", "1"), ("600", "2")]
    # a process with torch in it
    assert all(0.1 < float(row[6].split()[0]) < 4 for row in rows)


def test_overhead_measures_steps_of_fit_and_of_the_bare_functions():
    lines = run("overhead.py", "--samples", 100, "--steps", 8, "--repeats", 1, "--modes", "no logging").splitlines()
    bare, fit = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:])
    assert bare[0] == "bare functions"
    assert fit[0] == "no logging"
    assert float(fit[1]) - float(bare[1]) == pytest.approx(float(fit[2]), abs=0.011)
