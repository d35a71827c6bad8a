"""The pages and the table of options that are made from the code: one page per command. A hook of mkdocs.

`python docs/reference.py`, which `make docs` calls, writes the pages next to the others, to be read without a site,
too, and the table that the command line prints its help from, `datamask_pl/commands/options.json`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import docstring_parser
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from datamask_pl.callbacks.logger import RunLogger
from datamask_pl.cli import COMMANDS
from datamask_pl.cli_options import TABLE
from datamask_pl.commands.fit import TRAINER_DEFAULTS, FitCLI
from datamask_pl.objectives import DiSF, FacilityLocation, PairwiseSimilarity

ROOT = Path(__file__).parents[1]
_SHIM = "https://unpkg.com/iframe-worker/shim"
Row = tuple[str, str, str, str]
_BY_HAND = [
    (
        "--config",
        "path",
        "",
        "a YAML file of options, any number of times; the later of files and command line wins",
    ),
    ("--ckpt_path", "path", "null", "`last`, a run's folder or one of its checkpoints: continues that run"),
    ("--seed_everything", "bool or int", "false", "Lightning's; a mask depends on `data.seed` instead"),
    ("--print_config", "", "", "prints the options as YAML, with their defaults, and ends"),
]
_NESTED = {
    "model.diversity: facility_location": FacilityLocation,
    "model.diversity: pairwise": PairwiseSimilarity,
    "model.diversity: disf": DiSF,
    "trainer.logger: datamask_pl.callbacks.logger.RunLogger": RunLogger,
}


def fit_options() -> list[Row]:
    """Option, type, default and meaning of every option of fit, Lightning's own last."""
    cli = FitCLI.__new__(FitCLI)  # only to ask which options it adds
    cli.trainer_class = Trainer
    parser = LightningArgumentParser()
    cli.add_core_arguments_to_parser(parser)
    rows = list(_BY_HAND)
    for action in parser._actions:
        name = action.option_strings[0] if action.option_strings else ""
        is_group = type(action).__name__ in ("_ActionConfigLoad", "_ActionHelpClassPath", "_HelpAction")
        if not is_group and name and ".help" not in name:
            kind = getattr(action, "_typehint", None) or action.type
            default = "needed" if action.required else describe_default(action.default)
            # jsonargparse adds the type and the default, which have places of their own
            text = re.sub(r" \((required, )?type: .*$", "", _one_line(action.help or ""))
            rows.append((name, describe_type(kind), default, text))
    return rows


def options_table() -> str:
    """What the command line knows of every command before it imports anything."""
    entries = {}
    for name in COMMANDS:
        function = FitCLI if name == "fit" else _function(name)
        rows = fit_options() if name == "fit" else [*signature_rows(function, "--"), *_BY_HAND[:1]]
        description = _one_line(" ".join(_summary(function)))
        head = json.dumps({"usage": _usage(name, rows), "description": description})
        lines = ",\n".join(f"  {json.dumps([*row[:3], _one_line(row[3])], ensure_ascii=False)}" for row in rows)
        entries[name] = f'{json.dumps(name)}: {head[:-1]}, "options": [\n{lines}\n]}}'
    return "{" + ",\n".join(entries.values()) + "}\n"


def options_page() -> str:
    """The page of fit's options."""
    rows = [row for row in fit_options() if _group(row[0]) != "trainer"]
    lines = [
        "# Options of fit",
        "",
        f"    python cli.py {_usage('fit', rows)}",
        "",
        "Each can stand in a YAML file, on the command line, or in an environment variable: `--model.select_ratio` is "
        "`DATAMASK_FIT__MODEL__SELECT_RATIO`. Everything has a default but `data.path`. Made from the code.",
        "",
    ]
    for group in dict.fromkeys(_group(name) for name, *_ in rows):
        lines += [f"## {group}", "", *table(row for row in rows if _group(row[0]) == group), ""]
    for title, kind in _NESTED.items():
        lines += [f"## {title}", "", *_summary(kind), ""]
        own = list(signature_rows(kind, ""))
        lines += [*(table(own) if own else ["It has no options."]), ""]
    lines += [
        "## trainer",
        "",
        "Lightning's own; `python cli.py fit --help` lists them. What differs here from Lightning's defaults:",
        "",
        *[f"- `trainer.{name}`: `{describe_default(value)}`" for name, value in TRAINER_DEFAULTS.items()],
        "",
    ]
    return "\n".join(lines)


