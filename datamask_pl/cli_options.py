"""Help, and checks of option names and simple values, from a table: both are there before any library is imported.

`docs/reference.py` writes the table, `commands/options.json`, from the parsers; a test holds it equal to them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import textwrap
from argparse import ArgumentError
from functools import reduce
from itertools import zip_longest
from operator import or_
from pathlib import Path
from typing import Any, Literal

from datamask_pl.errors import program

TABLE = Path(__file__).parent / "commands" / "options.json"
_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "null": None}
# Flags of the reference implementation.
_OTHER_NAMES = {
    "lamb": "--model.quality_weight",
    "n_rollout": "--model.num_rollouts",
    "n_epochs": "--model.num_steps",
    "algorithm": "--model.diversity",
}
# Names of options before they were renamed.
_OLD_NAMES = {"compare": {"--competitors": "--baselines"}}
_ALWAYS = ("-h", "--help", "--config", "-c", "--print_config")


def read(command: str) -> dict[str, Any]:
    """What a command does (`description`), its `usage`, and `options`: name, type, default and meaning of each."""
    entry: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))[command]
    return entry


def help_text(command: str) -> str:
    """The help of a command."""
    entry = read(command)
    lines = [f"usage: {program()} {entry['usage']}", "", textwrap.fill(entry["description"], 120)]
    group = ""
    for name, kind, default, meaning in entry["options"]:
        if group != (group := name.rpartition(".")[0]):
            lines.append("")
        shown = ", ".join(text for text in (kind, default if default == "needed" else f"default: {default}") if text)
        lines.append(f"  {name}  ({shown})" if default else f"  {name}  {kind}".rstrip())
        lines += textwrap.wrap(meaning, 120, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def with_current_names(command: str, arguments: list[str]) -> list[str]:
    """The arguments, with options of an old name under the current one.

    Example:
        >>> with_current_names("compare", ["--competitors=[random]", "--run", "x"])
        ['--baselines=[random]', '--run', 'x']
    """
    for old, new in _OLD_NAMES.get(command, {}).items():
        arguments = [re.sub(rf"^{old}(?=[+=]|$)", new, argument) for argument in arguments]
    return arguments


def check(command: str, arguments: list[str]) -> None:
    """Refuses options that do not exist, simple values of a wrong type, and a command line that lacks an option.

    What the table does not decide, such as options of a class, is left to the parser.

    Raises:
        ArgumentError: Names the option, and the one that was meant.
    """
    if "--" in arguments:
        return
    rows = {name: (kind, default) for name, kind, default, _ in read(command)["options"]}
    given: dict[str, str | None] = {}
    for argument, following in zip_longest(arguments, arguments[1:]):
        if argument.startswith("--"):
            name, is_joined, value = argument.partition("=")
            is_value = following is not None and not following.startswith("--")
            given[name.removesuffix("+")] = value if is_joined else following if is_value else None
    unknown = [name for name in given if not _is_known(name, rows)]
    if unknown:
        raise ArgumentError(None, "unrecognized arguments: " + ", ".join(name + _meant(name, rows) for name in unknown))
    missing = [name for name, (_, default) in rows.items() if default == "needed" and not _is_given(name, given)]
    # a config, or a variable of fit's, may hold what the command line lacks; help and --print_config need nothing
    is_elsewhere = any(name.startswith("DATAMASK_") for name in os.environ) or "-c" in arguments
    if missing and not is_elsewhere and not any(name.endswith(("config", "help")) for name in given):
        raise ArgumentError(None, f"the following arguments are required: {', '.join(name[2:] for name in missing)}")
    _check_values({name: value for name, value in given.items() if value is not None and name in rows}, rows)


def _check_values(given: dict[str, str], rows: dict[str, tuple[str, str]]) -> None:
    """Parses the values of simple types as the whole parser would."""
    kinds = {name: kind for name in given if (kind := _type(rows[name][0])) is not None}
    if not kinds:
        return
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind)
    parser.parse_args([word for name in kinds for word in (name, given[name])])


def _type(kind: str) -> Any:  # noqa: ANN401
    """The type that the table describes, such as `int or null`; None if it is not a simple one."""
    names = kind.split(" or ")
    if all(name in _TYPES for name in names):
        return reduce(or_, (_TYPES[name] for name in names))
    return Literal[tuple(kind.split(", "))] if ", " in kind and " " not in kind.replace(", ", "") else None


def _is_known(name: str, rows: dict[str, Any]) -> bool:
    """True if the table has the option, the group, or the class or mapping that an option belongs to."""
    parents = [name[:end] for end in range(len(name)) if name[end] == "."]
    is_group = any(row.startswith(f"{name}.") for row in rows)
    return name in rows or name in _ALWAYS or is_group or any(parent in rows for parent in parents)


def _is_given(name: str, given: dict[str, Any]) -> bool:
    return name in given or name.rpartition(".")[0] in given


def _meant(name: str, rows: dict[str, Any]) -> str:
    """The option that was probably meant, as a question; empty if none is near."""
    plain = name.removeprefix("--").replace("-", "_")
    last = plain.rpartition(".")[2]
    found = [_OTHER_NAMES[last]] if _OTHER_NAMES.get(last) in rows else []
    found += [row for row in rows if row.removeprefix("--").rpartition(".")[2] == last]
    found += difflib.get_close_matches(f"--{plain}", rows, n=1, cutoff=0.75)
    found += [row for row in rows if row.startswith(f"--{plain}")]
    lasts = {row.removeprefix("--").rpartition(".")[2]: row for row in rows}
    found += [lasts[near] for near in difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)]
    return f"; did you mean {found[0]}?" if found else ""
