"""Nothing that a report shows is taken for HTML, whatever it says and wherever it comes from."""

from dataclasses import fields, is_dataclass, replace
from html import escape
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from datamask_pl.cli import main
from datamask_pl.commands import report as report_module
from tests.support.fits import fit
from tests.support.shards import make_table, write

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

EVIL = "<img src=x onerror=alert(1)>&\"'"
OPTIONS = ("--data.block_size", "30", "--model.select_ratio", "0.2", "--model.num_steps", "2")


class Page(HTMLParser):
    """The tags and the attributes of a page, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.text += data


def assert_harmless(html):
    page = Page(html)
    assert "img" not in page.tags
    assert not [name for name in page.attributes if name.startswith("on")]
    return page


def report(*args):
    main(["report", *args])


def test_names_of_files_folders_columns_and_groups_are_text(workplace):
    """Whoever writes the shards chooses these names."""
    columns = {f"group{EVIL}": pa.array([f"value{EVIL}", "plain"] * 30), f"length{EVIL}": pa.array([1, 2] * 30)}
    rows = make_table(60, **columns)
    rows = rows.rename_columns({"quality_score": f"score{EVIL}", "chunk_id": f"id{EVIL}"})
    write(workplace / f"shards{EVIL}/a{EVIL}.parquet", rows.slice(0, 30))
    write(workplace / f"shards{EVIL}/b{EVIL}.parquet", rows.slice(30))
    weights = ("--data.quality_columns", '{"score' + EVIL.replace('"', '\\"') + '": 1.0}')
    named = ("--data.id_column", f"id{EVIL}", "--run_name", f"run{EVIL}")
    fit("--data.path", f"shards{EVIL}", *weights, *named, *OPTIONS)
    run = workplace / f"runs/datamask/run{EVIL}"
    main(["compare", "--run", str(run), "--baselines", "[random]"])
    report("--run", str(run), "--group_column", f"group{EVIL}", "--length_column", f"length{EVIL}")
    page = assert_harmless((run / "report.html").read_text(encoding="utf-8"))
    for name in ("shards", "a", "score", "id", "run", "group", "value", "length"):
        assert f"{name}{EVIL}" in page.text.replace('\\"', '"'), name


def with_evil(value):
    """The same with a text that is HTML before every text."""
    if isinstance(value, str):
        return EVIL + value
    if isinstance(value, dict):
        return {name: with_evil(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_evil(part) for part in value]
    if is_dataclass(value):
        return replace(value, **{part.name: with_evil(getattr(value, part.name)) for part in fields(value)})
    return value


def count_texts(value):
    if isinstance(value, dict):
        return sum(map(count_texts, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_texts, value))
    if is_dataclass(value):
        return sum(count_texts(getattr(value, part.name)) for part in fields(value))
    return int(isinstance(value, str))


def test_every_text_that_the_page_is_given_is_escaped(workplace, monkeypatch):
    """Whatever the template shows, and wherever it shows it."""
    columns = {"source": pa.array(["one", "two"] * 30), "length": pa.array([1, None] * 30)}
    write(workplace / "shards/a.parquet", make_table(60, **columns))
    fit("--data.path", "shards", "--run_name", "mine", *OPTIONS)
    run = "runs/datamask/mine"
    main(["compare", "--run", run, "--baselines", "[random]", "--max_samples", "20"])
    render, given = report_module.render_html, []

    def render_evil(*, pictures, **content):
        given.append(content)
        return render(pictures=pictures, **with_evil(content))

    monkeypatch.setattr(report_module, "render_html", render_evil)
    report("--run", run, "--group_column", "source", "--length_column", "length")
    html = (workplace / run / "report.html").read_text(encoding="utf-8")
    assert_harmless(html)
    # some texts are shown twice, and some are compared and not shown
    assert html.count(escape(EVIL).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")) > 0.8 * count_texts(given)
