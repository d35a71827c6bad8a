"""What the command line says, whichever command it is."""

import warnings

import pytest

from datamask_pl import cli
from datamask_pl.errors import DataFileError
from datamask_pl.learner.options import warn_of_few_steps
from datamask_pl.mask.manifest import read_complete
from datamask_pl.mask.parts import MANIFEST_NAME


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


@pytest.mark.parametrize(
    "args",
    [["fit", "--data.path", "x", "--trainer.max_epoch", "1"], ["export", "--mask", "m", "--output", "o", "--sel", "1"]],
)
def test_no_option_can_be_abbreviated(capsys, args):
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {args[-2]};" in capsys.readouterr().err


def test_only_files_that_are_too_many_are_taken_for_a_pattern_that_the_shell_expanded(capsys):
    hints = {
        "x.parquet y.parquet": " (put a pattern in quotes",
        "--text_col body": "; did you mean --text_column? (python cli.py embed --help",
    }
    for words, hint in hints.items():
        with pytest.raises(SystemExit):
            cli.main(["embed", "--source", "a.parquet", "--output", "b.parquet", *words.split()])
        assert f"unrecognized arguments: {words.removesuffix(' body')}{hint}" in capsys.readouterr().err


def test_a_mapping_is_asked_for_by_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["fit", "--data.path", "x", "--data.quality_columns", "score"])
    line = "error: data.quality_columns must be a mapping of names to float such as {name: 1.0}, or null; got score"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("option", [["--config", "FILE"], ["--config=FILE"], ["-c", "FILE"]])
def test_a_config_that_is_no_yaml_is_named_with_the_place(capsys, tmp_path, option):
    (tmp_path / "bad.yaml").write_text("data:\n  path: x\n bad")
    with pytest.raises(SystemExit):
        cli.main(["fit", *(words.replace("FILE", str(tmp_path / "bad.yaml")) for words in option)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: config {tmp_path}/bad.yaml is not YAML: while parsing a block mapping at line 1,")
    assert "did not find expected key at line 3, column 2 " in line


def test_whoever_gives_the_folder_of_a_run_for_that_of_its_mask_is_told_where_it_is(tmp_path):
    (tmp_path / "mask").mkdir()
    (tmp_path / "mask" / MANIFEST_NAME).touch()
    with pytest.raises(DataFileError, match=rf"it has no _manifest\.json; the run's mask is {tmp_path}/mask\."):
        read_complete(tmp_path)
