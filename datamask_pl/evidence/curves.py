"""What a run logged, read back from its TensorBoard events."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from datamask_pl.errors import DataFileError, warn

_EVENTS = "events.out.tfevents.*"
_HEAD, _SUM = struct.Struct("<QI"), struct.Struct("<I")


def read_scalars(run: Path, *, is_wanted: Callable[[int], bool] = lambda step: True) -> dict[str, dict[int, float]]:
    """Every scalar of a run, its groups of ranks included.

    Where a killed run took a step twice, the later number counts. Of a file that is cut or damaged, what comes before
    that counts, and a warning says so.

    Args:
        run: folder of the run.
        is_wanted: whether the numbers of a step are.

    Returns:
        For each name, the number by step; empty if the run logged nothing.

    Raises:
        DataFileError: If events cannot be read.
    """
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for path in sorted(path for pattern in (_EVENTS, f"group-*/{_EVENTS}") for path in run.glob(pattern)):
        for event in _read_events(path):
            for value in event.summary.value if is_wanted(event.step) else ():
                if value.WhichOneof("value") == "simple_value":
                    numbers = found.setdefault(value.tag, {})
                    stamped = (event.wall_time, value.simple_value)
                    if event.step not in numbers or numbers[event.step][0] <= event.wall_time:
                        numbers[event.step] = stamped
    return {name: {step: number for step, (_, number) in sorted(found[name].items())} for name in sorted(found)}


def _read_events(path: Path) -> Iterator[Event]:
    """The events of a file, up to its end or the first that is not whole.

    TensorBoard's own reader leaves out what comes after a damaged record without a word.
    """
    step, position_bytes = 0, 0
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            while position_bytes < size_bytes:
                event = _read_event(file, size_bytes)
                if event is None:
                    warn(
                        f"{path} is cut or damaged at byte {position_bytes:,} of {size_bytes:,}, after step {step:,}; "
                        "the curves lack what it says from there on."
                    )
                    return
                yield event
                step, position_bytes = event.step, file.tell()
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataFileError(f"{path} cannot be read: {reason}; move it away to do without it.") from error


def _read_event(file: BinaryIO, size_bytes: int) -> Event | None:
    """The next event: its length, a checksum of that, the event, a checksum. None if it is not whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    if checksum != masked_crc32c(head[: -_SUM.size]):
        return None
    content = file.read(min(length, size_bytes))
    if file.read(_SUM.size) != _SUM.pack(masked_crc32c(content)):
        return None
    try:
        return Event.FromString(content)
    except DecodeError:
        return None


def of_block(values: dict[int, float], block: int, num_steps: int) -> dict[int, float]:
    """The numbers of one block, by its own steps, from 1.

    Example:
        >>> of_block({1: 0.1, 2: 0.2, 3: 0.3}, block=1, num_steps=2)
        {1: 0.3}
    """
    first = block * num_steps
    return {step - first: value for step, value in values.items() if 0 < step - first <= num_steps}
