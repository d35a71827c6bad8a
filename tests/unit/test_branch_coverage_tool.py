"""tools/branch_coverage.py, on files of which some branches were taken."""

import subprocess
import sys

import pytest
from coverage import CoverageData
from fits import ROOT


@pytest.mark.parametrize(
    ("num_taken", "num_branches", "said"),
    [
        (40, 40, ""),
        (38, 40, ""),
        (37, 40, "37 of 40 branches are tested, 92.50 %; it must be 95 %.\n"),
        (0, 0, "0 of 0 branches are tested, 0.00 %; it must be 95 %.\n"),
    ],
)
def test_too_few_branches_end_it_whatever_the_lines(tmp_path, num_taken, num_branches, said):
    """Every if has two branches: into its line, and on to the next if."""
    lines, arcs = [], [(-1, 1)]
    for index in range(num_branches // 2):
        here = len(lines) + 1
        lines += [f"if x == {index}:", "    y = 1"]
        arcs += [(here, here + 1), (here + 1, here + 2), (here, here + 2)]
    lines.append("z = 1")
    arcs.append((len(lines), -1))
    skipped = [arc for arc in arcs if 0 < arc[0] == arc[1] - 2][: num_branches - num_taken]
    module = tmp_path / "module.py"
    module.write_text("\n".join(lines) + "\n")
    data = CoverageData(str(tmp_path / ".coverage"))
    data.add_arcs({str(module): [arc for arc in arcs if arc not in skipped]})
    data.write()
    command = [sys.executable, str(ROOT / "tools/branch_coverage.py"), ".coverage"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr == said
    assert done.stdout == ""
    assert done.returncode == bool(said)


def test_without_a_measurement_of_branches_it_ends(tmp_path):
    (tmp_path / "module.py").write_text("x = 1\n")
    data = CoverageData(str(tmp_path / ".coverage"))
    data.add_lines({str(tmp_path / "module.py"): [1]})
    data.write()
    command = [sys.executable, str(ROOT / "tools/branch_coverage.py"), ".coverage"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "0 of 0 branches are tested, 0.00 %; it must be 95 %.\n")
