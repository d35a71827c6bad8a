"""The command line. Imports what a command needs only when it is called, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import ArgumentError  # the class that jsonargparse raises
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn, TextIO

from datamask_pl import __version__, cli_messages, cli_options
from datamask_pl.errors import (
    AgreementError,
    DatamaskError,
    DatamaskWarning,
    PreemptedError,
    RankFailedError,
    launched_rank,
    program,
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
FAILURE = 1
USAGE_ERROR = 2
INTERRUPTED = 130
TRY_AGAIN = 75
# The first class that fits decides.
EXIT_CODES: dict[type[Exception], int] = {
    PreemptedError: TRY_AGAIN,
    RankFailedError: FAILURE,
    AgreementError: FAILURE,
    DatamaskError: USAGE_ERROR,
    ArgumentError: USAGE_ERROR,
    UnicodeDecodeError: USAGE_ERROR,
    ModuleNotFoundError: FAILURE,
    OSError: FAILURE,
    Exception: USAGE_ERROR,
}
_CONTINUE = {
    "fit": "; the same command continues, where --run_name or --ckpt_path last names the run",
    "embed": "; with --model the same command continues",
    "apply": "; the same command continues",
    "export": "; the same command continues",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
        args: command line without the program's name; sys.argv's by default.

    Raises:
        SystemExit: With code 2 and one line on stderr if the user's input cannot be used; with 130 on Ctrl-C; with 75
            if a signal stopped the command, and it has saved and can be continued.
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
    if {"-h", "--help"} & set(arguments):
        print(cli_options.help_text(command))
        return
    if args is None:
        _show_warnings()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # a name that the terminal cannot show ends no command
                stream.reconfigure(errors="backslashreplace")
    try:
        _run(command, arguments, is_from_shell=args is None)
    except KeyboardInterrupt:
        _end_interrupted(command)
    except SystemExit as error:
        # Lightning answers Ctrl-C with exit(1).
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        _end_interrupted(command)
    except Exception as error:
        message = cli_messages.describe(error, command, arguments)
        if message is None:
            raise
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        _fail(message, code=code, is_said_by_all=getattr(error, "is_on_all_ranks", False))


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
    arguments = cli_options.with_current_names(command, arguments)
    cli_options.check(command, arguments)
    if command == "fit":
        # where a process is lost, torch's store would print its own stack on top of our line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from datamask_pl.commands.fit import run_fit

        run_fit(None if is_from_shell else arguments)
        return
    from jsonargparse import auto_cli

    auto_cli(_function(command), args=arguments, as_positional=False, exit_on_error=False, allow_abbrev=False)


def _function(command: str) -> Callable[..., None]:
    """The function that a command is named after, in the module of its name."""
    function: Callable[..., None] = getattr(import_module(f"datamask_pl.commands.{command}"), command)
    return function


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"usage: {program()} COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", f"{program()} COMMAND --help lists the options of a command."])


def _end_interrupted(command: str) -> NoReturn:
    if launched_rank() == 0:
        print(f"interrupted{_CONTINUE.get(command, '')}", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)


def _fail(message: str, *, is_said_by_all: bool = False, code: int = USAGE_ERROR) -> NoReturn:
    """Prints one line and ends; what every rank says is printed by rank 0 alone."""
    rank = launched_rank()
    if code == TRY_AGAIN:
        if rank == 0:
            print(f"stopped: {message}", file=sys.stderr, flush=True)
        # Lightning kills the run if a process that it started itself ends with another code than 0
        is_child = "RANK" not in os.environ and "SLURM_PROCID" not in os.environ and rank > 0
        sys.exit(0 if is_child else TRY_AGAIN)
    if not (is_said_by_all and rank):
        prefix = f"error on rank {rank}: " if rank else "error: "
        print(prefix + message, file=sys.stderr, flush=True)
    sys.exit(code)
