"""Runs the scripts of benchmarks/."""

import os
import subprocess
import sys

from tests.support.fits import ROOT


def run(script, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
