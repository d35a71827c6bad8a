"""The command line. Imports what a command needs only when it is called, so that `--help` is quick."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TextIO

from datamask_pl import __version__
from datamask_pl.errors import (
    AgreementError,
    DatamaskError,
    DatamaskWarning,
    PreemptedError,
    RankFailedError,
    launched_rank,
)

COMMANDS = {
    "fit": "learn a mask from feature parquet files, block by block",
    "sample": "write a small real text corpus, made from the documentation of the installed Python",
    "embed": "text parquet to feature parquet",
    "export": "another ratio, cost or quota from the logits of a finished mask, without training",
    "apply": "mask and source shards to filtered shards",
    "compare": "a mask beside random, top quality, greedy and others",
    "report": "one HTML file that shows what a mask is worth and what it keeps",
}
_GO_ON = {
    "fit": "; the same command goes on with it, where --run_name or --ckpt_path last names the run",
    "embed": "; with --model the same command goes on with it",
    "apply": "; the same command goes on with it",
    "export": "; the same command goes on with it",
}
FAILURE = 1
USAGE_ERROR = 2
INTERRUPTED = 130
TRY_AGAIN = 75
_OUTER_COMMA = re.compile(r", (?![^\[]*\])")


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
        args: command line without the program's name; sys.argv's by default.

    Raises:
        SystemExit: With code 2 and one line on stderr if the user's input cannot be used; with 130 on Ctrl-C; with 75
            if it was told to end by a signal, has saved, and can be continued.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return
    if arguments[0] == "--version":
        print(f"datamask_pl {__version__}")
        return
    command = arguments.pop(0)
    if command not in COMMANDS:
        _fail(f"there is no command {command!r}; the commands are {', '.join(COMMANDS)}.")
    from jsonargparse import ArgumentError

    if args is None:
        _show_warnings()
    try:
        _run(command, arguments, is_from_shell=args is None)
    except PreemptedError as error:
        if launched_rank() == 0:
            print(f"stopped: {error}", file=sys.stderr, flush=True)
        # Lightning kills the run if a process that it started itself ends with another code than 0
        is_child = "RANK" not in os.environ and "SLURM_PROCID" not in os.environ and launched_rank() > 0
        sys.exit(0 if is_child else TRY_AGAIN)
    except (RankFailedError, AgreementError) as error:
        _fail(str(error), is_said_by_all=error.is_on_all_ranks, code=FAILURE)
    except DatamaskError as error:
        _fail(str(error), is_said_by_all=error.is_on_all_ranks)
    except ArgumentError as error:
        message = _one_line(str(error))
        _fail(_in_config(message, arguments) + _hint(command, message))
    except UnicodeDecodeError as error:
        text = _unread_config(arguments) or "a file that should be text"
        _fail(f"{text} is no text ({error}); a config is a YAML file.")
    except OSError as error:
        # a disk or a network that fails where nobody expected it; the system's words name the file, but not of a read
        name = None if error.filename else _unread_config(arguments)
        cause = f"config {name} cannot be read: {error.strerror}" if name else _one_line(str(error))
        _fail(f"{cause}; the same command can be given again.", code=FAILURE)
    except Exception as error:
        if str(error) == "embedded null byte":  # what the system says of such a path
            _fail("a path holds a zero byte; remove it.")
        if type(error).__name__ != "MisconfigurationException":  # named, so that --help of others imports no Lightning
            raise
        _fail(_one_line(str(error)))
    except KeyboardInterrupt:
        _end_interrupted(command)
    except SystemExit as error:
        # Lightning answers Ctrl-C with exit(1).
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        _end_interrupted(command)


def _show_warnings() -> None:
    """From here on, a warning of ours is one line; Python would add where in the code it is raised."""
    show = warnings.showwarning

    def show_ours(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None and issubclass(category, DatamaskWarning):
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_ours


def _run(command: str, arguments: list[str], *, is_from_shell: bool) -> None:
    if command == "fit":
        # where a process is lost, torch's store would print its own stack on top of our line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from datamask_pl.commands.fit import run_fit

        run_fit(None if is_from_shell else arguments)
        return
    from jsonargparse import auto_cli

    auto_cli(
        _function(command),
        args=arguments,
        as_positional=False,
        exit_on_error=False,
        allow_abbrev=False,
        prog=f"python cli.py {command}",
    )


def _function(command: str) -> Callable[..., None]:
    """The function that a command is named after, in the module of its name."""
    function: Callable[..., None] = getattr(import_module(f"datamask_pl.commands.{command}"), command)
    return function


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: python cli.py COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "python cli.py COMMAND --help lists the options of a command."])


def _one_line(message: str) -> str:
    """The parser's message without its line breaks; where a value is of none of its types, what matters of it."""
    line = " ".join(message.split()).removeprefix("error: ")
    # of several types: what may be given, why none of it fits, what was given
    union = re.search(
        r'Parser key "([^"]+)": .*?Subtypes: \[(.*?)\] Errors: (.*) Given value type: .* Given value: (.*)', line
    )
    if union is not None:
        key, kinds, errors, given = union.groups()
        if entry := re.search(r"Problem with given class_path '[^']*\.WeightedObjective': (.*)", errors):
            return f"{key}: an entry of the list: {_one_line(entry[1])}"
        if problem := re.search(r"- (Problem with .*?)(?= - Expected|$)", errors):
            return f"{key}: {problem[1]}; got {given}"
        return f"{key} must be {', or '.join(map(_kind, _OUTER_COMMA.split(kinds)))}; got {given}"
    if single := re.fullmatch(r'Parser key "([^"]+)": Expected an? (.*?)\. Got value: (.*)', line):
        return f"{single[1]} must be {_kind(single[2])}; got {single[3]}"
    line = re.sub(r'^Parser key "([^"]+)": ', r"\1: ", line)
    required = re.fullmatch(r"(.* arguments are required: )(.*)", line)
    if required is not None:
        return required[1] + ", ".join(f"--{name.removeprefix('fit.')}" for name in required[2].split(", "))
    return line


