"""From texts to evidence, as a new user would; and the report in a real browser."""

import re
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest
from fits import ROOT, fit, run_folder

from datamask_pl.cli import main

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_a_new_user_goes_from_texts_to_a_report(workplace, capsys):
    for package in ("sklearn", "matplotlib", "jinja2"):
        pytest.importorskip(package)
    main(["sample", "--output", "quickstart-data/text.parquet", "--num_samples", "600"])
    embedding = ("--num_dimensions", "16", "--output", "quickstart-data/features.parquet")
    main(["embed", "--source", "quickstart-data/text.parquet", *embedding])
    fit("--config", str(ROOT / "configs/quickstart.yaml"))
    run = run_folder(name="quickstart")
    main(["apply", "--mask", f"{run}/mask", "--source", "quickstart-data/text.parquet", "--output", "filtered"])
    main(["compare", "--run", str(run)])
    main(["report", "--run", str(run), "--metadata", "quickstart-data/text.parquet", "--length_column", "text"])
    assert pq.read_table("filtered").num_rows == 60
    out = capsys.readouterr().out
    values = {name: float(f) for name, f in re.findall(r"^(\w+) +([\d.]+) .*%$", out, flags=re.MULTILINE)}
    assert max(values, key=values.get) == "mask"
    assert len(values) == 9
    text = (run / "report.html").read_text(encoding="utf-8")
    assert all(title in text for title in ("Beside other ways to choose", "By length", "semdedup"))


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
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return re.findall(r"CONSOLE.*", shown.stderr), picture

    return open_page


def test_the_report_opens_in_a_browser_without_a_word_on_the_console(workplace, browse):
    image = pytest.importorskip("matplotlib.image")
    pytest.importorskip("jinja2")
    from fits import write_shards

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
