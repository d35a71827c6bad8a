"""How many blocks are in memory while a mask is learned."""

import time

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from datamask_pl.data.module import FeatureDataModule
from datamask_pl.learner.module import MaskLearner
from datamask_pl.objectives.joint import WeightedObjective
from tests.support.block_watch import watch_blocks
from tests.support.fits import write_shards

NUM_BLOCKS = 3


class Reading(Callback):
    """How many blocks have been read by the end of each block's only step."""

    def __init__(self, blocks, *, is_ahead):
        self.blocks = blocks
        self.is_ahead = is_ahead
        self.num_read = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        wanted = min(batch.block.index + 2, NUM_BLOCKS)
        deadline_s = time.monotonic() + (30 if self.is_ahead else 0.1)
        while len(self.blocks) < wanted and time.monotonic() < deadline_s:
            time.sleep(0.001)
        self.num_read.append(len(self.blocks))


@pytest.mark.parametrize(
    ("diversity", "is_ahead"),
    [
        ("pairwise", True),
        ("disf", True),
        ("facility_location", False),
        ([WeightedObjective("pairwise"), WeightedObjective("facility_location")], False),
        ([WeightedObjective("pairwise"), WeightedObjective("facility_location", weight=0.0)], True),
    ],
    ids=["pairwise", "disf", "facility_location", "both", "one"],
)
def test_the_next_block_is_read_meanwhile_unless_lists_are_held_beside_it(workplace, monkeypatch, diversity, is_ahead):
    """apricot #28: memory that stays bounded."""
    blocks, num_alive = watch_blocks(monkeypatch)
    reading = Reading(blocks, is_ahead=is_ahead)
    Trainer(
        accelerator="cpu", logger=False, callbacks=[reading], max_epochs=-1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(
        MaskLearner(diversity=diversity, quality_weight=0.1, num_steps=1),
        datamodule=FeatureDataModule(path=write_shards("shards", [20 * NUM_BLOCKS], dim=8), block_size=20),
    )  # fmt: skip
    assert reading.num_read == ([2, 3, 3] if is_ahead else [1, 2, 3])
    assert max(num_alive) <= is_ahead, "beside the one that is read"
