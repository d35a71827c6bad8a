"""The report is one file that says what is so, escapes what comes from data, and needs nothing from outside."""

import importlib.util
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from datamask_pl.cli import main
from datamask_pl.evidence.comparison import Comparison
from tests.support.fits import fit, manifest, parts, run_folder
from tests.support.shards import make_table, write

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

HOSTILE = "<script>alert('x')</script> $\\frac{ & \"q\""
GROUPS = [HOSTILE, "wiki", None]
OPTIONS = ("--data.block_size", "60", "--model.select_ratio", "0.2", "--model.num_steps", "4")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags, their attributes and the text of a page; checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.text = ""
        self.rows = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()


def write_sources(folder):
    for index in range(2):
        columns = {
            "source": pa.array([GROUPS[row % 3] for row in range(50)], pa.string()),
            "text": pa.array(["ü" * (row + 1) for row in range(50)]),
            "vector": pa.array([[1.0]] * 50),
        }
        write(folder / f"shards/{index}.parquet", make_table(50, first_id=50 * index, **columns))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two blocks of 50 rows, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    write_sources(folder)
    fit("--data.path", "shards", *OPTIONS, folder=folder)
    return folder


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch):
    """Pictures take seconds to draw; a test that looks at them asks for `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("datamask_pl.evidence.figures.to_svg", lambda draw, *, label: "<svg></svg>")


@pytest.fixture
def drawn():
    """Has the pictures drawn."""


def report(*args):
    main(["report", *map(str, args)])


def page_of(path):
    return Page((path / "report.html" if path.is_dir() else path).read_text(encoding="utf-8"))


class TestThePage:
    def test_it_refers_to_nothing_outside_of_itself(self, run, drawn):
        report("--run", run, "--group_column", "source", "--length_column", "text")
        text = (run / "report.html").read_text(encoding="utf-8")
        page = page_of(run)
        assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
        for name, value in page.attributes:
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("#", "data:image/png;base64,"))
            assert not name.startswith("on")
        outside = re.findall(r"\w+://\S+|[\"'(]//\S+", re.sub(r'xmlns(?::\w+)?="[^"]*"', "", text))
        assert not outside
        assert "@import" not in text
        ids = [value for name, value in page.attributes if name == "id"]
        assert len(ids) == len(set(ids))

    def test_it_has_every_section_and_the_numbers_of_the_manifest(self, run):
        report("--run", run, "--group_column", "source", "--length_column", "text")
        page = page_of(run)
        for title in (
            "What the mask is worth",
            "How it was learned",
            "Quality of what was kept",
            "Quality and diversity together",
            "Where the kept samples lie",
            "By source",
            "By length",
            "How decided it is",
            "How it was made",
        ):
            assert title in page.text
        assert page.tags.count("svg") == 5
        blocks = manifest(run)["blocks"].values()
        for label, key in (("mask", "mask"), ("random", "random"), ("top quality", "top_quality")):
            row = next(row for row in page.rows if row and row[0] == label)
            assert row[1] == f"{np.mean([block[key]['f'] for block in blocks]):.6g}"
        assert manifest(run)["plan_hash"] in page.text
        assert manifest(run)["versions"]["torch"] in page.text
        assert ["model.select_ratio", "0.2"] in page.rows
        assert ["objective", manifest(run)["settings"]["objective"]] in page.rows

    def test_groups_and_lengths_are_counted_and_escaped(self, run):
        report("--run", run, "--group_column", "source", "--length_column", "text")
        assert HOSTILE not in (run / "report.html").read_text(encoding="utf-8")
        rows = {row[0]: row[1:4] for row in page_of(run).rows if row}
        kept_N = np.concatenate([part["selected"].to_numpy() for part in parts(run)])
        for index, name in enumerate([HOSTILE, "wiki", "(none)"]):
            is_in_N = np.arange(100) % 50 % 3 == index
            kept = int((kept_N & is_in_N).sum())
            assert rows[name] == [str(is_in_N.sum()), str(kept), f"{kept / is_in_N.sum():.1%}"]
        for low in range(1, 51, 5):
            is_in_N = (np.arange(100) % 50 >= low - 1) & (np.arange(100) % 50 < low + 4)
            assert rows[f"{low} to {low + 4}"][:2] == ["10", str((kept_N & is_in_N).sum())]
        assert "the median is 25.5 of all rows" in page_of(run).text

    def test_columns_may_be_in_other_files_with_the_same_ids(self, run, workplace):
        ids = np.arange(100)[::-1]
        table = pa.table({"chunk_id": ids, "tokens": ids % 4 + 1})
        write(workplace / "tokens.parquet", table)
        report("--run", run, "--length_column", "tokens", "--metadata", "tokens.parquet")
        kept_N = np.concatenate([part["selected"].to_numpy() for part in parts(run)])
        rows = {row[0]: row[1:3] for row in page_of(run).rows if row}
        for length in range(1, 5):
            assert rows[str(length)] == ["25", str(kept_N[np.arange(100) % 4 + 1 == length].sum())]

    def test_it_has_the_comparison_if_that_was_made_of_this_mask(self, run, capsys):
        report("--run", run)
        assert "Beside other ways to choose" not in page_of(run).text
        assert f"python cli.py compare --run {run} adds" in capsys.readouterr().out
        main(["compare", "--run", str(run), "--baselines", "[random, semdedup]"])
        report("--run", run)
        page = page_of(run)
        assert "Beside other ways to choose" in page.text
        content = json.loads((run / "comparison.json").read_text())
        (shown,) = [row for row in page.rows if row and row[0] == "semdedup"]
        assert shown[1] == f"{content['blocks'][0]['rows'][2]['f']:.6g}"
        other = replace(Comparison.read(run / "comparison.json"), plan_hash="0" * 64)
        (run / "comparison.json").write_text(other.to_json())
        report("--run", run)
        assert "belongs to another mask and is not shown" in page_of(run).text
        assert "semdedup" not in page_of(run).text

    def test_secrets_of_addresses_stay_out(self, run):
        content = manifest(run)
        content["config"]["trainer"]["default_root_dir"] = "s3://key:secret@bucket/x?token=hidden"
        (run / "mask/_manifest.json").write_text(json.dumps(content))
        report("--run", run)
        text = (run / "report.html").read_text()
        assert "s3://bucket/x" in text
        assert "secret" not in text
        assert "hidden" not in text

    def test_a_part_of_the_samples_is_said_to_be_one(self, run):
        report("--run", run, "--max_samples", "30", "--block", "1", "--num_clusters", "3")
        assert "30 random samples of the 50 of block 1" in page_of(run).text

    def test_a_mask_alone_has_a_report_without_curves(self, run, workplace):
        report("--mask", run / "mask", "--output", "there/mask.html")
        page = page_of(workplace / "there/mask.html")
        assert "How it was learned" not in page.text
        assert page.tags.count("svg") == 4

    def test_a_mask_that_was_exported_has_a_report_and_its_worth_from_compare(self, run, workplace):
        main(["export", "--mask", str(run / "mask"), "--output", "more", "--select_ratio", "0.4"])
        report("--mask", "more", "--length_column", "text")
        page = page_of(workplace / "more-evidence")
        assert f"This mask was exported from the logits of {run}/mask, without training" in page.text
        assert page.text.count("Mask more") == 2
        assert "What the mask is worth" not in page.text
        assert "By length" in page.text
        assert page.tags.count("svg") == 4
        assert ["export.select_ratio", "0.4"] in page.rows
        main(["compare", "--mask", "more", "--baselines", "[random]"])
        report("--mask", "more")
        assert {"mask", "relearned", "random"} <= {row[0] for row in page_of(workplace / "more-evidence").rows if row}

    def test_an_unfinished_run_has_a_report_that_says_so(self, run):
        (run / "mask/part-00001.parquet").unlink()
        report("--run", run)
        assert "1 of 2 blocks are finished" in page_of(run).text

    @pytest.mark.filterwarnings("ignore::datamask_pl.data.scaling.ConstantQualityWarning", "ignore:all rollouts")
    @pytest.mark.parametrize(
        "options",
        [
            ("--model.select_ratio", "1"),
            pytest.param(("--data.block_size", "1", "--model.select_ratio", "1"), marks=pytest.mark.slow),
            ("--model.estimator", "group_relative", "--model.num_rollouts", "4", "--data.partial", "0.5"),
            ("--model.quality_weight", "1"),
        ],
        ids=" ".join,
    )
    def test_any_run_has_a_report(self, workplace, drawn, options):
        write(workplace / "shard.parquet", make_table(12, dim=1, quality_score=pa.array([0.0] * 12)))
        fit("--data.path", "shard.parquet", "--model.num_steps", "2", "--model.select_ratio", "0.5", *options)
        report("--run", run_folder())
        assert page_of(run_folder()).tags.count("svg") == 5


class TestFaults:
    def fails(self, capsys, *args):
        with pytest.raises(SystemExit) as stopped:
            report(*args)
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("--run", "nowhere"), "nowhere has no mask"),
            (("--run", "RUN", "--block", "2"), "block must be a finished one, from 0 to 1; got 2"),
            (("--run", "RUN", "--max_samples", "0"), "max_samples must be at least 1, got 0"),
            (("--run", "RUN", "--num_clusters", "0"), "num_clusters must be at least 1, got 0"),
            (("--run", "RUN", "--seed", "-1"), "seed must be 0 <= seed < 2^63"),
            (("--run", "RUN", "--group_column", "language"), "has no column 'language'; its columns are: chunk_id, "),
            (("--run", "RUN", "--group_column", "vector"), "group column 'vector' must hold one plain value per row"),
            (("--run", "RUN", "--length_column", "vector"), "length column 'vector' must hold numbers or texts"),
            (("--run", "RUN", "--output", "shards"), "it is a folder, not a file"),
            (("--run", "RUN", "--output", "s3://bucket/x.html"), "output must be a path on this machine"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_what_cannot_work_is_said_in_one_line_and_nothing_is_written(self, run, capsys, args, message):
        assert message in self.fails(capsys, *(arg.replace("RUN", str(run)) for arg in args))
        assert not list(run.parents[2].rglob("*report*"))

    def test_metadata_of_other_ids_is_refused(self, run, workplace, capsys):
        write(workplace / "other.parquet", pa.table({"chunk_id": np.arange(500, 600), "tokens": np.arange(100)}))
        line = self.fails(capsys, "--run", run, "--length_column", "tokens", "--metadata", "other.parquet")
        assert "metadata: the mask keeps none of the ids in these files" in line

    def test_metadata_without_the_id_column_is_refused(self, run, workplace, capsys):
        for index in range(2):
            table = make_table(50, first_id=50 * index, tokens=pa.array(range(50))).drop_columns("chunk_id")
            write(workplace / f"texts/{index}.parquet", table)
        line = self.fails(capsys, "--run", run, "--length_column", "tokens", "--metadata", "texts")
        assert "has no column 'chunk_id' to compare with the mask's ids" in line

    def test_without_matplotlib_it_says_what_to_install(self, run, capsys, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            "datamask_pl.commands.report.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
        )
        assert "report needs matplotlib; pip install 'datamask_pl[report]'" in self.fails(capsys, "--run", run)

    def test_a_damaged_comparison_is_named(self, run, capsys):
        (run / "comparison.json").write_text('{"format": 1}')
        line = self.fails(capsys, "--run", run)
        assert "comparison.json cannot be read (it has format 1, this version reads 2)" in line
        assert "run compare again or delete it" in line

    def test_a_number_that_has_changed_in_the_comparison_is_noticed(self, run, capsys):
        main(["compare", "--run", str(run), "--baselines", "[random]"])
        path = run / "comparison.json"
        path.write_text(path.read_text().replace('"num_selected": 10', '"num_selected": 11'))
        capsys.readouterr()
        assert "comparison.json cannot be read (its checksum is wrong)" in self.fails(capsys, "--run", run)
