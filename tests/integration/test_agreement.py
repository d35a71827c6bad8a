"""Ranks that have come to hold different logits stop, and nothing of what they hold is written.

lightning #9237, #18086: manual optimisation leaves ranks out of step.
"""

from pathlib import Path

import pytest

from tests.support.callbacks import AltersALogit
from tests.support.fits import write_shards
from tests.support.forked_ranks import Ranks


@pytest.mark.parametrize(
    ("after", "when", "left"),
    [
        (4, "checkpoint of block 0, step 6", ["block-00000-step-000003.ckpt"]),
        (7, "end of block 0", ["block-00000-step-000003.ckpt", "block-00000-step-000006.ckpt"]),
    ],
)
def test_a_difference_ends_all_ranks_at_the_next_checkpoint_or_before_the_mask_is_written(workplace, after, when, left):
    write_shards("shards", [80])
    args = ("--data.path", "shards", "--model.num_steps", "8", "--checkpoint.every_n_steps", "3", "--run_name", "mine")
    ranks = Ranks(2, *args, "--trainer.callbacks+", AltersALogit.config(after=after), folder=workplace)
    assert ranks.end(timeout_s=300) == [1, 1], ranks.output()
    out, other = (log.read_text() for log in ranks.logs)
    assert f"error: {when}: ranks 1 hold other values than rank 0 " in out
    assert "error" not in other
    run = Path("runs/datamask/mine")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == left
    assert not list((run / "mask").glob("part-*"))
