"""Runs that are killed and preempted, again and again, and always started by the same command: nothing is lost.

lightning #20542, #20806: preemption signals land on different steps in different ranks, and dead-lock. lightning
#19970: a cut-off checkpoint or output.
"""

import io
import itertools
import json
import os
import random
import signal
import threading
import time

import pyarrow.parquet as pq
import pytest
import torch

from tests.support.fits import assert_same_mask, fit, manifest, parts, write_shards
from tests.support.forked_ranks import Ranks

NUM_PREEMPTIONS = 3
NUM_BLOCKS = 4
ARGS = (
    "--data.path", "shards", "--data.block_size", "40", "--model.select_ratio", "0.2", "--data.partial", "0.3",
    "--model.num_steps", "200", "--launch.timeout_s", "120",
)  # fmt: skip
MINE = (*ARGS, "--run_name", "mine", "--checkpoint.every_n_steps", "2")
# A step takes few milliseconds, and a run would be done before it is killed often enough.
SLOWLY = ("--trainer.callbacks+", '{"class_path": "tests.support.callbacks.Sleeps", "init_args": {"seconds": 0.06}}')
BEGUN = " on cpu"
PREEMPTED = 75


class Watcher(threading.Thread):
    """Reads every part, checkpoint and manifest that is ever seen in a folder, whole."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self.run_folder = run
        self.num_read = 0
        self.damaged = []
        self.is_over = threading.Event()
        self._known = set()

    def run(self):
        while not self.is_over.is_set():
            self.look()
            time.sleep(0.003)
        self.look()

    def look(self):
        for path in itertools.chain(self.run_folder.glob("mask/*"), self.run_folder.glob("checkpoints/*")):
            if path.suffix == ".tmp":
                continue
            try:
                with path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    version = (path.name, status.st_ino, status.st_mtime_ns)
                    content = None if version in self._known else file.read()
            except FileNotFoundError:  # an older checkpoint that is not needed any more
                continue
            if content is None:
                continue
            self._known.add(version)
            self.num_read += 1
            try:
                READERS[path.suffix](io.BytesIO(content))
            except Exception as error:
                self.damaged.append(f"{path.name}: {error!r}")


READERS = {
    ".parquet": pq.read_table,
    ".ckpt": lambda file: torch.load(file, weights_only=True),
    ".json": lambda file: json.loads(file.read()),
}


@pytest.fixture
def watched(workplace):
    """The folder of the run `mine`, watched, and at the end compared with a run that was not disturbed."""
    write_shards("shards", [100, 60])
    fit(*ARGS, "--run_name", "undisturbed")
    run = workplace / "runs/datamask/mine"
    watcher = Watcher(run)
    watcher.start()
    yield run
    watcher.is_over.set()
    watcher.join()
    assert not watcher.damaged
    assert watcher.num_read > 20
    assert_same_mask(run, workplace / "runs/datamask/undisturbed", num_parts=NUM_BLOCKS)
    assert len(manifest(run)["blocks"]) == NUM_BLOCKS
    undisturbed = workplace / "runs/datamask/undisturbed/mask"
    assert {path.name for path in (run / "mask").iterdir() if path.suffix != ".tmp"} == {
        path.name for path in undisturbed.iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks_per_block", "num_kills"), [(2, 10), (1, 5)])
def test_a_run_that_is_killed_many_times_gives_the_mask_of_one_that_is_not(
    workplace, watched, ranks_per_block, num_kills
):
    dice = random.Random(ranks_per_block)
    args = (*MINE, "--launch.ranks_per_block", str(ranks_per_block))
    killed = 0
    while killed < num_kills:
        assert len(parts(watched)) < NUM_BLOCKS, f"done after {killed} kills: the test is too quick"
        ranks = Ranks(2, *args, *SLOWLY, folder=workplace)
        number = dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
        hit = dice.choice([(0,), (1,), (0, 1), (1, 0)])
        if dice.random() < 0.2:  # before the first step, a scheduler would kill all
            time.sleep(dice.uniform(0, 1))
            number, hit = signal.SIGKILL, (0, 1)
        else:
            ranks.wait_for(BEGUN)
            time.sleep(dice.uniform(0, 0.25))
        killed += any(ranks.processes[rank].is_alive() for rank in hit)
        ranks.signal(number, *hit)
        codes = ranks.end(timeout_s=300)
        allowed = {0, PREEMPTED} if number != signal.SIGKILL else {0, 1, -signal.SIGKILL}
        # A rank that has done its part is not bound to heed a signal any more.
        allowed |= {-number} if codes.count(0) or len(parts(watched)) == NUM_BLOCKS else set()
        assert set(codes) <= allowed, ranks.output()
        assert codes != [0, 0] or len(parts(watched)) == NUM_BLOCKS, ranks.output()
    assert Ranks(2, *args, folder=workplace).end(timeout_s=300) == [0, 0]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_block"),
    [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 1), (2, 1), (4, 4), (4, 2)])],
)
def test_preemption_reaches_every_rank_and_none_hangs(workplace, watched, num_ranks, ranks_per_block):
    dice = random.Random(num_ranks)
    args = (*MINE, "--launch.ranks_per_block", str(ranks_per_block))
    for _ in range(NUM_PREEMPTIONS):
        ranks = Ranks(num_ranks, *args, *SLOWLY, folder=workplace)
        ranks.wait_for(BEGUN)
        time.sleep(dice.uniform(0, 0.2))
        hit = dice.sample(range(num_ranks), dice.randint(1, num_ranks))
        ranks.signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]), *hit)
        codes = ranks.end(timeout_s=300)
        assert codes[0] == PREEMPTED, ranks.output()
        assert set(codes) <= {0, PREEMPTED}, ranks.output()
        assert "Rerun the same command" in ranks.output()
    ranks = Ranks(num_ranks, *args, folder=workplace)
    assert ranks.end(timeout_s=300) == [0] * num_ranks, ranks.output()
