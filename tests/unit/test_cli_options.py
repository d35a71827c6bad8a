"""Help and the first checks come from a table, need no library, and say what the whole parser would."""

import subprocess
import sys
from argparse import ArgumentError

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from datamask_pl import cli, cli_options
from datamask_pl.commands.fit import FitCLI


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--model.selct_ratio", "--model.select_ratio"),
        ("--model.select-ratio", "--model.select_ratio"),
        ("--select_ratio", "--model.select_ratio"),
        ("--num_rolouts", "--model.num_rollouts"),
        ("--lamb", "--model.quality_weight"),
        ("--n_rollout", "--model.num_rollouts"),
        ("--n_epochs", "--model.num_steps"),
        ("--algorithm", "--model.diversity"),
        ("--model.sel", "--model.select_ratio"),
        ("--trainer.max_epoch=3", "--trainer.max_epochs"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(words, meant):
    with pytest.raises(ArgumentError, match=f"; did you mean {meant}\\?$"):
        cli_options.check("fit", ["--data.path", "x", words, "1"])


@pytest.mark.parametrize(
    "words",
    [
        "--data.path x --model.num_steps 3 --model.diversity disf",
        "--data.path+ x --data.path+ y --model.max_lr 1e-2 --model.patience null",
        "--data files.yaml --trainer.logger.init_args.save_dir s --data.quality_columns.score 1.0",
        "--config c.yaml --trainer.callbacks+ a.B --model.diversity.help",
        "--data.path x --print_config=skip_null --trainer.precision 16-mixed --trainer.max_epochs -1",
    ],
)
def test_what_the_parser_may_accept_is_left_to_it(words):
    cli_options.check("fit", words.split())


def test_wrong_values_of_simple_types_get_the_message_of_the_whole_parser():
    command_line = FitCLI.__new__(FitCLI)  # only to ask which options it adds
    command_line.trainer_class = Trainer
    parser = LightningArgumentParser(exit_on_error=False)
    command_line.add_core_arguments_to_parser(parser)
    checked = 0
    for name, kind, *_ in cli_options.read("fit")["options"]:
        if cli_options._type(kind) is None or name == "--seed_everything":
            continue
        with pytest.raises(ArgumentError) as early:
            cli_options.check("fit", ["--data.path", "x", name, "no-such"])
        with pytest.raises(ArgumentError) as late:
            parser.parse_args(["--data.path", "x", name, "no-such"])
        assert str(early.value) == str(late.value)
        checked += 1
    assert checked > 30


@pytest.mark.parametrize("words", ["--competitors [random]", "--competitors=[random]", "--competitors+ random"])
def test_compare_still_takes_baselines_under_their_old_name(words, monkeypatch):
    seen = {}

    def compare(run: str, baselines: list[str] | None = None) -> None:
        seen.update(run=run, baselines=baselines)

    monkeypatch.setattr(cli, "_function", lambda command: compare)
    cli.main(["compare", "--run", "r", *words.split()])
    assert seen == {"run": "r", "baselines": ["random"]}


def test_what_is_needed_is_asked_for_at_once_unless_a_config_or_a_variable_may_hold_it(monkeypatch):
    with pytest.raises(ArgumentError, match=r"required: data\.path$"):
        cli_options.check("fit", ["--model.num_steps", "3"])
    monkeypatch.setenv("DATAMASK_FIT__DATA__PATH", "x")
    cli_options.check("fit", [])


@pytest.mark.parametrize("words", ["fit --help", "apply -h", "fit --modl.num_steps 3", "report --run r --help"])
def test_neither_help_nor_a_wrong_name_waits_for_a_library(words):
    code = f"""
import sys
from datamask_pl.cli import main
try:
    main({words.split()})
except SystemExit as ended:
    assert ended.code == 2
assert not {{"torch", "numpy", "pyarrow", "lightning", "jsonargparse"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("command", ["apply", "export", "embed", "sample"])
def test_commands_that_train_nothing_do_not_wait_for_lightning(command):
    code = f"import sys, datamask_pl.commands.{command}; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("command", ["apply", "embed", "sample"])
def test_commands_that_compute_nothing_do_not_wait_for_torch(command):
    code = f"import sys, datamask_pl.commands.{command}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_lists_each_option_with_its_type_default_and_meaning(command, capsys):
    cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python cli.py {command} ")
    for name, kind, _, meaning in cli_options.read(command)["options"]:
        assert f"\n  {name}" in text
        assert kind in text
        assert meaning.split()[0] in text


@pytest.mark.parametrize(
    ("called", "words"),
    [
        ("cli.py", "python cli.py"),
        ("/opt/venv/bin/datamask_pl", "datamask_pl"),
        ("/x/datamask_pl/__main__.py", "python -m datamask_pl"),
        ("../cli.py", "python ../cli.py"),
        ("/x/pytest/__main__.py", "python cli.py"),
    ],
)
def test_the_next_command_is_called_as_this_one_was(monkeypatch, capsys, called, words):
    monkeypatch.setattr(sys, "argv", [called])
    cli.main([])
    assert capsys.readouterr().out.startswith(f"usage: {words} COMMAND")


def test_without_the_packages_one_line_says_how_to_get_them(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["sample", "--output", "x"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: package jsonargparse is not installed here; run `make install`")
