"""What the command line says, whichever command it is."""

import warnings

import pytest

from datamask_pl import cli
from datamask_pl.checks import warn_of_few_steps
from datamask_pl.errors import DataFileError
from datamask_pl.mask_file import MANIFEST_NAME, read_complete


def test_a_warning_of_ours_is_one_line_and_one_of_others_says_where_it_is_from(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others = []
        warnings.showwarning = lambda *args: others.append(args)
        cli._show_warnings()
        warn_of_few_steps(20, 0.1)
        warnings.warn("of a library", stacklevel=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: data.partial 0.1: ")
    assert [str(args[0]) for args in others] == ["of a library"]
    assert others[0][2] == __file__


@pytest.mark.parametrize(
    ("args", "missing"),
    [(["fit"], "--data.path"), (["apply", "--mask", "m"], "--source, --output"), (["embed", "--x", "1"], "--x")],
)
def test_options_are_named_as_they_are_given(capsys, args, missing):
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f": {missing} " in line


def test_whoever_gives_the_folder_of_a_run_for_that_of_its_mask_is_told_where_it_is(tmp_path):
    (tmp_path / "mask").mkdir()
    (tmp_path / "mask" / MANIFEST_NAME).touch()
    with pytest.raises(DataFileError, match=rf"it has no _manifest\.json; the run's mask is {tmp_path}/mask\."):
        read_complete(tmp_path)
