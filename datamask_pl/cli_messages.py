"""One line for each error that reaches the command line, and the parser's messages as a user reads them.

The patterns are those of jsonargparse 4.53; `tests/unit/test_cli.py` holds what becomes of each.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentError  # the class that jsonargparse raises
from itertools import pairwise
from pathlib import Path

from datamask_pl.errors import DatamaskError, program

_OUTER_COMMA = re.compile(r", (?![^\[]*\])")


def describe(error: Exception, command: str, arguments: list[str]) -> str | None:
    """The error as one line; None if it is a fault of the program, which needs its traceback."""
    if isinstance(error, DatamaskError):
        return str(error)
    if isinstance(error, ArgumentError):
        message = one_line(str(error))
        return _in_config(message, arguments) + _hint(command, message)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("datamask_pl"):
        return f"package {error.name} is not installed here; run `make install` and `. .venv/bin/activate`."
    if isinstance(error, UnicodeDecodeError):
        return f"{_unread_config(arguments) or 'a file'} is not text ({error}); a config is a YAML file."
    if isinstance(error, OSError):
        # a disk or a network that fails where nobody expected it; the system names the file, but not for a read
        name = None if error.filename else _unread_config(arguments)
        cause = f"config {name} cannot be read: {error.strerror}" if name else one_line(str(error))
        return f"{cause}; run the same command again."
    if str(error) == "embedded null byte":  # the system's words for such a path
        return "a path holds a zero byte; remove it."
    # by name, so that no other command imports Lightning
    return one_line(str(error)) if type(error).__name__ == "MisconfigurationException" else None


def one_line(message: str) -> str:
    """The parser's message without line breaks; for a value that fits none of an option's types, the types alone."""
    line = " ".join(message.split()).removeprefix("error: ")
    # of several types: the allowed types, why none of them fits, the value
    union = re.search(
        r'Parser key "([^"]+)": .*?Subtypes: \[(.*?)\] Errors: (.*) Given value type: .* Given value: (.*)', line
    )
    if union is not None:
        key, kinds, errors, given = union.groups()
        if entry := re.search(r"Problem with given class_path '[^']*\.WeightedObjective': (.*)", errors):
            return f"{key}: an entry of the list: {one_line(entry[1])}"
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


def configs(arguments: list[str]) -> list[str]:
    """The config files that a command line names."""
    names = [name for option, name in pairwise(arguments) if option in ("--config", "-c")]
    return names + [argument.removeprefix("--config=") for argument in arguments if argument.startswith("--config=")]


def _in_config(message: str, arguments: list[str]) -> str:
    """The message with the names of the config files, where the parser has read one as a text without a name."""
    if not message.startswith("Problems parsing config: "):
        return message
    problem = message.removeprefix("Problems parsing config: ").replace(' in "<unicode string>",', " at")
    return f"config {' or '.join(configs(arguments)) or 'file'} is not YAML: {problem}"


def _unread_config(arguments: list[str]) -> str | None:
    """The first config that is not text or cannot be read; options, and variables, may also name one of a part."""
    values = [argument.rpartition("=")[2] for argument in arguments]
    values += [value for name, value in os.environ.items() if name.startswith("DATAMASK_")]
    for name in configs(arguments) + [value for value in values if value.endswith((".yaml", ".yml", ".json"))]:
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
    """The remedy for a command line that does not parse."""
    if re.match(r"unrecognized arguments: [^-]\S*\.parquet\b", message):
        return " (put a pattern in quotes, or the shell makes several arguments of it)"
    return f" ({program()} {command} --help lists the options)"
