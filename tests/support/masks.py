"""Results of a block that was never learned, of which the tests of the mask's format write parts."""

import pyarrow as pa
import torch

from datamask_pl.data.types import Block, BlockResult
from datamask_pl.functional.values import Values

HASH = "a" * 64
FILES = ["one.parquet", "two.parquet"]
SETTINGS = {"model.max_lr": 2.0, "model.patience": None}


def result(index=0, num_samples=5, ids=None):
    block = Block(
        index=index,
        features_ND=torch.zeros(num_samples, 2),
        inv_norm_N=torch.ones(num_samples),
        quality_N=torch.linspace(0, 1, num_samples),
        scaled_quality_N=torch.linspace(0, 1, num_samples),
        ids=pa.array([2**63 - 1 - row for row in range(num_samples)]) if ids is None else ids,
        source_file_N=torch.tensor([0, 1] * num_samples, dtype=torch.int32)[:num_samples],
        source_row_N=torch.arange(num_samples),
        num_dropped=2,
    )
    values = Values(1.5, {"quality": 0.5, "disf": -0.25})
    return BlockResult(
        block=block,
        num_selected=2,
        mask_N=torch.arange(num_samples) < 2,
        logits_N=torch.linspace(1, -1, num_samples),
        probability_N=torch.full((num_samples,), 2 / num_samples),
        mask=values,
        random=values,
        top_quality=values,
        scales={"quality": 1.0, "disf": 2.0},
        num_steps=7,
        seconds=1.23456,
    )
