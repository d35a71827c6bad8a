"""Starts the processes of a run without a launcher, several fits a launch: a launch costs more than a small fit."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from fits import QUIET, ROOT

SCRIPT = Path(__file__).with_name("integration") / "many_fits.py"


def on(num_ranks):
    return ("--trainer.devices", str(num_ranks), "--trainer.strategy", "ddp")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_ranks(num_ranks, fits, *, folder):
    """Processes that run the fits, one after the other."""
    tasks = json.dumps([[free_port(), *QUIET, *on(num_ranks), *args] for args in fits])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(num_ranks), tasks],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def end(processes, *, timeout_s):
    """Exit codes and outputs; processes that do not end in time are killed, and the test fails."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def launch(num_ranks, fits, *, folder, timeout_s=180):
    """Runs the fits in as many processes, and returns what rank 0 printed; all must end well."""
    codes, outputs = end(start_ranks(num_ranks, fits, folder=folder), timeout_s=timeout_s)
    assert codes == [0] * num_ranks, "\n".join(err for _, err in outputs)
    return outputs[0][0]
