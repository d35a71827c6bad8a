"""The site is built without a warning, loads nothing from elsewhere, and what it says of options and commands is so."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from datamask_pl import cli, cli_options
from datamask_pl.cli import COMMANDS, main
from tests.support.fits import ROOT, fit, manifest, parts, write_shards
from tests.support.problems import ground_set, unit_rows

DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
MADE = sorted((DOCS / "commands").glob("*.md"))


@pytest.fixture(scope="module")
def reference():
    spec = spec_from_file_location("docs_reference", DOCS / "reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_of_help(command, capsys):
    """Every option that the command line itself lists."""
    with pytest.raises(SystemExit):
        cli._run(command, ["--help"], is_from_shell=False)  # the parser's own, not the table's
    # where options may be environment variables too, their lines begin with ARG: and ENV:
    lines = re.findall(r"^ +(?:ARG: +)?-.*$", capsys.readouterr().out, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"(?<![\w-])--[a-z_]+(?:\.[a-z_]+)*", line)}


def options_of_page(text):
    return set(re.findall(r"^\| `(--[\w.]+)`", text, re.MULTILINE))


def test_every_option_of_fit_is_on_its_page_and_no_other(reference, capsys):
    listed = options_of_help("fit", capsys)
    listed = {
        name for name in listed if not re.match(r"--(trainer|help|no_|.*\.help)", name) and name != "--print_config"
    }
    groups = {"--data", "--model", "--mask", "--preemption", "--checkpoint", "--launch"}
    page = options_of_page(reference.options_page()) - {"--print_config"}
    assert {name for name in listed if name not in groups} - page == set()
    assert page - listed == set()


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "fit"])
def test_every_option_of_a_command_is_on_its_page_and_no_other(reference, capsys, command):
    listed = {name for name in options_of_help(command, capsys) if name not in ("--help", "--config", "--print_config")}
    assert options_of_page(reference.command_page(command)) == {name for name in listed if not name.startswith("--no_")}


def test_defaults_are_those_that_a_run_has(reference, workplace, capsys):
    """Oracle: the configuration that the command line resolves to."""
    with pytest.raises(SystemExit):
        main(["fit", "--data.path", "x", "--print_config"])
    text = capsys.readouterr().out
    for name, _, default, _ in reference.fit_options():
        group, _, option = name[2:].rpartition(".")
        if group and group != "trainer":
            section = re.search(rf"^{group}:\n((?:  .*\n)+)", text, re.MULTILINE)[1]
            seen = re.search(rf"^  {option}: (.*)$", section, re.MULTILINE)
            expected = "x" if name == "--data.path" else default
            assert seen is not None, name
            assert seen[1].strip("'\"") == expected.removesuffix(".0") or seen[1].strip("'\"") == expected, name


def test_the_pages_and_the_table_that_are_made_from_the_code_are_up_to_date(reference):
    for place, text in reference.pages().items():
        assert (DOCS / place).read_text(encoding="utf-8") == text, f"docs/{place} is old; make docs writes it again"
    assert cli_options.TABLE.read_text(encoding="utf-8") == reference.options_table(), "it is old; run make docs"
    written = {path.name for path in (DOCS / "commands").iterdir()}
    assert written == {f"{name}.md" for name in COMMANDS}


@pytest.mark.parametrize("page", [*PAGES, *MADE], ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading_that_there_are(page):
    """Where the pages are read in the repository, without a site."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = target.partition("#")
        if "://" in target:
            continue
        other = page.parent / name if name else page
        assert other.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


def commands_of(text):
    """Every `cli.py COMMAND ...` of the code blocks, with its continuation lines."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return re.findall(r"^(?: {4}|\$ ).*?cli\.py (\w+) (.*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_that_are_shown_have_only_options_that_there_are(page, capsys):
    for command, rest in commands_of(page.read_text()):
        if command not in COMMANDS:
            assert command.isupper(), f"{page.name} shows {command}"
            continue
        known = options_of_help(command, capsys)
        for word in shlex.split(rest, comments=True):
            name = word.partition("=")[0]
            assert not name.startswith("--") or name in known or name == "--help", f"{page.name}: {command} {name}"


def code(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("estimator", ["multilinear", "leave_one_out"])
def test_the_objective_of_the_page_trains(workplace, monkeypatch, estimator):
    (python,), (yaml,) = code("objective.md", "python"), code("objective.md", "yaml")
    Path("my_objectives.py").write_text(python)
    Path("mine.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(str(workplace))
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    shards = write_shards("shards", [80], dim=4)
    options = ("--model.estimator", estimator, "--model.num_steps", "6", "--model.quality_weight", "0")
    fit("--config", "mine.yaml", "--data.path", shards, *options, "--mask.output", "mask")
    (block,) = manifest("mask")["blocks"].values()
    assert len(parts("mask")) == 1
    names = list(block["mask"]["terms"])
    assert any("Agreement" in name or "agreement" in name for name in names), names
    assert block["mask"]["f"] > block["random"]["f"]


def test_the_objective_of_the_page_is_its_expectation(workplace, monkeypatch):
    """Oracle: all masks of six samples."""
    Path("my_objectives.py").write_text(code("objective.md", "python")[0])
    monkeypatch.syspath_prepend(str(workplace))
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    from my_objectives import Agreement

    ground = ground_set(unit_rows(6, 4, 0), 2)
    objective = Agreement(direction=[1.0, -1.0, 0.5, 0.0], power=2.0)
    p_N = torch.linspace(0.1, 0.9, 6).double()
    masks_RN = torch.tensor([[bool(code >> bit & 1) for bit in range(6)] for code in range(64)])
    weight_R = torch.where(masks_RN, p_N, 1 - p_N).prod(1)
    assert (weight_R @ objective.value(masks_RN, ground)).item() == pytest.approx(
        objective.expectation(p_N, ground).item(), rel=1e-9
    )


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("material"), reason="mkdocs-material is not installed")
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {f"{name}.html" for name in COMMANDS} <= {path.name for path in pages if path.parent.name == "commands"}
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^\s>]*", html)
        loaded += re.findall(
            r"<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload)[^>]*href=[\"']?(?:https?:)?//[^\s>]*", html
        )
        assert not loaded, f"{page.name} loads {loaded}"
        # the theme's own helper of the search would come from a public server
        place = re.search(r"<script src=\"?([./]*assets/worker\.js)", html)
        assert place, page.name
        assert (page.parent / place[1]).is_file()
    assert "facility" in (tmp_path / "site/search/search_index.js").read_text(encoding="utf-8")
    assert (tmp_path / "site/configs/slurm/fineweb.sbatch").read_bytes() == (
        ROOT / "configs/slurm/fineweb.sbatch"
    ).read_bytes()
