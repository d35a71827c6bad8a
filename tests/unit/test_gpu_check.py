"""The script of the GPU benchmark itself, on a CPU: it is to be run where there is little time to mend it."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.fits import ROOT

SCRIPT = ROOT / "benchmarks/gpu_check.py"
# a machine with a GPU may have no jsonargparse and no tensorboard
WITHOUT_CLI = """
import runpy, sys
for name in ("jsonargparse", "tensorboard"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gpu_check(*args, folder):
    command = [sys.executable, "-c", WITHOUT_CLI, str(SCRIPT), *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = gpu_check(folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: there is no CUDA GPU here; --device cpu tries the script itself.\n"


@pytest.mark.slow
def test_a_small_run_on_the_cpu_as_one_rank(tmp_path):
    sizes = ("--small-samples", "300", "--small-features", "8", "--num-samples", "400", "--num-features", "8")
    steps = ("--rollout-steps", "2", "--timed-steps", "2", "--timed-estimators", "multilinear", "group_relative")
    done = gpu_check("--device", "cpu", "--ddp", *sizes, *steps, "--output", "gpu.md", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "gpu.md").read_text()
    assert text in done.stdout
    rows = [line for line in text.splitlines() if line.startswith("|") and "|--" not in line]
    assert len(rows) == 1 + 9 + 1 + 6
    # the same device on both sides: the same masks
    assert sum("| 30 | 100.0% |" in row and "| +0.000% |" in row for row in rows) == 9
    assert torch.__version__ in text
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.md"]
