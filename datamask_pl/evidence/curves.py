"""What a run logged, read back from its TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamask_pl.errors import DataFileError

# Scalars of a name that are kept; of a longer run a random part.
MAX_SCALARS = 100_000
_EVENTS = "events.out.tfevents.*"


def read_scalars(run: Path) -> dict[str, dict[int, float]]:
    """Every scalar of a run, its groups of ranks included.

    Where a killed run took a step twice, the later number counts.

    Args:
        run: folder of the run.

    Returns:
        For each name, the number by step; empty if the run logged nothing.

    Raises:
        DataFileError: If events cannot be read.
    """
    found: dict[str, dict[int, float]] = {}
    folders = {path.parent for pattern in (_EVENTS, f"group-*/{_EVENTS}") for path in run.glob(pattern)}
    for folder in sorted(folders):
        try:
            events = EventAccumulator(str(folder), size_guidance={"scalars": MAX_SCALARS}).Reload()
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataFileError(
                f"{folder / _EVENTS} cannot be read: {reason}; move the files away to do without them."
            ) from error
        for name in events.Tags()["scalars"]:
            for event in sorted(events.Scalars(name), key=lambda event: event.wall_time):
                found.setdefault(name, {})[event.step] = event.value
    return {name: dict(sorted(values.items())) for name, values in found.items()}


def of_block(values: dict[int, float], block: int, num_steps: int) -> dict[int, float]:
    """The numbers of one block, by its own steps, from 1.

    Example:
        >>> of_block({1: 0.1, 2: 0.2, 3: 0.3}, block=1, num_steps=2)
        {1: 0.3}
    """
    first = block * num_steps
    return {step - first: value for step, value in values.items() if 0 < step - first <= num_steps}
