"""From texts to evidence, as a new user would; and the report in a real browser."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from datamask_pl.cli import main
from tests.support.fits import ROOT, fit, run_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def commands_in(text):
    """Every `python cli.py ...` that a text shows, as its arguments."""
    return [shlex.split(words) for words in re.findall(r"python cli\.py ((?:(?! && |\n| adds ).)*)", text)]


def test_a_new_user_follows_the_readme_and_what_the_commands_say_to_a_report(workplace, capsys):
    """The README says `make quickstart`; from its first command on, whatever is printed as the next one is typed."""
    for package in ("sklearn", "matplotlib", "jinja2"):
        pytest.importorskip(package)
    assert "    make quickstart\n" in (ROOT / "README.md").read_text()
    shutil.copytree(ROOT / "configs", "configs")
    smaller = {"sample": ["--num_samples", "600"], "embed": ["--num_dimensions", "16"]}
    recipe = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    for words in commands_in(recipe.partition("@echo")[0]):
        main([*words, *smaller.get(words[0], [])])
    run = run_folder(name="quickstart")
    # the lines that the Makefile adds, for the texts
    (last,) = commands_in(recipe.partition("@echo")[2].replace('"', ""))
    main([word.replace("MASK", f"{run}/mask") for word in last])
    shown = commands_in(capsys.readouterr().out.partition("kept ")[2])
    assert [words[0] for words in shown] == ["apply", "compare", "report"]
    for words in shown:
        main(words)
    assert pq.read_table("kept")["chunk_id"].equals(pq.read_table(run / "filtered")["chunk_id"])
    assert pq.read_table("kept").num_rows == 60
    out = capsys.readouterr().out
    values = {name: float(f) for name, f in re.findall(r"^(\w+) +([\d.]+) .*%$", out, flags=re.MULTILINE)}
    assert max(values, key=values.get) == "mask"
    assert len(values) == 9
    assert "Beside other ways to choose" in (run / "report.html").read_text(encoding="utf-8")

    # another share of the same logits, and what that is worth
    main(["export", "--mask", f"{run}/mask", "--output", "fifth", "--select_ratio", "0.2"])
    shown = commands_in(capsys.readouterr().out)
    assert [words[0] for words in shown] == ["apply", "compare", "report"]
    for words in shown[1:]:
        main(words)
    assert "semdedup" in Path("fifth-evidence/report.html").read_text(encoding="utf-8")


@pytest.fixture
def browse(tmp_path):
    """Opens a page in headless Chromium: what its console says, its DOM once loaded, and a picture of it."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH")

    def open_page(path):
        picture = tmp_path / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,5000", f"--screenshot={picture}"]
        command = [CHROMIUM, *options, path.resolve().as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return re.findall(r"CONSOLE.*", shown.stderr), picture

    return open_page


def test_the_report_opens_in_a_browser_without_a_word_on_the_console(workplace, browse):
    image = pytest.importorskip("matplotlib.image")
    pytest.importorskip("jinja2")
    from tests.support.fits import write_shards

    fit("--data.path", write_shards(workplace / "shards", [120]), "--model.num_steps", "4")
    main(["report", "--run", str(run_folder())])
    page = run_folder() / "report.html"
    console, picture = browse(page)
    assert console == []
    shown = image.imread(picture)[..., :3]
    assert shown.shape[:2] == (5000, 1100)
    # something in every fifth of the page, and nothing that sticks out at its right
    assert all(part.std() > 0.01 for part in (shown[start : start + 900] for start in range(0, 3600, 900)))

    # the console is where a reference to the outside, or a fault, would show
    broken = workplace / "broken.html"
    outside = '<img src="https://example.org/x.png"></body>'
    broken.write_text(page.read_text(encoding="utf-8").replace("</body>", outside), encoding="utf-8")
    console, _ = browse(broken)
    assert "example.org" in " ".join(console)
