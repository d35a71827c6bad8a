"""Checkpoint files: written whole or not at all, read without running any code in them."""

from __future__ import annotations

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any

import torch

from datamask_pl.errors import CheckpointError, warn
from datamask_pl.io.atomic import atomic_path

# Where the learner's own part of a checkpoint is.
STATE_KEY = "datamask_pl"
_NAME = re.compile(r"block-(\d+)-step-(\d+)\.ckpt")
_SUM = b"datamask_pl sha256 "
# What torch writes ends with the length of the zip file's comment, which is 0.
_LENGTH_BYTES = 2
_ENDING_BYTES = _LENGTH_BYTES + len(_SUM) + 2 * hashlib.sha256().digest_size


def checkpoint_name(block: int, step: int) -> str:
    """File name of a checkpoint with `step` steps of `block` done.

    Example:
        >>> checkpoint_name(3, 120)
        'block-00003-step-000120.ckpt'
    """
    return f"block-{block:05d}-step-{step:06d}.ckpt"


def parse_name(path: Path) -> tuple[int, int] | None:
    """Block and steps done that a checkpoint's name tells, or None if it has another name.

    Example:
        >>> parse_name(Path("checkpoints/block-00003-step-000120.ckpt"))
        (3, 120)
    """
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None


def list_checkpoints(folder: Path, block: int | None = None) -> list[Path]:
    """The checkpoints in a folder, of one block or of all, oldest first; empty if there is no such folder."""
    found = [(place, path) for path in folder.glob("*.ckpt") if (place := parse_name(path))]
    return [path for place, path in sorted(found) if block in (None, place[0])]


def newest_whole_checkpoint(folder: Path, block: int, *, below: int) -> Path | None:
    """The newest checkpoint of a block that can be read; a damaged one is passed over with a warning.

    Args:
        folder: with checkpoints.
        block: whose.
        below: steps of a block; a checkpoint with all of them done is of no use for going on.

    Returns:
        Its path, or None if there is none.
    """
    for path in reversed(list_checkpoints(folder, block)):
        place = parse_name(path)
        if place is None or place[1] >= below:
            continue
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            warn(f"{error} Falling back to the one before.")
        else:
            return path
    return None


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """Tensors and plain types of a checkpoint, on the CPU.

    Raises:
        CheckpointError: If the file is missing, cut off, or holds anything else.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"checkpoint {path} does not exist; pass the path of a .ckpt file, or last.")
    try:
        content = Path(path).read_bytes()
        if content[-_ENDING_BYTES:] != _ending(memoryview(content)[:-_ENDING_BYTES]):
            raise ValueError("it does not end with the checksum of its bytes")
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports damage by many classes, none of them documented
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"checkpoint {path} is damaged or was not written by datamask_pl ({reason}).") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(STATE_KEY), dict):
        raise CheckpointError(
            f"checkpoint {path} was not written by datamask_pl; give one from a run's checkpoints folder."
        )
    return checkpoint


def encode(checkpoint: dict[str, Any]) -> tuple[memoryview, bytes]:
    """The bytes of a checkpoint file, in two parts: what torch writes, and a checksum of it as the zip file's comment.

    Torch's own checksums are ignored when it reads, and there are none of the zip file's directory, of which a byte
    that has changed can make a tensor of memory that was never written.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    body = buffer.getbuffer()[:-_LENGTH_BYTES]
    return body, _ending(body)


def _ending(body: memoryview) -> bytes:
    """What follows on all the other bytes of a checkpoint file."""
    comment = _SUM + hashlib.sha256(body).hexdigest().encode()
    return len(comment).to_bytes(_LENGTH_BYTES, "little") + comment


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint under a temporary name, forces it to disk, then renames it."""
    # torch.save to a path reports a full disk as RuntimeError; bytes in memory do not
    parts = encode(checkpoint)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.writelines(parts)
