"""What was logged is read back as it was logged."""

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from datamask_pl.evidence.curves import of_block, read_scalars


def write(folder, numbers, *, suffix="", walltime=0.0):
    writer = SummaryWriter(str(folder), filename_suffix=suffix)
    for step, value in numbers.items():
        writer.add_scalar("objective/f", value, step, walltime=walltime + step)
    writer.close()


def test_scalars_of_all_lives_and_groups_of_a_run_are_read(tmp_path):
    """A killed run takes some steps again; what it logged last counts."""
    write(tmp_path, {1: 0.25, 2: 0.5, 3: 0.125}, suffix=".a")
    write(tmp_path, {3: 0.75, 4: 1.0}, suffix=".b", walltime=100.0)
    write(tmp_path / "group-01", {21: 2.0})
    write(tmp_path / "other", {5: 9.0})
    assert read_scalars(tmp_path) == {"objective/f": {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 21: 2.0}}


def test_steps_that_are_not_wanted_are_left_out(tmp_path):
    write(tmp_path, {1: 0.25, 2: 0.5, 3: 0.125})
    assert read_scalars(tmp_path, is_wanted=lambda step: step != 2) == {"objective/f": {1: 0.25, 3: 0.125}}


def test_they_are_those_that_tensorboard_shows(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for step in range(1, 6):
        writer.add_scalar("objective/f", step / 8, step)
        writer.add_scalar("policy/churn", -step / 8, step)
        writer.add_text("words", "some", step)
        writer.add_histogram("logits", np.arange(9.0), step)
    writer.close()
    shown = EventAccumulator(str(tmp_path)).Reload()
    expected = {name: {e.step: e.value for e in shown.Scalars(name)} for name in shown.Tags()["scalars"]}
    assert set(expected) == {"objective/f", "policy/churn"}
    assert read_scalars(tmp_path) == expected


@pytest.mark.parametrize("damage", ["length", "event", "end"])
def test_what_comes_before_a_damaged_event_is_read_and_the_place_is_said(tmp_path, damage):
    """The events of a file from a run that was killed as it wrote may end anywhere."""
    write(tmp_path, {1: 0.25, 2: 0.5, 3: 0.125})
    write(tmp_path / "group-01", {4: 1.0})
    (path,) = tmp_path.glob("events*")
    content = bytearray(path.read_bytes())
    third = 0
    for _ in range(3):  # the file's version, and two steps
        third += 16 + int.from_bytes(content[third : third + 8], "little")
    if damage == "end":
        del content[third + 5 :]
    else:
        content[third + {"length": 0, "event": 20}[damage]] ^= 1
    path.write_bytes(content)
    place = f"cut or damaged at byte {third} of {len(content)}, after step 2"
    with pytest.warns(UserWarning, match=place) as warned:
        assert read_scalars(tmp_path) == {"objective/f": {1: 0.25, 2: 0.5, 4: 1.0}}
    assert len(warned) == 1


def test_a_run_without_events_has_no_scalars(tmp_path):
    assert read_scalars(tmp_path) == {}


def test_every_step_is_of_one_block():
    values = {step: float(step) for step in range(0, 12)}
    blocks = [of_block(values, block, 4) for block in range(3)]
    assert blocks == [
        {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0},
        {1: 5.0, 2: 6.0, 3: 7.0, 4: 8.0},
        {1: 9.0, 2: 10.0, 3: 11.0},
    ]
