"""Runs `fit` on small shards, in this process or in others, and reads what it wrote."""

import json
import os
import subprocess
import sys
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq

from datamask_pl.cli import main
from tests.support.shards import make_table, write

ROOT = Path(__file__).parents[2]
QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu")
# Options that make the estimators that draw masks quick on a few rows.
ROLLOUTS = ("--model.num_rollouts", "6", "--model.num_steps", "6", "--data.partial", "0.4")
ESTIMATORS = {
    "multilinear": ("--model.estimator", "multilinear", "--model.num_steps", "6"),
    "leave_one_out": ("--model.estimator", "leave_one_out", *ROLLOUTS),
    "group_relative": ("--model.estimator", "group_relative", *ROLLOUTS),
}


def write_shards(folder, sizes, *, dim=16, **columns):
    """Shards whose ids count up over all files."""
    first_id = 0
    for index, num_rows in enumerate(sizes):
        write(Path(folder) / f"shard-{index}.parquet", make_table(num_rows, first_id=first_id, dim=dim, **columns))
        first_id += num_rows
    return str(folder)


@contextmanager
def without_pictures():
    """A fit draws no pictures for TensorBoard: they take three quarters of the time of a small one."""
    with patch("datamask_pl.callbacks.figures._draws", lambda result: {}):
        yield


def fit_with_pictures(*args):
    """`fit` in this process, as a user has it."""
    main(["fit", *QUIET, *args])


def fit(*args, folder="."):
    """`fit` in this process, which is in `folder` meanwhile."""
    with chdir(folder), without_pictures():
        fit_with_pictures(*args)


def start(*args, folder, launcher=(sys.executable,), **kwargs):
    """`fit` in processes of its own, started in `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DATAMASK_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(ROOT / "cli.py"), "fit", *QUIET, *args]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def run(*args, folder, launcher=(sys.executable,), timeout_s=300):
    """`fit` in processes of its own: exit code, stdout and stderr."""
    process = start(*args, folder=folder, launcher=launcher)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def run_folder(folder=".", version=0, name="datamask"):
    return Path(folder) / "runs" / name / f"version_{version}"


def parts(mask):
    """The parts of a mask folder, or of a run, as tables."""
    mask = Path(mask)
    mask = mask / "mask" if (mask / "mask").is_dir() else mask
    return [pq.read_table(path) for path in sorted(mask.glob("part-*.parquet"))]


def manifest(run_or_mask):
    path = Path(run_or_mask)
    path = path / "mask" if (path / "mask").is_dir() else path
    return json.loads((path / "_manifest.json").read_text())


def selected_ids(tables):
    return [table["id"].filter(table["selected"]).to_pylist() for table in tables]


def assert_same_mask(run_or_mask, other, *, num_parts):
    """Every column of every part, bit for bit."""
    tables, others = parts(run_or_mask), parts(other)
    assert len(tables) == len(others) == num_parts
    for block, (table, expected) in enumerate(zip(tables, others, strict=True)):
        for name in table.column_names:
            assert table[name].equals(expected[name]), f"{name} of block {block} differs"


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