def command_page(name: str) -> str:
    """The page of a command."""
    if name == "fit":
        return "\n".join(
            [
                "# fit",
                "",
                f"{COMMANDS[name].capitalize()}.",
                "",
                "[Its options](../options.md) have a page of their own.",
            ]
        )
    function = _function(name)
    rows = list(signature_rows(function, "--"))
    lines = [f"# {name}", "", f"    python cli.py {_usage(name, rows)}", "", *_summary(function), "", *table(rows), ""]
    raises = docstring_parser.parse(inspect.getdoc(function) or "").raises
    if raises:
        lines += ["It ends with one line and code 2", ""]
        lines += [f"- {_one_line(item.description or '').removesuffix('.')[:1].lower()}"
                  f"{_one_line(item.description or '').removesuffix('.')[1:]}" for item in raises]  # fmt: skip
    return "\n".join([*lines, ""])


def signature_rows(function: Any, prefix: str) -> Iterable[Row]:  # noqa: ANN401
    """A row a parameter, from the signature and the docstring of a function or class."""
    texts = {item.arg_name: item.description for item in docstring_parser.parse(inspect.getdoc(function) or "").params}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        is_needed = parameter.default is inspect.Parameter.empty
        default = "needed" if is_needed else describe_default(parameter.default)
        yield f"{prefix}{parameter.name}", describe_type(parameter.annotation), default, texts[parameter.name] or ""


def describe_type(kind: Any) -> str:  # noqa: ANN401
    """A type in words."""
    if kind is None or kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    if get_args(kind) and get_origin(kind) in (list, dict, tuple, set):
        inner = ", ".join(describe_type(part) for part in get_args(kind))
        return f"{get_origin(kind).__name__} of {inner}"
    if get_args(kind):
        return " or ".join(dict.fromkeys(describe_type(part) for part in get_args(kind)))
    return getattr(kind, "__name__", str(kind))


def describe_default(value: Any) -> str:  # noqa: ANN401
    """A default as YAML would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Namespace, dict)):
        return str(dict(value).get("class_path", dict(value)))
    return str(value)


def table(rows: Iterable[Row]) -> list[str]:
    """A table of options."""
    lines = ["| option | default | type | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in rows:
        shown = f"`{default}`" if default not in ("", "needed") else default
        lines.append(f"| `{name}` | {shown} | {kind} | {_cell(text)} |")
    return lines


def _usage(name: str, rows: list[Row]) -> str:
    needed = [option for option, _, default, _ in rows if default == "needed"]
    words = [f"{option} {option.lstrip('-').rpartition('.')[2].upper()}" for option in needed]
    return " ".join([name, *["[--config FILE.yaml]"] * (name == "fit"), *words, "[options]"])


def _function(name: str) -> Any:  # noqa: ANN401
    return getattr(import_module(f"datamask_pl.commands.{name}"), name)


def _group(name: str) -> str:
    return name.removeprefix("--").rpartition(".")[0] or "run"


def _summary(kind: Any) -> list[str]:  # noqa: ANN401
    parsed = docstring_parser.parse(inspect.getdoc(kind) or "")
    return [text for text in (parsed.short_description or "", "", parsed.long_description or "")]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def pages() -> dict[str, str]:
    """All pages that are made from the code, by their place below docs/."""
    texts = {"options.md": options_page(), **{f"commands/{name}.md": command_page(name) for name in COMMANDS}}
    return {place: text.rstrip() + "\n" for place, text in texts.items()}


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401
    """Adds the configurations that other pages link to."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "configs").rglob("*")):
        if path.is_file():
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401
    """Turns links to the repository's configurations into links to their copies in the site."""
    return markdown.replace("](../configs/", "](configs/")


def on_post_page(output: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Loads the search's helper from the site instead of from a public server, where the theme has it."""
    return output.replace(_SHIM, "../" * page.url.count("/") + "assets/worker.js")


def on_post_template(output_content: str, **_: Any) -> str:  # noqa: ANN401
    """The same for the page that a server shows where there is none."""
    return output_content.replace(_SHIM, "assets/worker.js")


if __name__ == "__main__":
    for place, text in pages().items():
        path = ROOT / "docs" / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    TABLE.write_text(options_table(), encoding="utf-8")
