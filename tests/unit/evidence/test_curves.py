"""What was logged is read back as it was logged."""

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