def _in_config(message: str, arguments: list[str]) -> str:
    """The message with the names of the config files, where the parser has read one as a text without a name."""
    if not message.startswith("Problems parsing config: "):
        return message
    names = _configs(arguments)
    problem = message.removeprefix("Problems parsing config: ").replace(' in "<unicode string>",', " at")
    return f"config {' or '.join(names) or 'file'} is no YAML: {problem}"


def _configs(arguments: list[str]) -> list[str]:
    names = [name for option, name in pairwise(arguments) if option in ("--config", "-c")]
    return names + [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]


def _unread_config(arguments: list[str]) -> str | None:
    """The first config that is no text or cannot be read; options, and variables, may also name one of a part."""
    values = [argument.rpartition("=")[2] for argument in arguments]
    values += [value for name, value in os.environ.items() if name.startswith("DATAMASK_")]
    for name in _configs(arguments) + [value for value in values if value.endswith((".yaml", ".yml", ".json"))]:
        try:
            if os.path.isfile(name):
                Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return name
    return None


def _kind(annotation: str) -> str:
    """A type, such as `dict[str, float] | None`, as users write it."""
    text = re.sub(r"<class '([^']*)'>", r"\1", annotation).replace("NoneType", "null")
    text = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", text)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
    text = text.replace("list[str]", "a list such as [one, two]")
    text = text.replace("dict[str, float]", "a mapping of names to float such as {name: 1.0}")
    text = text.replace("list[WeightedObjective]", "a list of {objective: one of these, weight: number}")
    return re.sub(r"\bObjective\b", "the class path of an Objective of your own", text)


def _hint(command: str, message: str) -> str:
    """What to do about a command line that does not parse."""
    if re.match(r"unrecognized arguments: [^-]\S*\.parquet\b", message):
        return " (put a pattern in quotes, or the shell makes several arguments of it)"
    return f" (python cli.py {command} --help lists the options)"


def _end_interrupted(command: str) -> NoReturn:
    if launched_rank() == 0:
        hint = _GO_ON.get(command, "")
        print(f"interrupted{hint}", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)


def _fail(message: str, *, is_said_by_all: bool = False, code: int = USAGE_ERROR) -> None:
    """Prints one line and ends; what every rank says is printed by rank 0 alone."""
    rank = launched_rank()
    if not (is_said_by_all and rank):
        prefix = f"error on rank {rank}: " if rank else "error: "
        print(prefix + message, file=sys.stderr, flush=True)
    sys.exit(code)
