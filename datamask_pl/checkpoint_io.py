"""Checkpoint files: written whole or not at all, read without running any code in them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from datamask_pl.atomic import atomic_path
from datamask_pl.errors import CheckpointError

# Where the learner's own part of a checkpoint is.
STATE_KEY = "datamask_pl"
_NAME = re.compile(r"block-(\d+)-step-(\d+)\.ckpt")


def checkpoint_name(block: int, step: int) -> str:
    """File name of a checkpoint with `step` steps of `block` done.

    Example:
        >>> checkpoint_name(3, 120)
        'block-00003-step-000120.ckpt'
    """
    return f"block-{block:05d}-step-{step:06d}.ckpt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; empty if there is no such folder."""
    found = [(match, path) for path in folder.glob("*.ckpt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2])))]


def newest_whole_checkpoint(folder: Path) -> Path:
    """The newest checkpoint that can be read; a damaged one is passed over with a warning.

    Raises:
        CheckpointError: If there is none.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            rank_zero_warn(f"{error} Falling back to the one before.")
        else:
            return path
    raise CheckpointError(
        f"there is no checkpoint in {folder} that could be continued; start without --ckpt_path, or give the path of "
        "another."
    )


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """Tensors and plain types of a checkpoint, on the CPU.

    Raises:
        CheckpointError: If the file is missing, cut off, or holds anything else.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"checkpoint {path} does not exist; give the path of a .ckpt file, or last.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports damage by many classes, none of them documented
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"checkpoint {path} is damaged or was not written by datamask_pl ({reason}).") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(STATE_KEY), dict):
        raise CheckpointError(
            f"checkpoint {path} was not written by datamask_pl; give one from a run's checkpoints folder."
        )
    return checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's door to checkpoint files."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ANN401
        """Writes a checkpoint under a temporary name, forces it to disk, then renames it."""
        # torch.save to a path reports a full disk as RuntimeError; bytes in memory do not
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with atomic_path(Path(path)) as temporary:
            temporary.write_bytes(buffer.getbuffer())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:  # noqa: ANN401
        """Reads tensors and plain types; nothing else is ever unpickled."""
        return read_checkpoint(path)

    def remove_checkpoint(self, path: Any) -> None:  # noqa: ANN401
        """Deletes a checkpoint, if it is there."""
        Path(path).unlink(missing_ok=True)
