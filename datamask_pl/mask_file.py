"""The mask on disk: one parquet part a block, and a manifest that says what they belong to.

A part has one row a sample of the block: the id in its exact type, where the sample came from, whether it is kept, its
logit, inclusion probability and quality. Parts and manifest are written whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datamask_pl.atomic import atomic_path
from datamask_pl.data.types import BlockResult
from datamask_pl.errors import CheckpointError, DataFileError

FORMAT_VERSION = 1
MANIFEST_NAME = "_manifest.json"
_METADATA_KEY = b"datamask_pl"


@dataclass
class Manifest:
    """What the parts of a mask folder belong to.

    Attributes:
        plan_hash: SHA-256 of files, columns and options that decide the blocks.
        files: source files; a part's `source_file` is one of them.
        num_blocks: parts of the complete mask.
        settings: the learner's options that decide the mask.
        versions: of the packages that made it.
        config: the resolved configuration of the run, if it came from the command line.
        blocks: what is known of each finished block, by its index.
        format: version of this format.
    """

    plan_hash: str
    files: list[str]
    num_blocks: int
    settings: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Replaces the manifest of a mask folder.

        Raises:
            DataFileError: If it cannot be written.
        """
        blocks = {str(index): self.blocks[index] for index in sorted(self.blocks)}
        text = json.dumps({**asdict(self), "blocks": blocks}, indent=2)
        with atomic_path(folder / MANIFEST_NAME) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a mask folder, or None if it has none.

        Raises:
            DataFileError: If it is damaged or of another format.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["blocks"] = {int(index): block for index, block in content["blocks"].items()}
            manifest = cls(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataFileError(
                f"{path} cannot be read as a mask manifest ({error}); restore it or use another folder."
            ) from error
        if manifest.format != FORMAT_VERSION:
            raise DataFileError(
                f"{path} has format {manifest.format}, this version reads {FORMAT_VERSION}; use the one that wrote it."
            )
        return manifest


def part_name(block: int) -> str:
    """File name of a block's part.

    Example:
        >>> part_name(12)
        'part-00012.parquet'
    """
    return f"part-{block:05d}.parquet"


def write_part(folder: Path, result: BlockResult, *, files: list[str], plan_hash: str) -> None:
    """Writes the part of a block.

    Args:
        folder: the mask folder.
        result: what was learned.
        files: names of the source files, by `Block.source_file_N`.
        plan_hash: of the data module.

    Raises:
        DataFileError: If it cannot be written.
    """
    block = result.block
    columns = {
        "id": block.ids,
        "source_file": pa.DictionaryArray.from_arrays(
            pa.array(block.source_file_N.numpy(), pa.int32()), pa.array(files, pa.string())
        ),
        "source_row": pa.array(block.source_row_N.numpy(), pa.int64()),
        "selected": pa.array(result.mask_N.numpy()),
        "logit": pa.array(result.logits_N.numpy().astype(np.float32, copy=False)),
        "probability": pa.array(result.probability_N.numpy().astype(np.float32, copy=False)),
        "quality": pa.array(block.quality_N.cpu().numpy()),
    }
    about = {
        "format": FORMAT_VERSION,
        "plan_hash": plan_hash,
        "block": block.index,
        "num_samples": block.num_samples,
        "num_selected": result.num_selected,
    }
    table = pa.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(about).encode()})
    with atomic_path(folder / part_name(block.index)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def check_part(folder: Path, block: int, *, plan_hash: str) -> None:
    """Checks that a block's part is there, whole, and of this data.

    Raises:
        CheckpointError: If it is not.
    """
    path = folder / part_name(block)
    try:
        metadata = pq.read_metadata(path)
        about = json.loads((metadata.metadata or {})[_METADATA_KEY])
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise CheckpointError(
            f"block {block} is finished according to the checkpoint, but {path} cannot be read ({error}); "
            "keep a run's checkpoints and mask folder together, or start without --ckpt_path."
        ) from error
    if about["plan_hash"] != plan_hash or metadata.num_rows != about["num_samples"]:
        raise CheckpointError(
            f"{path} is the mask of other data (plan {about['plan_hash'][:12]}, here {plan_hash[:12]}); "
            "use another mask folder."
        )


def describe_block(result: BlockResult) -> dict[str, Any]:
    """What the manifest says of a block: plain types."""
    return {
        "part": part_name(result.block.index),
        "num_samples": result.block.num_samples,
        "num_selected": result.num_selected,
        "num_dropped": result.block.num_dropped,
        "mask": asdict(result.mask),
        "random": asdict(result.random),
        "top_quality": asdict(result.top_quality),
        "scales": result.scales,
        "num_steps": result.num_steps,
        "seconds": round(result.seconds, 3),
    }
